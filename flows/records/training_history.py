"""A training's log, read from the folder of its stage."""

from __future__ import annotations

from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.storage import Store

_LIMIT = 256 << 20
Entry = dict[str, Any]
"""One entry of a trainer's log, with its `step`."""


def read_training_history(stage: Store) -> list[Entry]:
    """The trainer's log, as mappings with their `step`; empty where the stage left none.

    Raises:
        StorageError: the storage cannot be read. ValueError: the file is torn.
    """
    data = stage.read_if_exists("history.json", limit=_LIMIT)
    if not data:
        return []
    # Of the steps that no log covers: all of them, where `logging_steps` is larger than the training.
    losses = stage.read_if_exists("losses.json", limit=_LIMIT)
    return [*parse_json(data), *parse_json(losses or b"[]")]
