"""Whether there are adapters where a spec has them merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_lib.errors import ConfigError
from trainer_lib.recipe_names import ABOUT, recipe_name

if TYPE_CHECKING:
    from flows.spec.spec import PipelineSpec


def check_adapters(spec: PipelineSpec) -> None:
    """Refuse to merge adapters that a recipe by name does not train; of other recipes the trained model tells.

    Raises:
        ConfigError: the spec merges adapters and trains none.
    """
    if not (spec.publish.enabled and spec.publish.merge_adapters):
        return
    if recipe_name(spec.recipe) in ABOUT and not spec.train.model.get("lora"):
        raise ConfigError(
            "The spec trains no adapters, so there are none to merge.",
            field="publish.merge_adapters",
            value="true",
            remedy="Remove it: all weights of the model are published. Or train adapters: train.model.lora={r: 8}.",
        )
