"""Models of transformers that continue texts: by name, from a folder, or at random from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.tokenizing import import_transformers, new_config, no_model

DTYPES = ("float32", "bfloat16", "float16", "auto")
"""Types of a loaded model's weights."""
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
"""The model that is built at random where `config` says nothing else."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What a model has to know of its tokenizer besides the number of its tokens."""


def new_causal_model(
    config: Mapping[str, Any], *, length: int, vocabulary: int, ends: Mapping[str, Any], field: str = "train.model"
) -> Any:
    """A model with weights at random, for rows of `length` tokens; `field` holds its `config`."""
    given = {"max_position_embeddings": length, "vocab_size": vocabulary, **ends}
    made = new_config({**SMALL, **given, **config}, config, field=f"{field}.config")
    return import_transformers().AutoModelForCausalLM.from_config(made)


def load_causal_model(place: str, *, dtype: str, vocabulary: int, field: str) -> Any:
    """The model of this name, or in this folder.

    Args:
        place: the model's name, or its folder.
        dtype: one of `DTYPES`.
        vocabulary: number of tokens that the tokenizer of the data has.
        field: the setting that names the model, for errors.

    Raises:
        ConfigError: transformers cannot load it, or it does not know all tokens.
    """
    try:
        model = import_transformers().AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    except (OSError, ValueError) as error:
        raise no_model(place, error, field=field) from error
    known = model.get_input_embeddings().num_embeddings
    if known < vocabulary:
        what = f"The model knows {known:,} tokens, and the tokenizer of the data has {vocabulary:,}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field=field, value=place, remedy=remedy)
    return model


def require_positions(place: str, length: int, *, field: str) -> None:
    """Refuse rows that are longer than the model can read, where it says how much that is.

    Args:
        place: the model's name, or its folder.
        length: the most tokens of a row.
        field: the setting with the length, for errors.

    Raises:
        ConfigError: rows are longer.
    """
    try:
        config = import_transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError):
        return  # a tokenizer may be alone in its folder
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        what = f"The model reads at most {most:,} tokens."
        raise ConfigError(what, field=field, value=length, remedy=f"Give at most {most}.")
