"""From what is left in a run directory to one typed failure.

Several ranks usually fail together: one for a reason, the others because it is gone. In this order the first that
applies is reported: machines that did not find each other, a rank's own record (the earliest), a rank that was killed,
a machine that vanished, a launcher or guard that was killed (workers then stop, and would say that they were asked to),
an agreed stop, a rank that only lost contact.
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


def find_failure(run_dir: RunDir, ending: Ending, *, direct: bool) -> TrainflowError:
    """Why a launch gave no result.

    Args:
        direct: the guard's command was the only worker itself, not a launcher of workers.
    """
    records = run_dir.read_errors()
    stopped = [record for record in records if record.get("class") == Preempted.__name__]
    stopped.sort(key=lambda record: record.get("step") is None)  # a rank stopped twice may know no step
    if ending.hung_s is not None:
        return _hung(run_dir, ending)
    if ending.cancelled:
        return _cancelled(stopped, ending)
    agent = run_dir.read_json("agent.json") or {}
    if agent.get("failure") is not None:
        return from_record(agent["failure"])
    for record in records:
        if not record.get("secondary") and record not in stopped:
            return from_record(record)
    dead = _died_without_a_word(run_dir, ending, {int(record["rank"] or 0) for record in records}, direct=direct)
    if dead is not None:
        return dead
    if agent.get("lost"):
        return _lost_machine(agent["lost"][0], ending)
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
        details=run_dir.format_stacks() or ending.tail,
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
        # A rank that was asked to stop before it could say so is a consequence, whatever the clocks say.
        silent.sort(key=lambda rank: (rank["exitcode"] == -signal.SIGTERM, rank["time"], rank["rank"]))
    elif guard is not None and direct and not spoke:
        silent = [{"rank": 0, "exitcode": guard["code"]}]
    elif guard is not None and not direct:
        silent = _silent_workers(run_dir, spoke, int(guard["code"]))
    else:
        return None
    for rank in silent:
        killed_for_memory = ending.out_of_memory or bool(rank.get("out_of_memory"))
        return _silent_rank(int(rank["rank"]), int(rank["exitcode"]), ending, rank.get("host"), killed_for_memory)
    return None


def _silent_workers(run_dir: RunDir, spoke: set[int], code: int) -> list[dict[str, Any]]:
    """Ranks without a record, under a launcher that accounts for none but exits with the code of the first that failed.

    Where it says nothing either (it was killed itself, or ended well), no rank is to blame.
    """
    if code <= 0:
        return []
    signalled = 256 - code if code > 200 else 0  # sys.exit(-9) of a Python launcher is exit code 247
    ranks = sorted(int(path.stem.removeprefix("worker-")) for path in run_dir.path.glob("worker-*.pid"))
    return [{"rank": rank, "exitcode": -signalled or code} for rank in ranks if rank not in spoke]


def _lost_machine(machine: dict[str, Any], ending: Ending) -> TrainflowError:
    when = "" if ending.step is None else f" at step {ending.step}"
    return InfrastructureError(
        f"the machine {machine['host']} was lost{when}: no sign of life for {machine['silent_s']:.0f} s.",
        field="train.launch.nodes",
        step=ending.step,
        remedy="Start `trainflow join` there again; the same command continues from the last save.",
        details=ending.tail,
    )


def _silent_rank(rank: int, code: int, ending: Ending, host: str | None, killed_for_memory: bool) -> TrainflowError:
    where: dict[str, Any] = {"rank": rank, "step": ending.step, "details": ending.tail}
    when = ("" if host is None else f" on {host}") + ("" if ending.step is None else f" at step {ending.step}")
    if code == -signal.SIGKILL and killed_for_memory:
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
