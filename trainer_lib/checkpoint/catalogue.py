"""The checkpoints of a folder: which there are, whether they are intact, and which may be deleted.

Only a committed checkpoint counts, and the newest is the one of the highest step, never of the latest time. A damaged
checkpoint is set aside: its commit file becomes ``DAMAGED.json``, so that it does not count, while its files stay for
inspection. The checkpoint before it is used.

Folders that other programs wrote are recognised by the names in them. None of their files is opened: most are pickles,
which can run code when they are loaded. No torch here.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainer_lib.checkpoint.layout import DAMAGED, KIND, OPTIMIZER, parse_step
from trainer_lib.errors import ConfigError, DamagedError, NewerVersionError, StorageError
from trainer_lib.locks.claim import is_claim, read_claim
from trainer_lib.locks.removal import is_kept, is_protected, withdraw_if_unread
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, LIMIT, Commit, read_commit, verify_files

# Few names, all of which trainflow never writes: a folder that matches is protected from deletion.
_NEVER_OURS = ("*.pt", "*.pth", "*.pkl", "*.bin", "*.ckpt", "*.distcp", ".metadata", "global_step*", "*_fsdp_*")
_TRANSFORMERS_ONLY = ("optimizer.pt", "rng_state*.pth", "training_args.bin", "scheduler.pt")


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint of `step` optimizer steps."""

    step: int
    name: str
    url: str
    commit: Commit


def read_checkpoint_info(root: Store, name: str) -> CheckpointInfo | None:
    """Read the commit of a checkpoint; None without one. Raises DamagedError and StorageError."""
    store = root.child(name)
    commit = read_commit(store, kind=KIND)
    if commit is None:
        return None
    step = commit.meta.get("step")
    # The step stands in the file and in the folder's name, so a renamed folder is caught. type(): True is not 1.
    if type(step) is not int or step < 0 or parse_step(name) not in (step, None):
        what = f"The commit file is of step {step!r}, its folder is named {name!r}."
        remedy = "The folder was renamed or altered: restore its name, or remove it."
        raise DamagedError(what, field=f"{store.url}/{COMMIT}", remedy=remedy)
    return CheckpointInfo(step, name, store.url, commit)


def list_checkpoints(root: Store) -> list[CheckpointInfo]:
    """List the committed checkpoints, newest step first; damaged commits are left out, and files are not verified."""
    return list(_iterate(root))


def _iterate(root: Store) -> Iterator[CheckpointInfo]:
    """`list_checkpoints` one by one: each commit is read when it is needed."""
    for name in _list_names(root):
        try:
            info = read_checkpoint_info(root, name)
        except DamagedError:
            continue
        if info is not None:
            yield info


def find_newest_intact(
    root: Store,
    *,
    on_damage: Callable[[str], None],
    digests: bool = True,
    resumable: bool = False,
    skip: Collection[str] = (),
) -> CheckpointInfo | None:
    """Find the newest checkpoint that is as it was committed; None when there is none. Damaged ones are set aside.

    Args:
        on_damage: called with one line per damaged checkpoint, which names the damaged files.
        digests: compare every byte; False compares presence and sizes (loading compares the digests once more).
        resumable: ignore checkpoints that hold only a model.
        skip: folder names to ignore.

    Raises:
        StorageError: the store cannot be read. That says nothing about a checkpoint, so no older one is returned.
        NewerVersionError: a newer trainflow wrote the newest one. Going on from an older one would lose its steps.
    """
    for name in _list_names(root):
        problems = []
        try:
            info = read_checkpoint_info(root, name)
            if info is None or name in skip or (resumable and not is_resumable(info)):
                continue
            problems = verify_files(root.child(name), info.commit, digests=digests)
            if not problems:
                return info
        except NewerVersionError:
            raise
        except DamagedError as error:
            problems = [f"{COMMIT}: {error.message}"]
        on_damage(set_aside_damaged(root, name, problems))
    return None


def rotate_checkpoints(
    root: Store, *, keep: int | None, protect: Collection[str], just_written: str | None = None
) -> list[str]:
    """Delete the checkpoints that `list_excess` lists; returns the deleted names, oldest first. Raises StorageError."""
    victims = [info.name for info in list_excess(root, keep=keep, protect=protect, just_written=just_written)]
    return [name for name in victims if withdraw_if_unread(root.child(name))]


def list_excess(
    root: Store, *, keep: int | None, protect: Collection[str], just_written: str | None = None
) -> list[CheckpointInfo]:
    """List the checkpoints beyond `keep` (None or less than 1 keeps all), oldest first.

    The following are never in the list, although they count towards `keep`: the newest intact checkpoint and damaged
    ones after it; the newest that training can resume from, if the newest holds only a model; those in `protect` (the
    best); those that are kept (`is_kept`); those that a process is reading. One that is read stays until a later
    rotation, and no newer one goes in its place. Of `just_written` the sizes are enough: its digests are just computed.
    """
    if keep is None or keep < 1:
        return []
    infos = list_checkpoints(root)
    count = len(infos) - keep
    if count <= 0:
        return []
    spared = {*protect, *_newest_needed(root, infos, just_written)}
    free = (info for info in reversed(infos) if info.name not in spared and not is_kept(root.child(info.name)))
    return [info for info in itertools.islice(free, count) if not is_protected(root.child(info.name))]


def is_resumable(info: CheckpointInfo) -> bool:
    """Whether training can resume from a checkpoint; False when it holds only a model."""
    return info.commit.entry(OPTIMIZER) is not None


def _newest_needed(root: Store, infos: list[CheckpointInfo], just_written: str | None) -> Iterator[str]:
    """Names of the newest intact checkpoint, of all newer ones, and of the newest intact one to resume from."""
    found_intact = False
    for info in infos:  # newest first
        if found_intact and not is_resumable(info):
            continue
        # Every byte of the newest only: the bytes of an older one were compared when it was the newest.
        every_byte = not found_intact and info.name != just_written
        is_intact = not verify_files(root.child(info.name), info.commit, digests=every_byte)
        if is_intact or not found_intact:
            yield info.name  # a damaged newest one stays: the next resume reports it and sets it aside
        found_intact = found_intact or is_intact
        if is_intact and is_resumable(info):
            return


def delete_leftovers(root: Store) -> list[str]:
    """Delete the folders that interrupted saves left (checkpoint folders without a commit); returns their names.

    Only the owner of `root` may call this (the holder of its lease, a training that just began), because a save under
    way on another machine looks the same. A save under way on this machine, checkpoints that were set aside, and those
    that another program wrote are not touched.
    """
    victims = []
    for name in list_uncommitted(root):
        writer = read_claim(root.child(name))
        if writer is None or not writer.is_alive():
            root.child(name).delete_tree()
            victims.append(name)
    return victims


def list_uncommitted(root: Store) -> list[str]:
    """List the checkpoint folders without a commit: of saves under way or interrupted, not foreign, not set aside."""
    folders = ((name, root.child(name).children()) for name in _list_names(root))
    return [name for name, names in folders if not {COMMIT, DAMAGED} & set(names) and not _is_of_another(names)]


def list_foreign(root: Store) -> list[str]:
    """List the folders named like a checkpoint that another program wrote, newest step first."""
    return [name for name in _list_names(root) if _is_of_another(root.child(name).children())]


def _is_of_another(names: list[str]) -> bool:
    # A checkpoint, or the save that a kill interrupted, may hold files of an overridden `save_model`: pickles, too.
    ours = COMMIT in names or DAMAGED in names or any(map(is_claim, names))
    return not ours and matches_any(names, _NEVER_OURS)


def list_linked(root: Store) -> list[str]:
    """List the names directly below that are symbolic links; only local stores have links."""
    if not root.is_local or not root.local_path().is_dir():
        return []
    return [path.name for path in root.local_path().iterdir() if path.is_symlink()]


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path or URL of the newest committed checkpoint in a folder, a path or any fsspec URL; None without one.

    Raises ConfigError when the folder cannot be opened, and StorageError when it cannot be read.
    """
    newest = next(_iterate(Store.open(folder, field="folder")), None)
    return None if newest is None else newest.url


def _list_names(root: Store) -> list[str]:
    """List the folders that are named like a checkpoint, newest step first, links left out."""
    # `children` leaves out links to folders: what is behind them is not ours to use, still less to delete.
    steps = [(step, name) for name in root.children() if (step := parse_step(name)) is not None]
    return [name for _, name in sorted(steps, reverse=True)]


def set_aside_damaged(root: Store, name: str, problems: list[str]) -> str:
    """Replace a damaged checkpoint's commit file by a record of the damage, so that it is reported only once.

    `problems` has a line for each file. Returns a line for a log. A store that cannot be written leaves it as it is.
    """
    store = root.child(name)
    commit, outcome = b"", f"set aside, see {DAMAGED}"
    try:
        with contextlib.suppress(DamagedError):  # too large to keep a copy of
            commit = store.read_if_exists(COMMIT, limit=LIMIT) or b""
        record = {"problems": problems, "commit": commit.decode(errors="replace")}
        store.write_bytes(DAMAGED, json.dumps(record, indent=1).encode())
        store.delete(COMMIT)  # in this order
    except StorageError as error:  # a read-only store: the damage is found again each time
        outcome = f"it could not be set aside: {error.message}"
    return f"{store.url} is damaged and will not be used: {'; '.join(problems)} ({outcome})"


class Foreign(NamedTuple):
    """A kind of folder that another program writes: a message's name for it, after "there is", and what to do."""

    what: str
    remedy: str


IMPORT = "`trainflow checkpoints import SOURCE DESTINATION --model FILE.py:FUNCTION` converts it for a resume."
_OF_TRANSFORMERS = Foreign("a checkpoint of the transformers Trainer", IMPORT)
_OF_OTHERS = Foreign(
    "a folder of another program",
    "Its pickles are never loaded, because they can run any code. Export its weights as safetensors with the program "
    "that wrote it, load them into the model, and start a new training.",
)


def recognise_folder(store: Store) -> Foreign | None:
    """Recognise another program's folder by the names in it; None for any other. Raises StorageError."""
    names = store.children()
    if not _is_of_another(names):
        return None
    return _OF_TRANSFORMERS if matches_any(names, _TRANSFORMERS_ONLY) else _OF_OTHERS


def matches_any(names: Iterable[str], signs: Iterable[str]) -> bool:
    """Whether one of the names has one of the forms, such as ``*.pt``."""
    # fnmatchcase: the same answer on a system whose file names ignore case.
    return any(fnmatch.fnmatchcase(name, sign) for name in names for sign in signs)


def require_importable(store: Store) -> None:
    """Refuse a folder in which the transformers Trainer wrote no checkpoint, by the names in it."""
    if store.exists(COMMIT):
        what = "The folder is already a checkpoint of trainflow."
        raise refuse_source(store, what, "Resume from it, or copy the folder.")
    known = recognise_folder(store)
    if known is not _OF_TRANSFORMERS:
        what = f"There is {known.what}" if known else "There is no checkpoint"
        remedy = known.remedy if known else "Name a checkpoint-N folder that the transformers Trainer wrote."
        raise refuse_source(store, f"{what}.", remedy)


def refuse_source(store: Store, message: str, remedy: str) -> ConfigError:
    """The error of a folder that cannot be imported."""
    return ConfigError(message, field="source", value=store.url, remedy=remedy)
