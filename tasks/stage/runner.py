"""The run of a stage: look, take the lease, work, commit.

committed under this key, and intact?  -> Cached
take the lease                             (another process at work: wait for its result)
a damaged or unwanted result              -> withdrawn
record the attempt
work                                       (its checkpoints and finished shards are found again by the next attempt)
remove leftovers, check the lease, COMMIT
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trainer_lib.errors import HangError, StorageError, StorageGoneError, TrainflowError
from trainer_lib.locks.lease import Lease, acquire_lease
from trainer_lib.locks.removal import REMOVING
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import write_commit
from trainflow.tasks.keys.keys import StageKey, stage_key
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import StageFacts
from trainflow.tasks.stage.manifest import (
    KEY_FILE,
    StageManifest,
    belongs_to_other_key,
    commit_facts,
    explain_miss,
    look_up,
    stage_store,
)
from trainflow.tasks.stage.rerun import current_key, note_refreshed
from trainflow.tasks.stage.retry import (
    ATTEMPTS,
    Ledger,
    advise_on_memory,
    attach_decision,
    attach_outside_attempt,
    decide,
    first_try,
    in_task_run,
    past_by_prefect,
)

__all__ = ["StageAttempt", "StageContext", "StageFacts", "StageManifest", "StageOutput", "run_stage", "stage_key"]

_LEASE = "lease"
_COMMIT = "COMMIT.json"
_BOOKS = {_LEASE, REMOVING, ATTEMPTS, KEY_FILE}
_UNCOMMITTED = {*_BOOKS, "checkpoints", "follow", "history.json", "losses.json"}
"""Folders of a stage that are not part of its result."""


@dataclass(frozen=True)
class StageFolder:
    """A stage and its folder, in which finished parts of an earlier attempt may lie."""

    stage: str
    store: Store


@dataclass(frozen=True)
class StageAttempt(StageFolder):
    """One attempt at a stage: what its work is given."""

    number: int
    """Of the attempt, from 1."""
    batch_halvings: int
    """The number of halvings of the micro-batch, because memory ran out before."""
    progress: _progress.StageProgress
    is_lost: Callable[[], bool]
    """Whether another process has taken over the folder: the work should stop, because it cannot be committed."""


@dataclass(frozen=True)
class StageOutput:
    """The result of a stage's work: its files by path from the stage's folder, numbers, and facts for what follows."""

    files: Sequence[FileEntry]
    metrics: dict[str, Any] = field(default_factory=dict)
    facts: StageFacts = field(default_factory=StageFacts)


def run_stage(
    key: StageKey,
    context: StageContext,
    work: Callable[[StageAttempt], StageOutput],
    *,
    retries: int = 3,
    max_halvings: int = 0,
    inspect: Callable[[StageManifest], str | None] | None = None,
) -> StageManifest:
    """Run `work` unless its result is committed and intact.

    Args:
        key: everything that decides the result.
        context: where results are kept. A stage that `context.force` names discards a committed result, and everything
            that was kept for continuing it.
        retries: failures that may be retried, see `trainflow.tasks.stage.retry`.
        max_halvings: how often the work can halve its batch when memory runs out.
        inspect: looks at a committed result beyond the stage's folder; returns what is wrong there, or None.

    Returns:
        The manifest. Inside a Prefect task a cached one comes as the state ``Completed(name="Cached")``.

    Raises:
        TrainflowError: typed; whether it is retried was decided and recorded before.
    """
    try:
        # A result that is too old is followed by another one, with a key of its own.
        key = current_key(key, context)
        # A retry of a forced stage continues from the checkpoints that its first try has just made.
        force = key.stage in context.force and first_try()
        store = stage_store(context.storage, key)
        manifest = _Run(key, store, context.storage, work, retries, max_halvings, inspect, force).look_or_work()
        note_refreshed(context.storage, key)
        return manifest
    except TrainflowError as error:
        # Prefect asks about every failure, also one before the first attempt was recorded.
        attach_outside_attempt(error, retries=retries)
        raise


@dataclass(frozen=True)
class _Run:
    """The arguments of `run_stage`, with the key that counts now and its folder; `force` is False in a retry."""

    key: StageKey
    store: Store
    storage: str
    work: Callable[[StageAttempt], StageOutput]
    retries: int
    max_halvings: int
    inspect: Callable[[StageManifest], str | None] | None
    force: bool

    def look_or_work(self) -> StageManifest:
        key, store, damage = self.key, self.store, None
        if not self.force:
            manifest, damage = self._look()
            if manifest is not None:
                return self._cached(manifest)
        if self.force or damage is not None:
            reason = "forced" if self.force else f"its result is damaged: {damage}"
        else:
            reason = explain_miss(self.storage, key).reason
        lease = acquire_lease(
            store,
            wait=lambda: not self.force and self._look()[0] is not None,
            on_wait=lambda holder: self._report("waiting", f"another process is at work on it: {holder}"),
        )
        if lease is None:
            # No lease: `wait` saw a result while we waited.
            manifest, _ = look_up(self.storage, key)
            if manifest is None:
                raise StorageError("The result that another process committed is gone.", field=store.url)
            return self._cached(manifest)
        with lease:
            if not self.force:  # between our look and the lease another process may have finished
                manifest, damage = self._look()
                if manifest is not None:
                    return self._cached(manifest)
            if belongs_to_other_key(store, key):
                _withdraw(store, keep={_LEASE})  # its checkpoints and attempts are another training's
            elif self.force or damage is not None:
                # A damaged result is made again from its checkpoints; a forced one from nothing.
                _withdraw(store, keep=_BOOKS if self.force else _UNCOMMITTED)
            return self._attempt(lease, reason)

    def _cached(self, manifest: StageManifest) -> StageManifest:
        self._report("cached", f"committed {manifest.created}", key=manifest.key)
        if not in_task_run():
            return manifest
        from prefect.states import Completed

        message = f"Committed under key {manifest.key[:16]}."
        # Prefect takes a returned state for the task's outcome; `StageTask` gives the caller the manifest in it.
        return cast("StageManifest", Completed(name="Cached", data=manifest, message=message))

    def _look(self) -> tuple[StageManifest | None, str | None]:
        manifest, damage = look_up(self.storage, self.key)
        if manifest is not None and self.inspect is not None and (problem := self.inspect(manifest)):
            return None, problem
        return manifest, damage

    def _attempt(self, lease: Lease, reason: str) -> StageManifest:
        key, store, ledger = self.key, self.store, Ledger(self.store)
        # Before the work, so that an attempt that dies can be explained.
        store.write_bytes(KEY_FILE, key.to_json())
        # The micro-batch is not part of the key: it may be smaller now than when memory ran out.
        halvings = min(ledger.batch_halvings(), self.max_halvings)
        if ledger.unreadable:
            place = f"{', '.join(ledger.unreadable[:3])} in {ledger.store.url}"
            message = (
                f"Records of earlier attempts cannot be read and are not counted ({place}): if memory ran out then, "
                "this attempt finds that out again. The folder may be deleted."
            )
            _progress.publish({"event": "warning", "stage": key.stage, "message": message})
        number = ledger.begin(reason=reason, batch_halvings=halvings)
        progress = _progress.StageProgress(key.stage)
        try:
            self._report("started", reason, attempt=number)
            output = self.work(StageAttempt(key.stage, store, number, halvings, progress, lambda: lease.lost))
            first_key = None if key.first is key else key.first.digest
            manifest = self._commit(lease, output, commit_facts(output.facts, reason, number, halvings, first_key))
            progress.complete()
        except BaseException as stopped:
            error, can_halve = _cause(lease, stopped), halvings < self.max_halvings
            advise_on_memory(error, can_halve=can_halve, halves=self.max_halvings > 0)
            self._failed(ledger, number, error, progress, can_halve=can_halve)
            if error is stopped:
                raise
            raise error from stopped
        finally:
            progress.close()
        ledger.end(number, "committed", times=progress.times)
        self._report("committed", reason, attempt=number)
        return manifest

    def _commit(self, lease: Lease, output: StageOutput, facts: dict[str, Any]) -> StageManifest:
        key, store = self.key, self.store
        files = sorted(output.files, key=lambda entry: entry.path)
        lease.ensure_held()
        # What earlier attempts left. Only after that check: it could be files of the process that has taken over.
        committed = {entry.path for entry in files}
        for info in store.list():
            if info.path not in committed and info.path.partition("/")[0] not in _UNCOMMITTED:
                store.delete(info.path)
        meta = {"stage": key.stage, "key": key.digest, "metrics": output.metrics, "meta": facts}
        return StageManifest.from_commit(store.url, write_commit(store, "stage", files, meta, guard=lease.ensure_held))

    def _failed(
        self, ledger: Ledger, number: int, error: BaseException, progress: _progress.StageProgress, *, can_halve: bool
    ) -> None:
        """Record the end of an attempt, and decide whether Prefect tries again."""
        try:
            past = ledger.past(before=number)
        except StorageError:  # a store that is out of reach: the failure itself must reach the user
            past = past_by_prefect()
        decision = decide(error, retries=self.retries, past=past, can_halve=can_halve)
        if isinstance(error, HangError) and past.has_hung_at(error.step):
            error.message += " An attempt before it hung there as well."
            error.args = (error.message,)
        outcome = "failed" if isinstance(error, Exception) else "interrupted"
        attach_decision(error, decision)
        try:
            ledger.end(number, outcome, error=error, decision=decision.reason, times=progress.times)
        except StorageGoneError:  # the failure itself says it
            pass
        except StorageError as unwritten:  # the store is what failed: the failure itself must reach the user
            _progress.publish({"event": "warning", "stage": self.key.stage, "message": str(unwritten)})
        status = "retrying" if decision.retry and in_task_run() else outcome
        message = error.message if isinstance(error, TrainflowError) else str(error)
        self._report(status, decision.reason, attempt=number, message=message)

    def _report(self, status: str, reason: str, **more: Any) -> None:
        event = {"event": "stage", "stage": self.key.stage, "status": status, "reason": reason, **more}
        _progress.publish(event)


def _cause(lease: Lease, error: BaseException) -> BaseException:
    """Return why a work was stopped, where its lease was lost: its own error is a consequence."""
    if lease.lost and isinstance(error, Exception):
        try:
            lease.ensure_held()
        except StorageError as cause:
            return cause
    return error


def _withdraw(store: Store, *, keep: set[str]) -> None:
    """Take a result back: the commit file first, so that at no moment a damaged stage counts as done."""
    store.delete(_COMMIT)
    for name in store.children():
        if name not in keep:
            store.delete_tree(name)
