"""Saving while training goes on: one checkpoint at a time, in a thread of its own.

::

    main thread:   snapshot, copied to the host   -> agree             train ...   ended everywhere?   ... its outcome
    this thread:                                     save_checkpoint, what follows a commit ^

The thread's messages to other ranks travel over connections of their own (`Communicator.twin`), so they mix with none
of training's. Whether it has ended is agreed at step boundaries: every rank learns of a commit, or of a failure,
between the same two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.checkpoint.catalogue import CheckpointInfo
from trainer_lib.checkpoint.staging import HostCopy, freeze_snapshot
from trainer_lib.checkpoint.writer import Snapshot, save_checkpoint
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator, Pending


class BackgroundSaver:
    """Writes checkpoints, one at a time, while the caller goes on.

    Args:
        comm: all ranks; `disk`: those that share a folder (the same, or a machine's own ranks).
        timeout_s: seconds that one rank waits for another's writing.
        keep: see `save_checkpoint`.

    Attributes:
        memory: the copy it writes from.
    """

    def __init__(self, comm: Communicator, disk: Communicator, *, timeout_s: float, keep: int | None = None) -> None:
        self.memory = HostCopy()
        self._comm = comm
        self._disk = disk
        self._channel = disk.twin(timeout_s)
        self._keep = keep
        self._job: _Job | None = None
        self._unfinished: Pending | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save was started whose outcome nobody has taken yet. The same on every rank."""
        return self._job is not None

    def start(self, root: Store, snapshot: Snapshot, *, after_commit: Callable[[], None]) -> None:
        """Copy the snapshot and begin to write it; collective. On return its tensors may change.

        Args:
            root, snapshot: see `save_checkpoint`.
            after_commit: called in the thread, after the commit.

        Raises (the same on every rank):
            ConfigError: a part of the state cannot be written; OutOfMemoryError: no room for the copy.
            RuntimeError: the save before is not finished: a mistake of the caller.
        """
        if self._job is not None:
            raise RuntimeError("One save at a time: finish the one before.")
        frozen = run_on_all_ranks(self._disk, lambda: freeze_snapshot(snapshot, self._disk.rank, self.memory))
        self._job = _Job(lambda: self._save(root, frozen, after_commit), name=f"trainflow-save-{snapshot.step}")

    def has_ended(self) -> bool:
        """Whether the save under way has ended, well or not, on every rank. Collective while there is one.

        With several ranks the answer is one call old: it travels while the step between two calls computes.
        """
        if self._job is None:
            return False
        if self._comm.world_size == 1:
            return self._job.done
        ended = self._unfinished is not None and not self._unfinished.result()
        self._unfinished = None if ended else self._comm.any_later(not self._job.done)
        return ended

    def finish(self) -> CheckpointInfo:
        """Wait for the save under way; what it committed. Collective.

        Raises:
            TrainflowError: as `save_checkpoint` does, the same on every rank; whatever else ended the thread.
            RuntimeError: there is none: a mistake of the caller.
        """
        asked, self._unfinished = self._unfinished, None
        if asked is not None:  # at the last boundary, by everyone
            asked.result()
        return self.finish_without_agreement()

    def finish_without_agreement(self) -> CheckpointInfo:
        """The same without a word to the other ranks' main threads, which may have failed or gone on."""
        if self._job is None:
            raise RuntimeError("No save is under way.")
        self._job.wait()
        job, self._job, self._unfinished = self._job, None, None
        return job.result()

    def close(self) -> None:
        """Give the copy's memory back; call it when nothing is under way."""
        self.memory.close()

    def _save(self, root: Store, snapshot: Snapshot, after_commit: Callable[[], None]) -> CheckpointInfo:
        info = save_checkpoint(root, snapshot, self._channel, keep=self._keep)
        after_commit()
        return info


class _Job:
    """One save in its thread."""

    def __init__(self, work: Callable[[], CheckpointInfo], *, name: str) -> None:
        self._work = work
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        # A daemon: whoever started it waits for it, and may be told by its user to leave all the same.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the work is done, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Until it is done. An interrupt leaves it as it is; one in `Thread.join` would make the thread look ended."""
        self._done.wait()
        self._thread.join()

    def result(self) -> CheckpointInfo:
        """What was committed; raises what ended the work."""
        if self._error is not None:
            raise self._error
        if self._info is None:
            raise RuntimeError("The thread is still at work.")
        return self._info

    def _run(self) -> None:
        try:
            self._info = self._work()
        except BaseException as error:  # it belongs to whoever asks for the result
            self._error = error
        finally:
            self._done.set()
