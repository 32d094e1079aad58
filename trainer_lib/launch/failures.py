"""From what is left in a run directory to one typed failure.

Several ranks usually fail together: one for a reason, the others because it is gone. In this order the first that
applies is reported: a rank's own record (the earliest), a rank that was killed, a launcher or guard that was killed
(workers then stop, and would say that they were asked to), an agreed stop, a rank that only lost contact.
"""

from __future__ import annotations

import signal
from typing import Any

from trainer_lib.errors import (
    InfrastructureError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    TrainflowError,
    from_record,
)
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.supervise import Ending


def failure(run_dir: RunDir, ending: Ending, *, direct: bool) -> TrainflowError:
    """Why a launch gave no result.

    Args:
        direct: the guard's command was the only worker itself, not a launcher of workers.
    """
    records = run_dir.errors()
    stopped = [record for record in records if record.get("class") == Preempted.__name__]
    stopped.sort(key=lambda record: record.get("step") is None)  # a rank stopped twice may know no step
    if ending.hung_s is not None:
        return _hung(run_dir, ending)
    if ending.cancelled:
        return _cancelled(stopped, ending)
    for record in records:
        if not record.get("secondary") and record not in stopped:
            return from_record(record)
    dead = _died_without_a_word(run_dir, ending, {int(record["rank"] or 0) for record in records}, direct=direct)
    if dead is not None:
        return dead
    guard = run_dir.read_json("guard.json")
    if guard is None or int(guard["code"]) < 0:
        return _launcher_failed(guard, ending)
    for record in [*stopped, *records]:
        return from_record(record)
    return _launcher_failed(guard, ending)


def _hung(run_dir: RunDir, ending: Ending) -> TrainflowError:
    return InfrastructureError(
        f"no progress for {ending.hung_s:.0f} s; all workers were ended.",
        field="train.launch.timeout_s",
        step=ending.step,
        remedy="The stack of every rank is in the details (--debug). Raise the limit if the work is just slow.",
        details=run_dir.stacks() or ending.tail,
    )


def _cancelled(stopped: list[dict[str, Any]], ending: Ending) -> TrainflowError:
    step = stopped[0].get("step") if stopped else None
    if step is None:
        return Interrupted("Cancelled.", step=ending.step, remedy="The same command continues from the last save.")
    return Interrupted(f"Cancelled; saved at step {step}.", step=step, remedy="The same command continues from there.")


def _died_without_a_word(run_dir: RunDir, ending: Ending, spoke: set[int], *, direct: bool) -> TrainflowError | None:
    """The first rank that ended without leaving a record: by a signal, or by an exit code of its own."""
    agent = run_dir.read_json("agent.json")
    guard = run_dir.read_json("guard.json")
    if agent is not None:
        silent = [rank for rank in agent["failures"] if rank["rank"] not in spoke]
        silent.sort(key=lambda rank: (rank["time"], rank["rank"]))
        codes = [(int(rank["rank"]), int(rank["exitcode"])) for rank in silent]
    elif guard is not None and direct and not spoke:
        codes = [(0, int(guard["code"]))]
    else:
        return None
    for rank, code in codes:
        return _silent_rank(rank, code, ending)
    return None


def _silent_rank(rank: int, code: int, ending: Ending) -> TrainflowError:
    where: dict[str, Any] = {"rank": rank, "step": ending.step, "details": ending.tail}
    when = "" if ending.step is None else f" at step {ending.step}"
    if code == -signal.SIGKILL and ending.out_of_memory:
        return OutOfMemoryError(
            f"rank {rank} was killed by the kernel{when}: the machine's (or container's) memory ran out.",
            remedy="Lower per_device_train_batch_size (the global batch stays when global_batch_size is set), "
            "or give the machine more memory.",
            **where,
        )
    if code < 0:
        remedy = "The same command continues from the last save."
        if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            remedy = "A native library crashed; its last words are in the details (--debug)."
        return InfrastructureError(f"rank {rank} was killed by {signal_name(-code)}{when}.", remedy=remedy, **where)
    return InfrastructureError(
        f"rank {rank} ended with exit code {code}{when} and left no reason.",
        remedy="Its last lines are in the details (--debug).",
        **where,
    )


def _launcher_failed(guard: dict[str, Any] | None, ending: Ending) -> TrainflowError:
    """No rank is to blame: torchrun or the guard itself ended."""
    code, who = (ending.code, "the guard process") if guard is None else (int(guard["code"]), "the launcher")
    ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} and without a result"
    return InfrastructureError(
        f"{who} {ended}.",
        step=ending.step,
        remedy="The same command continues from the last save; the last lines are in the details (--debug).",
        details=ending.tail,
    )


def signal_name(number: int) -> str:
    """A signal as people write it: ``SIGKILL (9)``."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
