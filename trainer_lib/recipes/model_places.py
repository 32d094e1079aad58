"""Where a model comes from: a name on the Hub, a folder, or nowhere yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import ConfigError


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
