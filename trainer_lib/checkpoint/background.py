"""Saving while training goes on: one checkpoint at a time, in a thread of its own.

::

    main thread     start: copy the snapshot to the host -> agree     train, train, ...     has_ended?     finish
    saving thread                      `-> save_checkpoint: prepare, write, gather, commit, after_commit -^

While a save is under way (`is_busy`, equal on every rank) the following is true:

1. Training may change everything that the snapshot was taken from: the thread reads a copy (`staging.HostCopy`).
2. No second save is started, because there is one copy; the caller finishes the first save before.
3. The folder has no COMMIT.json yet, so every reader takes an older checkpoint for the newest.
4. Rotation has deleted nothing for this save: it runs as `after_commit`, in the thread, after the commit.
5. The thread's collectives travel over a process group of its own (`Communicator.twin`), so they cannot meet those of
   training, whose order they do not know.
6. No rank has used the outcome. All ranks learn it between the same two optimizer steps, from `has_ended` or `finish`.

If the process dies meanwhile, the folder has no commit and does not count; the next save of the step, or the next
training in this output_dir, deletes what is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from trainer_lib.checkpoint.catalogue import CheckpointInfo
from trainer_lib.checkpoint.snapshot import HostCopy, Snapshot, freeze_snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.agreement import run_on_all_ranks
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from trainer_lib.distributed.communicator import Communicator, Pending


class BackgroundSaver:
    """Writes checkpoints, one at a time, while the caller goes on.

    Args:
        comm: all ranks.
        disk: the ranks that write one folder together: all of them, or those of this machine.
        timeout_s: seconds that one rank waits for another rank's writing.
        keep: how many checkpoints rotation leaves; see `save_checkpoint`.

    Attributes:
        memory: the copy that a save writes from.
    """

    def __init__(self, comm: Communicator, disk: Communicator, *, timeout_s: float, keep: int | None = None) -> None:
        self.memory = HostCopy()
        self._comm = comm
        self._disk = disk
        # Connections of its own: the thread's messages must not meet those of the step.
        self._channel = disk.twin(timeout_s)
        self._keep = keep
        self._job: Future[CheckpointInfo] | None = None
        self._unfinished: Pending | None = None
        """The question, on its way since the last `has_ended`, whether any rank is still writing."""

    @property
    def is_busy(self) -> bool:
        """Whether a save was started whose outcome was not collected yet; equal on every rank."""
        return self._job is not None

    def start(self, root: Store, snapshot: Snapshot, *, after_commit: Callable[[], None]) -> None:
        """Copy the snapshot and begin to write it. Collective. On return its tensors may change.

        `after_commit` is called in the thread. On every rank alike, raises ConfigError when a part of the state cannot
        be written, OutOfMemoryError when the host has no room for the copy, and RuntimeError while an earlier save
        runs.
        """
        if self._job is not None:
            raise RuntimeError("One save at a time: finish the one before.")
        frozen = run_on_all_ranks(self._disk, lambda: freeze_snapshot(snapshot, self._disk.rank, self.memory))
        self._job = _started(lambda: self._save(root, frozen, after_commit), f"trainflow-save-{snapshot.step}")

    def has_ended(self) -> bool:
        """Whether the save under way has ended, well or not, on every rank. Collective while there is one.

        With several ranks the answer is one call old: the question travels while the step between two calls computes,
        so no rank waits for it.
        """
        if self._job is None:
            return False
        if self._comm.world_size == 1:
            return self._job.done()
        # The answer to the question of the step before: nothing waits for a message here.
        has_ended = self._unfinished is not None and not self._unfinished.result()
        self._unfinished = None if has_ended else self._comm.any_later(not self._job.done())
        return has_ended

    def finish(self) -> CheckpointInfo:
        """Wait for the save under way and return what it committed. Collective.

        Raises what `save_checkpoint` raises, the same on every rank, and RuntimeError when no save is under way.
        """
        pending, self._unfinished = self._unfinished, None
        if pending is not None:  # every rank asked at the last step boundary, so every rank has to take the answer
            pending.result()
        return self.finish_without_agreement()

    def finish_without_agreement(self) -> CheckpointInfo:
        """Wait for the save under way and return what it committed; no message to other ranks' main threads.

        For the way out of a training that failed: the other ranks may have failed elsewhere. Raises as `finish`.
        """
        if self._job is None:
            raise RuntimeError("No save is under way.")
        wait([self._job])  # an interrupt leaves the job as it is
        # Cleared before the result is raised, so that the next save can start after a failed one.
        job, self._job, self._unfinished = self._job, None, None
        return job.result()

    def close(self) -> None:
        """Give the copy's memory back; call it when nothing is under way."""
        self.memory.close()

    def _save(self, root: Store, snapshot: Snapshot, after_commit: Callable[[], None]) -> CheckpointInfo:
        # `keep` only serves the remedy when space runs out: rotation is the caller's `after_commit`.
        info = save_checkpoint(root, snapshot, self._channel, keep=self._keep)
        after_commit()
        return info


def _started(work: Callable[[], CheckpointInfo], name: str) -> Future[CheckpointInfo]:
    """Work in a thread; a daemon, because a user may press Ctrl-C once more to leave without waiting for it."""
    outcome: Future[CheckpointInfo] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
