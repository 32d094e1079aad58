"""Models of transformers with a head for classes: by name, from a folder, or at random from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.data_info import DataInfo
from trainer_lib.recipes.lora_adapters import add_adapters
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.tokenizing import import_transformers, no_model

FIELD = "train.model"
MODEL: dict[str, Any] = {"pretrained": None, "folder": None, "config": {}, "new_head": False, "lora": {}}
"""The settings of `build_model` (`train.model`), with their defaults."""
SMALL: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""The model that is built at random where `config` says nothing else."""


def build_classifier(chosen: Mapping[str, Any], data: DataInfo, *, head: str, task: str) -> nn.Module:
    """Build a model for the classes of the data.

    Args:
        chosen: `pretrained`, `folder`, `config`, `new_head` and `lora`.
        data: its `classes`, and the `vocabulary` and `pad_token_id` of its tokenizer.
        head: the end of the name of its class, "ForTokenClassification".
        task: peft's name of what it is for.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    library, classes = import_transformers(), data.info["classes"]
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
    automatic = getattr(library, f"AutoModel{head}")
    place = one_of(chosen, field=FIELD)
    if place is None:
        settings = {**SMALL, **chosen["config"]}
        more = {"vocab_size": data.info["vocabulary"], "pad_token_id": data.info["pad_token_id"], **names}
        model: nn.Module = automatic.from_config(library.AutoConfig.for_model(**settings, **more))
    else:
        try:
            _require_head(library.AutoConfig.from_pretrained(place), head, len(classes), is_new=chosen["new_head"])
            model = automatic.from_pretrained(place, ignore_mismatched_sizes=chosen["new_head"], **names)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise no_model(place, error, field=FIELD) from error
    if not chosen["lora"]:
        return model
    if place is None:
        what = "Adapters are for a model that has been trained."
        raise ConfigError(what, field=f"{FIELD}.lora", remedy="Give train.model.pretrained or folder as well.")
    adapted: nn.Module = add_adapters(model, chosen["lora"], task=task)
    return adapted


def _require_head(config: Any, head: str, classes: int, *, is_new: bool) -> None:
    has_head = any(head in name for name in config.architectures or ())
    if has_head and config.num_labels != classes and not is_new:
        raise ConfigError(
            f"The model's head knows {config.num_labels} classes, and the data has {classes}.",
            field=f"{FIELD}.new_head",
            value=False,
            remedy="Set train.model.new_head=true: the head then begins at random.",
        )
