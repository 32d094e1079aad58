"""LoRA adapters (Hu et al., 2021) by peft: few weights are trained beside a model that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.recipes.option_names import choose

FIELD = "train.model.lora"
DEFAULTS: dict[str, Any] = {
    "r": 8,
    "alpha": 16,
    "dropout": 0.0,
    "target_modules": None,
    "modules_to_save": [],
}
"""The settings of adapters: rank, scale (alpha / r), dropout, the layers that get one (unset: all linear ones but the
head), and the layers that are trained as a whole."""
_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_HEADS = r"(.*\.)?(classifier|score|qa_outputs)(\..*)?"


def add_adapters(model: Any, options: Mapping[str, Any], *, task: str = "CAUSAL_LM") -> Any:
    """The model with adapters: only these are trained, saved and published.

    Args:
        model: a model of transformers.
        options: some of `DEFAULTS`.
        task: peft's name of what the model is for.

    Raises:
        ConfigError: a setting is unknown, or the model has no such layers. MissingExtraError: peft is not installed.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("Adapters need peft.", extra="transformers") from error
    config = peft.LoraConfig(
        task_type=task,
        r=chosen["r"],
        lora_alpha=chosen["alpha"],
        lora_dropout=chosen["dropout"],
        target_modules=chosen["target_modules"] or "all-linear",
        modules_to_save=chosen["modules_to_save"] or None,
        exclude_modules=_HEADS if task in _WITH_HEADS else None,  # peft trains them as a whole
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        remedy = "Name layers of the model, or leave target_modules out."
        raise ConfigError(
            f"peft cannot add the adapters: {first_line(error)}",
            field=FIELD,
            value=dict(options),
            remedy=remedy,
        ) from error
