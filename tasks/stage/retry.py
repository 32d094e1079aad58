"""The policy of retries: which failures of a stage are tried again, and how.

    preempted                    again, free of charge; not here where notice says that this machine goes
    out of memory                again with half the micro-batch, the same global batch; free of charge
    store, worker lost           again while the stage's `retries` last
    store out of reach           again for a quarter of an hour, unless `retries` is 0
    hung                         as a lost worker, but once only where it gets no further
    config, code, data, full     never

Prefect's retry is only the trigger: it re-runs a task with the same parameters, counts every attempt alike and picks
delays by attempt number. So the decision is made here from the attempts ledger in the stage's folder. It is attached
to the error, where Prefect's retry condition reads it (`should_retry`).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import (
    DamagedError,
    HangError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    PreemptedByNotice,
    StoreUnreachableError,
    TrainflowError,
)
from trainer_lib.secrets import mask
from trainer_lib.storage import Store

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

    from trainer_lib.arguments import TrainingArguments

ATTEMPTS = "attempts"
# The largest `retries` that a stage's settings allow.
MAX_TRIES = 20
_RECORD_BYTES = 1 << 20
_DETAILS_CHARS = 8_000
_INVOCATION = uuid.uuid4().hex

DELAYS_S = [min(2.0**number, 300.0) for number in range(MAX_TRIES)]
"""Seconds before each further try: 1, 2, 4 … at most five minutes."""

OUTAGE_TRIES = 11
"""Tries in one run of a stage while a store is out of reach: their delays add up to 1,111 s, 18 minutes."""

JITTER = 0.3
"""Each delay is drawn up to this share longer or shorter, so that many runs do not come back at the same moment."""


@dataclass(frozen=True)
class Decision:
    """Whether to try again, and why (not)."""

    retry: bool
    reason: str


@dataclass(frozen=True)
class Past:
    """The failures of a stage under one budget of retries: those that count, outages of a store, and steps of hangs."""

    used: int = 0
    outages: int = 0
    hung_at: tuple[int | None, ...] = ()

    def has_hung_at(self, step: int | None) -> bool:
        """Whether an earlier attempt hung there or further on: the work gets no further."""
        return any(_position(step) <= _position(before) for before in self.hung_at)


def decide(error: BaseException, *, retries: int, past: Past, can_halve: bool) -> Decision:
    """The policy: `retries` are allowed, `past` is before this failure, and the micro-batch can perhaps be halved."""
    if isinstance(error, PreemptedByNotice):
        return Decision(False, "this machine is about to be taken away: the same command continues")
    if not isinstance(error, TrainflowError) or not error.retryable:
        is_stopped = isinstance(error, Interrupted) or not isinstance(error, Exception)
        return Decision(False, "the same command continues" if is_stopped else "a retry cannot help")
    if isinstance(error, Preempted):
        return Decision(True, "preempted: tried again, free of charge")
    if isinstance(error, OutOfMemoryError):
        if can_halve and not _had_one_sample(error):
            return Decision(True, "out of memory: tried again with half the micro-batch, the same global batch")
        return Decision(False, "out of memory, and nothing left to lower")
    if isinstance(error, StoreUnreachableError) and retries > 0:
        if past.outages < OUTAGE_TRIES:
            return Decision(True, f"the store is out of reach: try {past.outages + 1} of {OUTAGE_TRIES}")
        return Decision(False, f"the store stayed out of reach for {sum(DELAYS_S[:OUTAGE_TRIES]) / 60:.0f} minutes")
    if isinstance(error, HangError) and past.has_hung_at(error.step):
        return Decision(False, "it hung at the same place before, so a further try would only wait again")
    if past.used >= retries:
        return Decision(False, f"{retries} of {retries} retries are used up")
    return Decision(True, f"retry {past.used + 1} of {retries}")


def advise_on_memory(error: BaseException, *, can_halve: bool, halves: bool) -> None:
    """Replace the advice to lower the batch where that is done already, or where no batch `halves`."""
    if not isinstance(error, OutOfMemoryError) or (can_halve and not _had_one_sample(error)):
        return
    error.remedy = (
        "One sample at a time is too large already: set gradient_checkpointing or bf16, take a smaller model, or a "
        "machine with more memory."
        if halves
        else "Let the stage hold less at a time (prepare() may yield its rows one by one, shard_rows may be lower), or "
        "take a machine with more memory."
    )


def _had_one_sample(error: OutOfMemoryError) -> bool:
    """Whether the Trainer itself halved its micro-batch as far as it goes."""
    return (error.field or "").endswith("per_device_train_batch_size") and error.value == "1"


class Ledger:
    """The attempts of one stage: ``attempts/NNNN.json`` when one begins, ``NNNN.end.json`` when it ends. Append-only.

    An attempt without an end died silently. `unreadable` names records, read so far, that are not `begin`'s and
    `end`'s.
    """

    def __init__(self, store: Store) -> None:
        self.store = store.child(ATTEMPTS)
        self.unreadable: list[str] = []

    def begin(self, *, reason: str, batch_halvings: int) -> int:
        """Record the start of an attempt; its number, from 1."""
        record = {
            "started": now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "invocation": invocation(),
            "reason": reason,
            "batch_halvings": batch_halvings,
        }
        # Never a number twice: after a lost lease, two processes may write here.
        taken = [int(name[:4]) for name in self.store.children() if name[:4].isdecimal()]
        for number in itertools.count(max(taken, default=0) + 1):
            if self.store.create(f"{number:04d}.json", _json({"attempt": number, **record})):
                return number
        raise AssertionError("unreachable")

    def end(
        self,
        number: int,
        outcome: str,
        *,
        error: BaseException | None = None,
        decision: str | None = None,
        times: Mapping[str, Any] | None = None,
    ) -> None:
        """Record how an attempt ended: "committed", "failed" or "interrupted"; `times`: where its time went."""
        record: dict[str, Any] = {"attempt": number, "ended": now(), "outcome": outcome, "decision": decision}
        record |= times or {}
        if isinstance(error, TrainflowError):
            record["error"] = error.to_record()
            record["error"]["details"] = (error.details or "")[-_DETAILS_CHARS:] or None
        elif error is not None:
            record["error"] = {"class": type(error).__name__, "message": mask(str(error))}
        self.store.create(f"{number:04d}.end.json", _json(record))

    def past(self, before: int | None = None) -> Past:
        """The failures under the present budget of retries; running the command again gives a new one.

        The attempt of the number `before` does not count.
        """
        free = (Preempted.__name__, OutOfMemoryError.__name__, StoreUnreachableError.__name__)
        ends = [
            end
            for start, end in self.records()
            if start.get("invocation") == invocation() and start.get("attempt") != before
        ]
        errors = [_error_of(end) for end in ends if end.get("outcome") == "failed"]
        # This process continues, so its own attempt without an end is one whose end could not be written.
        unwritten = sum(not end for end in ends)
        return Past(
            used=sum(error.get("class") not in free for error in errors),
            outages=sum(error.get("class") == StoreUnreachableError.__name__ for error in errors) + unwritten,
            hung_at=tuple(error.get("step") for error in errors if error.get("class") == HangError.__name__),
        )

    def batch_halvings(self) -> int:
        """The number of halvings of the micro-batch: one more than in the last attempt that ran out of memory."""
        halvings = 0
        for start, end in self.records():
            if _error_of(end).get("class") == OutOfMemoryError.__name__:
                # Of every invocation: memory that was too small yesterday is too small today.
                used = start.get("batch_halvings")
                halvings = max(halvings, (used if isinstance(used, int) else 0) + 1)
        return halvings

    def records(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The attempts in their order: (record of the start, record of the end, which is empty without one)."""
        names = self.store.children()
        starts = [name for name in names if name.endswith(".json") and not name.endswith(".end.json")]
        return [(self._read(name), self._read(f"{name[:4]}.end.json")) for name in sorted(starts)]

    def _read(self, name: str) -> dict[str, Any]:
        try:
            data = self.store.read_if_exists(name, limit=_RECORD_BYTES)
            return parse_json(data, dict) if data else {}
        except (ValueError, DamagedError):
            self.unreadable.append(name)
            return {}


def _position(step: object) -> int:
    return step if isinstance(step, int) else -1


def _error_of(end: Mapping[str, Any]) -> Mapping[str, Any]:
    error = end.get("error")
    return error if isinstance(error, dict) else {}


def halve_training_batch(
    args: Mapping[str, Any], halvings: int, *, world_size: int, varies: bool = False
) -> dict[str, Any]:
    """Training arguments with the micro-batch halved that often, and the same global batch.

    `varies`: there may be fewer processes at times; the global batch is then fixed also without a halving.
    """
    from trainer_lib.arguments import TrainingArguments, total_batch_size
    from trainer_lib.arguments.configs.accelerator_config import rows_at_a_time
    from trainer_lib.arguments.configs.parallelism_config import data_size

    if halvings == 0 and (not varies or args.get("global_batch_size")):
        return dict(args)
    parsed = TrainingArguments.from_dict(args, prefix="train.args")
    world_size = data_size(parsed, world_size)
    micro_batch = rows_at_a_time(parsed, data_parallel_size=world_size)
    given_for = count_sharers(parsed, lambda: world_size)
    return {
        **parsed.to_dict(),
        "gradient_accumulation_steps": 1,  # derived from the two below
        "per_device_train_batch_size": max(1, micro_batch >> halvings) * given_for,
        "global_batch_size": total_batch_size(parsed, data_parallel_size=world_size),
    }


def halve_evaluation_batch(args: Mapping[str, Any], halvings: int, *, shared_by: int = 1) -> dict[str, Any]:
    """Evaluation arguments with the batch halved that often for each of the processes that it is `shared_by`."""
    from trainer_lib.arguments import TrainingArguments

    if halvings == 0:
        return dict(args)
    parsed = TrainingArguments.from_dict(args, prefix="evaluate.args")
    size = max(1, (parsed.per_device_eval_batch_size // shared_by) >> halvings)
    # All arguments by their new names: the lowered batch would contradict an old name of it.
    return {**parsed.to_dict(), "per_device_eval_batch_size": size * shared_by}


def count_sharers(parsed: TrainingArguments, world_size: Callable[[], int]) -> int:
    """Processes that share one batch of these arguments: all of them with `split_batches`, otherwise one.

    Only then `world_size` is called, which looks at this machine's devices.
    """
    from trainer_lib.arguments.configs.accelerator_config import BatchSettings

    return world_size() if BatchSettings.of(parsed.accelerator_config).split_batches else 1


def max_halvings(batch_size: int, *, shared_by: int = 1) -> int:
    """The number of halvings until each process that shares the batch has one sample."""
    return max(0, (batch_size // shared_by).bit_length() - 1)


# -- Prefect asks -----------------------------------------------------------------------------------------------------

_DECISION = "trainflow_retry_decision"


def attach_decision(error: BaseException, decision: Decision) -> None:
    """Attach a decision to the failure that it is about: Prefect hands that failure to `should_retry`."""
    # On the error itself: Prefect passes its condition nothing else. Any exception class can carry it.
    setattr(error, _DECISION, decision)


def attach_outside_attempt(error: TrainflowError, *, retries: int) -> None:
    """Decide about a failure outside of any attempt (the store could not be read): charged by Prefect's own count."""
    context = _task_context()
    if context is not None and _attached_decision(error) is None:
        attach_decision(error, decide(error, retries=retries, past=past_by_prefect(), can_halve=False))


def past_by_prefect() -> Past:
    """The failures of this task run by Prefect's own count, which needs no store; none outside of a task run."""
    context = _task_context()
    failures = 0 if context is None else max(0, context.task_run.run_count - 1)
    return Past(used=failures, outages=failures)


def should_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's `retry_condition_fn`: what was decided about the failure in the state of the task run."""
    decision = _attached_decision(state.result(raise_on_failure=False))
    return decision is not None and decision.retry


def _attached_decision(error: object) -> Decision | None:
    decision = getattr(error, _DECISION, None)
    return decision if isinstance(decision, Decision) else None


def invocation() -> str:
    """The scope of a budget of retries: a Prefect task run, or this process when there is none."""
    context = _task_context()
    return _INVOCATION if context is None else str(context.task_run.id)


def in_task_run() -> bool:
    """Whether this is running inside a Prefect task."""
    return _task_context() is not None


def first_try() -> bool:
    """Whether this is not Prefect's retry of a task run."""
    context = _task_context()
    return context is None or context.task_run.run_count <= 1


def _task_context() -> Any:
    from prefect.context import TaskRunContext

    return TaskRunContext.get()


def now() -> str:
    """The time in UTC, ISO-8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()
