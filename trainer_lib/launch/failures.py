"""Find the one failure of a launch from the files in its run directory.

Several ranks usually fail together: one has the cause, the others only lost that one. The first of these that applies
is reported: machines that did not find each other, the earliest record of a rank, a rank that was killed, a machine
that vanished, a launcher or guard that was killed (workers then stop, and record that they were asked to), an agreed
stop, a rank that only lost contact.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer_lib.arguments.configs.parallelism_config import FIELD, PEERS, Grid, read_layout
from trainer_lib.errors import (
    ConfigError,
    HangError,
    InfrastructureError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    TrainflowError,
    from_record,
)
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.supervise import Ending

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_NAMED_RANKS = re.compile(r"\b[Rr]anks? ([\d, and]+)")
_MOST_PLACES = 3
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_OURS = Path(__file__).resolve().parents[1]
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def describe_places(stacks: Mapping[int, str]) -> str | None:
    """The places of ranks in their stacks: "rank 1 in collate (recipe.py:12), rank 0 in wait (ops.py:7)", or None."""
    ranks_at: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        place = _find_place(text)
        if place is not None:
            ranks_at.setdefault(place, []).append(rank)
    # The place of the fewest ranks first: usually one rank is stuck, and the others wait for it.
    ordered = sorted(ranks_at.items(), key=lambda item: (len(item[1]), item[1]))
    places = (
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} in {place}"
        for place, ranks in ordered[:_MOST_PLACES]
    )
    return ", ".join(places) or None


def _find_place(text: str) -> str | None:
    """The innermost frame of the user's code in the main thread, else its innermost frame."""
    # faulthandler writes the newest thread first, so the last one is the main thread.
    main = _THREAD.split(text)[-1]
    frames = _FRAME.findall(main)
    if not frames:
        return None
    file, line, function = next((frame for frame in frames if _is_users(frame[0])), frames[0])
    return f"{function} ({Path(file).name}:{line})"


def _is_users(file: str) -> bool:
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts) or file.startswith("<"):
        return False
    return not path.is_relative_to(_OURS) and not any(path.is_relative_to(folder) for folder in _STANDARD)


def find_failure(run_dir: RunDir, ending: Ending, *, direct: bool) -> TrainflowError:
    """The failure of a launch that has no result; where processes have coordinates, the message names them.

    `direct`: the guard's command was the only worker itself, not a launcher of workers.
    """
    error = _find_failure(run_dir, ending, direct=direct)
    args = (run_dir.read_json("request.json") or {}).get("args") or {}
    given: Any = SimpleNamespace(parallelism=args.get(FIELD), parallelism_config=args.get(PEERS))
    grid = None  # where all processes are copies or shards
    with contextlib.suppress(ConfigError):
        layout = read_layout(given)
        grid = None if layout is None else Grid(layout.sizes())
    named = {int(number) for ranks in _NAMED_RANKS.findall(error.message) for number in re.findall(r"\d+", ranks)}
    ranks = sorted({*named, *(() if error.rank is None else (error.rank,))})[:_MOST_PLACES]
    if grid is not None and ranks and ranks[-1] < grid.size:
        error.message += f" {'; '.join(f'rank {rank} is {grid.describe(rank)}' for rank in ranks).capitalize()}."
    return error


def _find_failure(run_dir: RunDir, ending: Ending, *, direct: bool) -> TrainflowError:
    records = run_dir.read_errors()
    stopped = [record for record in records if record.get("class") == Preempted.__name__]
    stopped.sort(key=lambda record: record.get("step") is None)  # a rank that was stopped twice may not know its step
    # First what the owner itself ended: it explains every record that follows.
    if ending.hung_s is not None:
        silence = f"There was no progress for {ending.hung_s:.0f} s"
        return _stood_still(run_dir, ending, silence, "train.launch.timeout_s")
    if ending.cancelled:
        return _cancelled(stopped, ending)
    agent, guard = run_dir.read_json("agent.json"), run_dir.read_json("guard.json")
    if agent is not None and agent.get("failure") is not None:
        return from_record(agent["failure"])
    for record in records:
        # A record is secondary when its rank only lost contact with another one.
        if not record.get("secondary") and record not in stopped:
            return from_record(record)
    lost = [] if agent is None else agent.get("lost", [])
    if not lost and any(record.get("timed_out") for record in records):  # a living rank did not come
        what = "A rank did not come to a collective within ddp_timeout"
        return _stood_still(run_dir, ending, what, "train.args.ddp_timeout")
    # A rank without a record explains more than the others' secondary ones.
    recorded = {int(record["rank"] or 0) for record in records}
    for rank in _silent_ranks(run_dir, agent, guard, recorded, direct=direct):
        return _died_silently(rank, ending)
    for machine in lost:
        when = "" if ending.step is None else f" at step {ending.step}"
        silence = f"there was no sign of life for {machine['silent_s']:.0f} s"
        what = f"The machine {machine['host']} was lost{when}: {silence}."
        remedy = "Start `trainflow join` there again; the same command continues from the last save."
        field = "train.launch.nodes"
        return InfrastructureError(what, field=field, step=ending.step, remedy=remedy, details=ending.tail)
    was_killed = guard is None or int(guard["code"]) < 0  # the launcher itself, or the guard
    for record in [] if was_killed else [*stopped, *records]:
        return from_record(record)
    return _launcher_failed(guard, ending)


def _stood_still(run_dir: RunDir, ending: Ending, what: str, field: str) -> TrainflowError:
    run_dir.keep()  # for its stacks and traces, which a message has no room for
    after = "" if ending.step is None else f" after step {ending.step}"
    stacks = run_dir.read_stacks()
    places = describe_places(stacks)
    stood = "" if places is None else f" They stood still: {places}."
    return HangError(
        f"{what}{after}, so all workers were ended.{stood}",
        field=field,
        step=ending.step,
        remedy=f"The stack and the collective trace of every rank are in {run_dir.path}. "
        "Raise the limit if the work is just slow.",
        details="\n".join(f"--- rank {rank}\n{text}" for rank, text in stacks.items()) or ending.tail,
    )


def _cancelled(stopped: list[dict[str, Any]], ending: Ending) -> TrainflowError:
    step = stopped[0].get("step") if stopped else None
    if step is None:
        return Interrupted("Cancelled.", step=ending.step, remedy="The same command continues from the last save.")
    return Interrupted(f"Cancelled; saved at step {step}.", step=step, remedy="The same command continues from there.")


def _silent_ranks(
    run_dir: RunDir, agent: dict[str, Any] | None, guard: dict[str, Any] | None, recorded: set[int], *, direct: bool
) -> list[dict[str, Any]]:
    """Return how ranks ended that have no record, by a signal or by an exit code; first the one to blame."""
    if agent is not None:

        def blame(rank: dict[str, Any]) -> tuple[Any, ...]:
            # A rank that SIGTERM ended before it could write a record is a consequence, whatever the clocks say, which
            # count whole seconds; a rank that crashed is a cause.
            code = int(rank["exitcode"])
            return 0 if -code in _CRASHES else 2 if code == -signal.SIGTERM else 1, rank["time"], rank["rank"]

        return sorted((rank for rank in agent["failures"] if rank["rank"] not in recorded), key=blame)
    code = 0 if guard is None else int(guard["code"])
    if direct:
        return [] if guard is None or recorded else [{"rank": 0, "exitcode": code}]
    if code <= 0:  # a launcher that was killed itself, or that ended well, blames no rank
        return []
    # Others exit with the code of the first that failed; a Python launcher's sys.exit(-9) is exit code 247.
    code = code - 256 if code > 200 else code
    ranks = sorted(int(path.stem.removeprefix("worker-")) for path in run_dir.path.glob("worker-*.pid"))
    return [{"rank": rank, "exitcode": code} for rank in ranks if rank not in recorded]


def _died_silently(ended: dict[str, Any], ending: Ending) -> TrainflowError:
    rank, code, host = int(ended["rank"]), int(ended["exitcode"]), ended.get("host")
    where: dict[str, Any] = {"rank": rank, "step": ending.step, "details": ending.tail}
    when = ("" if host is None else f" on {host}") + ("" if ending.step is None else f" at step {ending.step}")
    if code == -signal.SIGKILL and (ending.out_of_memory or ended.get("out_of_memory")):
        return OutOfMemoryError(
            f"Rank {rank} was killed by the kernel{when}: the machine's (or container's) memory ran out.",
            remedy="Lower per_device_train_batch_size (the global batch stays the same if global_batch_size is set), "
            "or give the machine more memory.",
            **where,
        )
    if code < 0:
        remedy = "The same command continues from the last save."
        if -code in _CRASHES:
            remedy = "A native library crashed; the last lines it printed are in the details (--debug)."
        return InfrastructureError(f"Rank {rank} was killed by {signal_name(-code)}{when}.", remedy=remedy, **where)
    what = f"Rank {rank} ended with exit code {code}{when} and recorded no reason."
    return InfrastructureError(what, remedy="The last lines it printed are in the details (--debug).", **where)


def _launcher_failed(guard: dict[str, Any] | None, ending: Ending) -> TrainflowError:
    """Return the failure of torchrun or the guard itself; no rank is to blame."""
    code, who = (ending.code, "The guard process") if guard is None else (int(guard["code"]), "The launcher")
    ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} and without a result"
    remedy = "The same command continues from the last save; the last lines are in the details (--debug)."
    return InfrastructureError(f"{who} {ended}.", step=ending.step, remedy=remedy, details=ending.tail)


def signal_name(number: int) -> str:
    """Return a signal's name and number, as in ``SIGKILL (9)``."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
