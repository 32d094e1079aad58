"""`trainflow checkpoints`: what is committed below a URL, and whether its bytes are still the ones committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from flows.presentation import shown
from trainer_lib.checkpoint.catalogue import CheckpointInfo, read_info, step_of
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.manifest import COMMIT, verify
from trainer_lib.storage import Store

_CHECKPOINTS = "checkpoints"
_TRAIN_STAGES = ("stages", "train")


@dataclass
class Found:
    """What is committed below a URL, newest step first within each run; and commit files that cannot be read."""

    intact: list[CheckpointInfo] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.intact or self.unreadable)


def find(url: str) -> Found:
    """The checkpoints at `url`.

    Args:
        url: one checkpoint, a folder of checkpoints, a train stage's folder, or a storage root.

    Raises:
        ConfigError: there is none.
    """
    store = Store.open(url, field="url")
    found = Found()
    parent, _, name = store.url.rstrip("/").rpartition("/")
    if step_of(name) is not None and store.exists(COMMIT):
        _look(Store.open(parent), [name], found)
        return found
    stages = store.child(*_TRAIN_STAGES)
    for root in (store, store.child(_CHECKPOINTS), *(stages.child(key, _CHECKPOINTS) for key in stages.children())):
        _look(root, root.children(), found)
    if not found:
        raise ConfigError(
            "There is no committed checkpoint there.",
            field="url",
            value=url,
            remedy="Name a storage, a train stage's folder, its checkpoints folder, or one checkpoint.",
        )
    return found


def _look(root: Store, names: Sequence[str], found: Found) -> None:
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    for name in sorted(steps, key=lambda name: steps[name], reverse=True):
        try:
            info = read_info(root, name)
        except DamagedError as error:
            found.unreadable[root.child(name).url] = f"{COMMIT}: {error.message}"
            continue
        if info is not None:
            found.intact.append(info)


def damage(found: Found) -> dict[str, list[str]]:
    """URL -> what is wrong with each checkpoint, one line each; an empty list: every byte is as committed."""
    problems = {info.url: verify(Store.open(info.url), info.commit) for info in found.intact}
    return problems | {url: [problem] for url, problem in found.unreadable.items()}


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


def listing(found: Found) -> list[Text]:
    """A line per checkpoint."""
    rows = [("step", "committed", "size", "where")]
    rows += [(str(info.step), info.commit.created, _size(_bytes(info)), shown(info.url)) for info in found.intact]
    rows += [("?", "unreadable", "", shown(url)) for url in found.unreadable]
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
