"""`trainflow checkpoints`: what is committed below a URL, and whether its bytes are still the ones committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints

from flows.presentation import shown
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.manifest import read_commit, verify
from trainer_lib.storage import Store

_CHECKPOINTS = "checkpoints"
_TRAIN_STAGES = ("stages", "train")


def find(url: str) -> list[CheckpointInfo]:
    """The committed checkpoints at `url`, newest step first within each run.

    Args:
        url: one checkpoint, a folder of checkpoints, a train stage's folder, or a storage root.

    Raises:
        ConfigError: there is none.
    """
    store = Store.open(url, field="url")
    found = _below(store)
    if not found:
        raise ConfigError(
            "There is no committed checkpoint there.",
            field="url",
            value=url,
            remedy="Name a storage, a train stage's folder, its checkpoints folder, or one checkpoint.",
        )
    return found


def _below(store: Store) -> list[CheckpointInfo]:
    commit = read_commit(store)
    if commit is not None and commit.kind == "checkpoint":
        name = store.url.rstrip("/").rpartition("/")[2]
        return [CheckpointInfo(int(commit.meta.get("step", 0)), name, store.url, commit)]
    if found := list_checkpoints(store) or list_checkpoints(store.child(_CHECKPOINTS)):
        return found
    stages = store.child(*_TRAIN_STAGES)
    return [info for stage in stages.children() for info in list_checkpoints(stages.child(stage, _CHECKPOINTS))]


def damage(found: Sequence[CheckpointInfo]) -> dict[str, list[str]]:
    """URL -> what is wrong with each checkpoint, one line each; an empty list: every byte is as committed."""
    return {info.url: verify(Store.open(info.url), info.commit) for info in found}


def to_dict(info: CheckpointInfo) -> dict[str, Any]:
    """A checkpoint as plain JSON."""
    return {
        "step": info.step,
        "url": info.url,
        "created": info.commit.created,
        "files": len(info.commit.files),
        "bytes": _bytes(info),
        "content_digest": info.commit.content_digest,
    }


def listing(found: Sequence[CheckpointInfo]) -> list[Text]:
    """A line per checkpoint."""
    rows = [("step", "committed", "size", "where")]
    rows += [(str(info.step), info.commit.created, _size(_bytes(info)), shown(info.url)) for info in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        Text(f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}", "dim" if head else "")
        for head, row in [(True, rows[0]), *((False, row) for row in rows[1:])]
    ]


def verdict(problems: Mapping[str, Sequence[str]]) -> list[Text]:
    """A line per checkpoint.

    Raises:
        DamagedError: one of them is damaged.
    """
    damaged = [f"{shown(url)}: {problem}" for url, found in problems.items() for problem in found]
    if damaged:
        raise DamagedError(
            f"{damaged[0]}" + (f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else "") + ".",
            field="checkpoints",
            remedy="A resume takes the newest intact one by itself; remove the damaged folder.",
            details="\n".join(damaged),
        )
    return [Text(f"intact  {shown(url)}", "green") for url in problems]


def _bytes(info: CheckpointInfo) -> int:
    return sum(file.size for file in info.commit.files)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
