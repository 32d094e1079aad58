"""Which checkpoints a folder holds, whether they are intact, which may go. No torch here.

Only a committed checkpoint counts; which is newest is said by its step, never by a time. A damaged one is set aside
(its commit file becomes ``DAMAGED.json``, its files stay for whoever wants to look) and the one before it is used.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from trainer_lib.checkpoint.foreign.recognise import is_foreign
from trainer_lib.checkpoint.layout import DAMAGED, KIND, OPTIMIZER, parse_step
from trainer_lib.commit import COMMIT, LIMIT, Commit, read_commit, verify_files
from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.locks.claim import read_claim
from trainer_lib.locks.readers import list_readers, withdraw_if_unread
from trainer_lib.storage import Store


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: optimizer step, folder name, URL, commit."""

    step: int
    name: str
    url: str
    commit: Commit


def read_checkpoint_info(root: Store, name: str) -> CheckpointInfo | None:
    """The committed checkpoint of that name; None when it is absent or not committed.

    Raises:
        DamagedError: its commit file is damaged, or speaks of another step than its folder does.
    """
    store = root.child(name)
    commit = read_commit(store, kind=KIND)
    if commit is None:
        return None
    step = commit.meta.get("step")
    if type(step) is not int or step < 0 or parse_step(name) not in (step, None):
        raise DamagedError(
            f"The commit file is of step {step!r}.",
            field=f"{store.url}/{COMMIT}",
            remedy="The folder was renamed or altered: restore its name, or remove it.",
        )
    return CheckpointInfo(step, name, store.url, commit)


def list_checkpoints(root: Store) -> list[CheckpointInfo]:
    """The committed checkpoints, newest step first. Their files are not looked at; those without a valid commit and
    those set aside are left out."""
    found = []
    for _, name in _named(root):
        try:
            info = read_checkpoint_info(root, name)
        except DamagedError:
            continue
        if info is not None:
            found.append(info)
    return found


def find_newest_intact(
    root: Store,
    *,
    on_damage: Callable[[str], None],
    digests: bool = True,
    resumable: bool = False,
    skip: Collection[str] = (),
) -> CheckpointInfo | None:
    """The newest checkpoint whose every byte is as committed; None when there is none.

    Args:
        root: the folder of checkpoints.
        on_damage: told one line per damaged checkpoint, with the names of the damaged files; it is set aside.
        digests: read every byte; otherwise only presence and sizes (loading checks the digests once more).
        resumable: pass over those that hold only a model.
        skip: names to pass over.

    Raises:
        StorageError: the store cannot be read. That says nothing about the checkpoint, so no older one is taken.
    """
    for _, name in _named(root):
        problems = []
        try:
            info = read_checkpoint_info(root, name)
            if info is None or name in skip or (resumable and not is_resumable(info)):
                continue
            problems = verify_files(root.child(name), info.commit, digests=digests)
            if not problems:
                return info
        except DamagedError as error:
            problems = [f"{COMMIT}: {error.message}"]
        on_damage(set_aside_damaged(root, name, problems))
    return None


def rotate_checkpoints(
    root: Store, *, keep: int | None, protect: Collection[str], just_written: str | None = None
) -> list[str]:
    """Delete the oldest checkpoints until `keep` are left (`list_excess`); the names deleted, oldest first."""
    victims = [info.name for info in list_excess(root, keep=keep, protect=protect, just_written=just_written)]
    return [name for name in victims if withdraw_if_unread(root.child(name))]


def list_excess(
    root: Store,
    *,
    keep: int | None,
    protect: Collection[str],
    digests: bool = True,
    just_written: str | None = None,
) -> list[CheckpointInfo]:
    """The checkpoints beyond `keep`, oldest first.

    These are never among them, and count: the newest good one, and damaged ones after it; the newest from which
    training can be resumed, where the newest holds only a model; those named in `protect` (the best); those that
    somebody is reading (`list_readers`).

    Args:
        root: the folder of checkpoints.
        keep: how many stay; None or less than 1: all.
        protect: names that stay.
        digests: whether the newest good one is told by every byte of it, or by presence and sizes.
        just_written: one whose digests the caller has computed just now, while writing it: its sizes are enough.
    """
    infos = list_checkpoints(root)
    count = len(infos) - keep if keep is not None and keep > 0 else 0
    if count <= 0:
        return []
    spared = {*protect, *_newest_needed(root, infos, just_written, digests=digests)}
    free = (info for info in reversed(infos) if info.name not in spared and not list_readers(root.child(info.name)))
    return list(itertools.islice(free, count))


def is_resumable(info: CheckpointInfo) -> bool:
    """Whether it holds what training needs, and not a model alone."""
    return info.commit.entry(OPTIMIZER) is not None


def _newest_needed(
    root: Store, infos: list[CheckpointInfo], just_written: str | None, *, digests: bool
) -> Iterator[str]:
    """The newest good checkpoint and whatever is newer, and the newest good one that can be resumed from."""
    good = False
    for info in infos:
        if good and not is_resumable(info):
            continue
        # One pass over the newest's bytes is worth it; a further one was the newest once.
        every_byte = digests and not good and info.name != just_written
        intact = not verify_files(root.child(info.name), info.commit, digests=every_byte)
        if intact or not good:
            yield info.name  # a damaged newest is for the next resume to report and set aside
        good = good or intact
        if intact and is_resumable(info):
            return


def delete_leftovers(root: Store) -> list[str]:
    """Delete what interrupted saves left: checkpoint folders without a commit. The names deleted.

    Only the owner of `root` may call this (the holder of its lease, a training that just began): another machine's save
    under way looks the same. One under way on this machine is left alone, and so are damaged ones that were set aside
    and checkpoints that another program wrote.
    """
    victims = []
    for name in list_uncommitted(root):
        writer = read_claim(root.child(name))
        if writer is None or not writer.is_alive():
            root.child(name).delete_tree()
            victims.append(name)
    return victims


def list_uncommitted(root: Store) -> list[str]:
    """Folders named like a checkpoint that were never committed: a save under way, or what an interrupted one left.

    Those that were set aside, and what another program wrote, are not among them.
    """
    found = []
    for _, name in _named(root):
        names = root.child(name).children()
        if COMMIT not in names and DAMAGED not in names and not is_foreign(names):
            found.append(name)
    return found


def list_foreign(root: Store) -> list[str]:
    """Folders named like a checkpoint that another program wrote, newest step first."""
    return [name for _, name in _named(root) if is_foreign(root.child(name).children())]


def is_link(root: Store, name: str) -> bool:
    """Whether a symbolic link stands there, wherever it leads; only local stores have them."""
    return root.is_local and root.local_path(name).is_symlink()


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Path or URL of the newest committed checkpoint in a folder; None when there is none."""
    infos = list_checkpoints(Store.open(folder, field="folder"))
    return infos[0].url if infos else None


def _named(root: Store) -> Iterator[tuple[int, str]]:
    # A link leads out of the folder: nothing behind it is ours to use, still less to delete.
    steps = [
        (step, name) for name in root.children() if (step := parse_step(name)) is not None and not is_link(root, name)
    ]
    yield from sorted(steps, reverse=True)


def set_aside_damaged(root: Store, name: str, problems: list[str]) -> str:
    """Turn a damaged checkpoint's commit file into a record of the damage, so that it is found once; the report."""
    store = root.child(name)
    return f"{store.url} is damaged and will not be used: {'; '.join(problems)}{_renamed(store, problems)}"


def _renamed(store: Store, problems: list[str]) -> str:
    try:
        try:
            commit = store.read_if_exists(COMMIT, limit=LIMIT) or b""
        except DamagedError:
            commit = b""
        record = {"problems": problems, "commit": commit.decode(errors="replace")}
        store.write_bytes(DAMAGED, json.dumps(record, indent=1).encode())
        store.delete(COMMIT)
    except StorageError as error:  # a read-only store: the damage is found anew each time
        return f" (it could not be set aside: {error.message})"
    return f" (set aside, see {DAMAGED})"
