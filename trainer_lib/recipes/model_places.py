"""Where a model comes from: a name on the Hub, a folder, or nowhere yet; and the options that say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trainer_lib.errors import ConfigError


class TokenizerOptions(TypedDict):
    """Options of `prepare` for the texts of a model of transformers."""

    pretrained: NotRequired[str]
    """Name of the model on the Hub whose tokenizer is used."""
    folder: NotRequired[Path]
    """Folder of the model whose tokenizer is used."""
    files: NotRequired[dict[str, Path]]
    """Split -> its file."""
    pad_token: NotRequired[str]
    """Token that fills up short texts, for a tokenizer that has none."""
    vocabulary: NotRequired[int]
    """Tokens of a vocabulary that is learned."""


class PlacedModel(TypedDict):
    """Settings of `build_model` for a model of transformers."""

    pretrained: NotRequired[str]
    folder: NotRequired[Path]
    config: NotRequired[dict[str, Any]]
    lora: NotRequired[dict[str, Any]]
    """Train adapters of this form, and a new head, in place of all weights."""


def one_of(options: Mapping[str, Any], *, field: str) -> str | None:
    """The model by its name or folder; None where neither is given. Raises ConfigError for both, or a `config`."""
    given = [str(options[name]) for name in ("pretrained", "folder") if options[name] is not None]
    if len(given) > 1:
        what = "A model has a name or a folder, and not both."
        raise ConfigError(what, field=f"{field}.folder", value=given[1], remedy="Remove one of them.")
    if given and options.get("config"):
        what = "A model that is loaded has its own configuration."
        raise ConfigError(what, field=f"{field}.config", value=options["config"], remedy="Remove it.")
    return given[0] if given else None
