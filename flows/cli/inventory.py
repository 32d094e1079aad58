"""`trainflow checkpoints`: what lies below a URL, in which state it is, and what may go. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_excess, list_linked, read_checkpoint_info
from trainer_lib.checkpoint.foreign.recognise import is_foreign, recognise_folder
from trainer_lib.checkpoint.layout import DAMAGED, parse_step
from trainer_lib.errors import ConfigError, DamagedError, NewerVersionError
from trainer_lib.locks.claim import read_claim
from trainer_lib.locks.lease import find_holder
from trainer_lib.locks.readers import is_kept, list_readers, withdraw_if_unread
from trainer_lib.model_folder.locate import open_link
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, verify_files
from trainflow.flows.cli.presentation import shown
from trainflow.flows.records.sizes import describe_bytes

_CHECKPOINTS = "checkpoints"
_TRAIN_STAGES = ("stages", "train")
_STATE = "trainer_state.json"
_STATE_LIMIT = 512 * 2**20
_COLOURS = {"good": "green", "damaged": "bold red"}


@dataclass(frozen=True)
class Entry:
    """A folder that is named like a checkpoint.

    Attributes:
        root: the folder it lies in.
        name, step: its own.
        state: ``good`` (committed, every file there in its size), ``damaged``, ``uncommitted`` (left by an interrupted
            save), ``being written``, ``foreign`` (another program's), ``newer version`` (of trainflow) or ``link``.
        info: its commit, where there is a valid one.
        problems: what is wrong, or what it is, a line each.
        best: whether the newest checkpoint of its run records it as the best.
        readers: the processes that read it now.
        kept: whether it is marked as one that stays (`trainflow follow` marks the best).
    """

    root: Store
    name: str
    step: int
    state: str
    info: CheckpointInfo | None = None
    problems: tuple[str, ...] = ()
    best: bool = False
    readers: tuple[str, ...] = ()
    kept: bool = False

    @property
    def url(self) -> str:
        """Where it is."""
        return self.root.child(self.name).url

    @property
    def bytes(self) -> int:
        """Its size: what was committed, else what is there."""
        if self.info is not None:
            return sum(file.size for file in self.info.commit.files)
        return 0 if self.state == "link" else sum(file.size for file in self.root.child(self.name).list())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        commit = self.info.commit if self.info is not None else None
        return {
            "step": self.step,
            "url": self.url,
            "state": self.state,
            "best": self.best,
            "kept": self.kept,
            "in_use": list(self.readers),
            "created": commit.created if commit else None,
            "files": len(commit.files) if commit else None,
            "bytes": self.bytes,
            "content_digest": commit.content_digest if commit else None,
            "problems": list(self.problems),
        }


def find(url: str) -> list[Entry]:
    """Everything named like a checkpoint at `url`, newest step first within each run.

    Args:
        url: one checkpoint, a folder of checkpoints, a train stage's folder, or a storage root.

    Raises:
        ConfigError: no checkpoint is there; names what is there instead, if that is known.
    """
    store = open_link(url, field="url")
    parent, _, name = store.url.rstrip("/").rpartition("/")
    is_stage = bool(store.children(_CHECKPOINTS))  # which has a commit file as well
    # A checkpoint that was not committed has no commit file, but it has a checkpoint's name.
    if not is_stage and (store.exists(COMMIT) or (parse_step(name) is not None and store.children())):
        # The newest checkpoint of the run records which one is best; for one checkpoint alone that is not looked up.
        return [_entry(Store.open(parent or "/"), name, None)]
    found = [entry for root in roots(store) for entry in _entries(root)]
    if not found:
        known = recognise_folder(store)
        raise ConfigError(
            f"No checkpoint is there, but {known.what}." if known else "No committed checkpoint is there.",
            field="url",
            value=url,
            remedy=known.remedy
            if known
            else "Name a storage, a train stage's folder, its checkpoints folder, or one checkpoint.",
        )
    return found


def roots(store: Store) -> Iterator[Store]:
    """The folders of checkpoints that a URL may stand for."""
    stages = store.child(*_TRAIN_STAGES)
    yield from (store, store.child(_CHECKPOINTS), *(stages.child(key, _CHECKPOINTS) for key in stages.children()))


def _entries(root: Store) -> list[Entry]:
    steps = {name: step for name in {*root.children(), *list_linked(root)} if (step := parse_step(name)) is not None}
    names = sorted(steps, key=lambda name: steps[name], reverse=True)
    best = _best(root, names)
    return [_entry(root, name, best) for name in names]


def _entry(root: Store, name: str, best: int | None) -> Entry:
    step = parse_step(name)
    step = -1 if step is None else step
    if name in list_linked(root):
        return Entry(root, name, step, "link", problems=("a link, which is not followed",))
    store = root.child(name)
    try:
        info = read_checkpoint_info(root, name)
        if info is not None:
            problems = tuple(verify_files(store, info.commit, digests=False))
            using = tuple(map(str, list_readers(store)))
            state = "damaged" if problems else "good"
            is_best, kept = info.step == best, is_kept(store)
            return Entry(root, name, info.step, state, info, problems, is_best, using, kept)
    except DamagedError as error:
        state = "newer version" if isinstance(error, NewerVersionError) else "damaged"
        return Entry(root, name, step, state, problems=(f"{COMMIT}: {error.message}",))
    # No commit, but a note: a resume found it damaged and withdrew its commit.
    if store.exists(DAMAGED):
        return Entry(root, name, step, "damaged", problems=(f"set aside, see {DAMAGED}",))
    known = recognise_folder(store) if is_foreign(store.children()) else None
    if known is not None:
        return Entry(root, name, step, "foreign", problems=(known.what,))
    claim = read_claim(store)
    if claim is not None and not claim.is_gone():
        return Entry(root, name, step, "being written", problems=(f"by {claim}",))
    return Entry(root, name, step, "uncommitted")


def _best(root: Store, names: Sequence[str]) -> int | None:
    """The step that the newest readable checkpoint records as the best; None when none records one."""
    for name in names:
        try:
            info = None if name in list_linked(root) else read_checkpoint_info(root, name)
            if info is not None and info.commit.entry(_STATE) is not None:
                state = parse_json(root.child(name).read_bytes(_STATE, limit=_STATE_LIMIT), dict)
                best = state.get("best_global_step")
                # Not isinstance: True is an int, and the file may come from anywhere.
                return best if type(best) is int else None
        except (DamagedError, ValueError):
            continue
    return None


def damage(found: Sequence[Entry], on_read: Callable[[int], object] | None = None) -> dict[str, list[str]]:
    """URL -> what is wrong with each committed checkpoint, one line each; an empty list: every byte is as committed.

    Those that were set aside are damaged too; what was never committed is not looked at. `on_read` takes the number of
    bytes of each piece that was read.
    """
    problems: dict[str, list[str]] = {}
    for entry in found:
        if entry.info is not None:
            problems[entry.url] = verify_files(entry.root.child(entry.name), entry.info.commit, on_read=on_read)
        elif entry.state == "damaged":
            problems[entry.url] = list(entry.problems)
    return problems


# -- removing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victim:
    """What `prune` removes, and why."""

    entry: Entry
    why: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"url": self.entry.url, "step": self.entry.step, "bytes": self.entry.bytes, "why": self.why}


def victims(found: Sequence[Entry], keep: int) -> list[Victim]:
    """What retention would remove of each run: the oldest beyond `keep`, and what interrupted saves left.

    Never the best, one that is marked to be kept, the newest whose every byte is good and what is newer, the newest
    that can be resumed from, one that a process reads or writes (or whose writer cannot be seen from here), what
    another program wrote, or what was set aside as damaged.
    """
    doomed: list[Victim] = []
    # Each run keeps its own newest ones, and a storage may hold several runs.
    for root in {entry.root.url: entry.root for entry in found}.values():
        entries = {entry.name: entry for entry in found if entry.root.url == root.url}
        best = {entry.name for entry in entries.values() if entry.best}
        old = list_excess(root, keep=keep, protect=best)
        doomed += [Victim(entries[info.name], f"beyond the newest {keep}") for info in old]
        # The stage's lease lies beside `checkpoints/`: while it is held, an uncommitted folder may be a save under way.
        if find_holder(Store.open(root.url.rpartition("/")[0] or "/")) is None:
            left = (entry for entry in entries.values() if entry.state == "uncommitted")
            doomed += [Victim(entry, "left by an interrupted save") for entry in left]
    return doomed


def remove(doomed: Sequence[Victim]) -> list[Victim]:
    """Delete checkpoints, commit files first, and return those deleted. One that a reader has opened meanwhile stays.

    Raises:
        StorageError: a checkpoint cannot be deleted.
    """
    return [victim for victim in doomed if withdraw_if_unread(victim.entry.root.child(victim.entry.name))]


# -- for people --------------------------------------------------------------------------------------------------------


def listing(found: Sequence[Entry]) -> list[Text]:
    """A line per checkpoint."""
    head = ("step", "committed", "size", "state", "where")
    rows = [head, *(_row(entry) for entry in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for place, row in enumerate(rows):
        text = f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}"
        lines.append(Text(text, "dim" if not place else _COLOURS.get(found[place - 1].state, "")))
    for entry in found:
        notes = [*entry.problems, *(f"read by {reader}" for reader in entry.readers)]
        lines += [Text(f"  step {entry.step}: {note}", "dim") for note in notes]
    return lines


def _row(entry: Entry) -> tuple[str, str, str, str, str]:
    when = entry.info.commit.created if entry.info is not None else "-"
    notes = {"best": entry.best, "kept": entry.kept, "in use": bool(entry.readers)}
    state = ", ".join([entry.state, *(note for note, holds in notes.items() if holds)])
    return str(entry.step), when, describe_bytes(entry.bytes), state, shown(entry.url)


def intact_lines(problems: Mapping[str, Sequence[str]]) -> list[Text]:
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
    return [Text(f"intact  {shown(url)}", "green") for url in problems] or [Text("Nothing is committed there.")]


def pruned(removed: Sequence[Mapping[str, Any]], *, dry_run: bool) -> list[Text]:
    """A line per checkpoint that was (or would be) removed, and what that frees."""
    verb, freed = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    lines = [Text(f"{verb}  {shown(each['url'])}  {describe_bytes(each['bytes'])}  {each['why']}") for each in removed]
    total = f"{describe_bytes(sum(each['bytes'] for each in removed))} {freed}" if removed else "Nothing has to go."
    return [*lines, Text(total, "bold")]
