"""Models of transformers with a head: by name, from a folder, or at random from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.data_info import DataInfo
from trainer_lib.recipes.lora_adapters import add_adapters
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.tokenizing import import_transformers, new_config, no_model

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
    classes, place = data.info["classes"], one_of(chosen, field=FIELD)
    if place is not None:
        _require_head(place, head, len(classes), is_new=chosen["new_head"])
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
    return build_with_head(chosen, data, head=head, task=task, **names)


def build_with_head(
    chosen: Mapping[str, Any],
    data: DataInfo,
    *,
    head: str,
    task: str,
    small: Mapping[str, Any] = SMALL,
    **settings: Any,
) -> nn.Module:
    """Build a model that reads the data's tokens.

    Args:
        chosen: `pretrained`, `folder`, `config` and `lora`; `new_head` for a head that may have another shape.
        data: the `vocabulary` and `pad_token_id` of its tokenizer.
        head: the end of the name of its class, "ForQuestionAnswering"; empty for a model without a head.
        task: peft's name of what it is for.
        small: the configuration of a model at random, where `config` says nothing else.
        settings: of its configuration.

    Raises:
        ConfigError: transformers cannot load it.
    """
    library, place = import_transformers(), one_of(chosen, field=FIELD)
    automatic = getattr(library, f"AutoModel{head}")
    if place is None:
        given = {"vocab_size": data.info["vocabulary"], "pad_token_id": data.info["pad_token_id"], **settings}
        config = new_config({**small, **chosen["config"], **given}, chosen["config"], field=f"{FIELD}.config")
        model: nn.Module = automatic.from_config(config)
    else:
        try:
            model = automatic.from_pretrained(place, ignore_mismatched_sizes=chosen.get("new_head", False), **settings)
        except (OSError, ValueError) as error:
            raise no_model(place, error, field=FIELD) from error
    if not chosen["lora"]:
        return model
    if place is None:
        what = "Adapters are for a model that has been trained."
        raise ConfigError(what, field=f"{FIELD}.lora", remedy="Give train.model.pretrained or folder as well.")
    adapted: nn.Module = add_adapters(model, chosen["lora"], task=task)
    return adapted


def _require_head(place: str, head: str, classes: int, *, is_new: bool) -> None:
    try:
        config = import_transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise no_model(place, error, field=FIELD) from error
    has_head = any(head in name for name in config.architectures or ())
    if has_head and config.num_labels != classes and not is_new:
        raise ConfigError(
            f"The model's head knows {config.num_labels} classes, and the data has {classes}.",
            field=f"{FIELD}.new_head",
            value=False,
            remedy="Set train.model.new_head=true: the head then begins at random.",
        )
