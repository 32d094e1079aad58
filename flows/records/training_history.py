"""A training's log, read from the folder of its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.checkpoint.layout import DATA, TRAINER_STATE
from trainer_lib.errors import StorageError
from trainer_lib.storage import Store

_LIMIT = 256 << 20
Entry = dict[str, Any]
"""One entry of a trainer's log, with its `step`."""


def read_training_history(stage: Store) -> list[Entry]:
    """The trainer's log, one mapping for each entry with its `step`; empty where the stage left none.

    Raises:
        StorageError: the storage cannot be read. ValueError: the file is torn.
    """
    data = stage.read_if_exists("history.json", limit=_LIMIT)
    if not data:
        return []
    # Of the steps that no log covers: all of them, where `logging_steps` is larger than the training.
    losses = stage.read_if_exists("losses.json", limit=_LIMIT)
    return [*parse_json(data), *parse_json(losses or b"[]")]


def read_unfinished_history(stage: Store, seen: Sequence[Mapping[str, Any]] = ()) -> list[Entry]:
    """The log of an unfinished training: what was seen of it, and what only its newest checkpoint has.

    Args:
        seen: the entries that its events had. What cannot be read is left out.
    """
    entries = [dict(each) for each in seen if isinstance(each.get("step"), int | float)]
    last = max((entry["step"] for entry in entries if "loss" in entry), default=0)
    known = {(entry["step"], name) for entry in entries for name in entry}

    def is_new(entry: Entry) -> bool:
        if "loss" in entry:
            return bool(entry["step"] > last)
        return any((entry["step"], name) not in known for name in entry)

    try:
        return [*entries, *filter(is_new, _of_newest_checkpoint(stage))]
    except (StorageError, ValueError, TypeError, KeyError, AttributeError):  # torn, or from a stranger
        return entries


def _of_newest_checkpoint(stage: Store) -> list[Entry]:
    """The log of the newest checkpoint, and the loss of each step since the last log."""
    root = stage.child("checkpoints")
    newest = next(iter(list_checkpoints(root)), None)
    if newest is None:
        return []
    folder = root.child(newest.name)
    state, data = (parse_json(folder.read_bytes(name, limit=_LIMIT)) for name in (TRAINER_STATE, DATA))
    since = [float(loss) for loss, _ in data["history"]["since_log"]]
    losses: list[Entry] = [
        {"loss": loss, "step": step} for step, loss in enumerate(since, newest.step - len(since) + 1)
    ]
    return [*(dict(entry) for entry in state["log_history"]), *losses]
