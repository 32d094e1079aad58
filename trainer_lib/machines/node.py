"""One machine of several. ``python -m trainer_lib.machines.node <run dir>`` leads an attempt or follows the leader.

Either way torchrun starts this machine's workers, under ranks that follow from the order in which the meeting seats the
machines; the leading machine comes first, so rank 0 and its events and result are there. Whatever ends one machine's
workers ends the attempt: all account for theirs, the leading machine gathers the accounts, says the verdict, and leaves
the failure to its launcher, which may start a new attempt.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from trainer_lib.arguments import environment
from trainer_lib.errors import InfrastructureError, Interrupted, TrainflowError, from_record
from trainer_lib.launch import nodes
from trainer_lib.launch.config import LaunchConfig, check
from trainer_lib.launch.failures import failure
from trainer_lib.launch.kernel_oom import OomWatch
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.supervise import Ending
from trainer_lib.launch.variables import thread_variables, threads_of
from trainer_lib.machines.agent import run_workers
from trainer_lib.machines.attempt import FollowerWatch, LeaderWatch
from trainer_lib.machines.rendezvous import Lost, Meeting, gather, open_store, reach

LAST_CALL_S = 10.0  # for machines that may still come, once the least are there
VERDICT_S = 60.0
HEARD_S = 10.0
RETRY_S = 0.5


def main(argv: list[str]) -> int:
    """Lead or follow, to the end. Returns 0, or 1 after leaving the failure in the run directory."""
    run_dir = RunDir(Path(argv[0]))
    run_dir.record_process("agent", os.getpid())
    config, request = nodes.settings(run_dir.path)
    try:
        return _lead(run_dir, config, request) if nodes.leads(request) else _follow(run_dir, config)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)


# ------------------------------------------------------------------------------------------------------------- leading
def _lead(run_dir: RunDir, config: LaunchConfig, request: dict[str, Any]) -> int:
    host, port = config.endpoint
    store = open_store(host, port)
    meeting = Meeting(store)
    least, most = config.node_range
    if request["verb"] == nodes.NOTHING:
        _say_verdict(meeting, None, most - 1, HEARD_S)
        return 0
    _use_interface(config)
    meeting.say("request", request)
    followers: list[dict[str, Any]] = []
    try:
        followers = gather(
            meeting,
            least,
            most,
            patience_s=config.join_timeout_s,
            last_call_s=min(LAST_CALL_S, config.join_timeout_s),
            endpoint=str(config.rendezvous),
        )
        for follower in followers:
            if follower["problem"] is not None:
                raise from_record(follower["problem"])
    except TrainflowError as error:
        run_dir.write_json("agent.json", {"failures": [], "failure": error.to_record()})
        _say_verdict(meeting, error, meeting.count("arrivals", 0), HEARD_S)
        return 1
    meeting.say("world", [follower["number"] for follower in followers])
    watch = LeaderWatch(run_dir, Meeting(store), followers)
    oom = OomWatch()
    watch.start()
    endings = run_workers(
        run_dir, request["verb"], int(config.processes), master=(host, port), nodes=len(followers) + 1, node_rank=0
    )
    if run_dir.read_json("result.json") is not None and not run_dir.errors():
        _say_verdict(meeting, None, len(watch.living()), VERDICT_S)  # their workers may take a while to leave
        watch.close()
        return 0
    meeting.say("end", True)
    watch.conclude(watch.account(endings, oom))
    _say_verdict(meeting, _why(run_dir), len(watch.living()), HEARD_S)
    return 1


def _why(run_dir: RunDir) -> TrainflowError:
    """The failure as the leading machine's launcher is going to see it."""
    if run_dir.was_cancelled():
        return Interrupted("The leading machine was told to stop.", remedy="Run the same commands to go on.")
    return failure(run_dir, Ending(1, False, None, False, None, ""), direct=False)


def _say_verdict(meeting: Meeting, error: TrainflowError | None, listeners: int, seconds: float) -> None:
    """Tell the others, and stay until they have heard it: the store ends with this process."""
    again = error is not None and error.retryable
    meeting.say("verdict", {"record": None if error is None else error.to_record(), "again": again})
    deadline = time.monotonic() + seconds
    while meeting.count("heard", 0) < listeners and time.monotonic() < deadline:
        time.sleep(0.05)


# ----------------------------------------------------------------------------------------------------------- following
def _follow(run_dir: RunDir, config: LaunchConfig) -> int:
    host, port = config.endpoint
    deadline = time.monotonic() + config.join_timeout_s
    while True:
        met = reach(host, port)
        verdict = None
        if met is not None:
            _use_interface(config)
            try:
                verdict = _attempt(run_dir, config, Meeting(met), FollowerWatch(run_dir, Meeting(met)))
            except Lost:
                verdict = None
            deadline = time.monotonic() + config.join_timeout_s
        if verdict is not None and not verdict["again"]:
            run_dir.write_json("verdict.json", verdict)
            return 1 if verdict["record"] else 0
        if time.monotonic() > deadline:
            error = InfrastructureError(
                f"nobody leads there (waited {config.join_timeout_s:.0f} s).",
                field="train.launch.rendezvous",
                value=config.rendezvous,
                remedy="Start the pipeline on the leading machine, and see that its address can be reached from here.",
            )
            run_dir.write_json("verdict.json", {"record": error.to_record(), "again": False})
            return 1
        time.sleep(RETRY_S)


def _attempt(run_dir: RunDir, config: LaunchConfig, meeting: Meeting, watch: FollowerWatch) -> dict[str, Any] | None:
    """Take part in one attempt; the verdict, None when it was not said. Raises Lost when nobody leads any more."""
    run_dir.clear_attempt()
    request = _decided(meeting, "request", VERDICT_S)
    if request is None:
        return _verdict(meeting)
    run_dir.write_json("request.json", request)
    problem, processes = None, 0
    try:
        processes = _processes(config, request)
    except TrainflowError as error:
        error.message = f"{error.message.rstrip('.')} (on {socket.gethostname()})."
        problem = error.to_record()
    number = meeting.count("arrivals")
    watch.begin(number)
    try:
        about = {"host": socket.gethostname(), "node_rank": config.node_rank, "number": number, "problem": problem}
        meeting.say(f"node/{number}", about)
        world = _decided(meeting, "world")
        if world is not None and number in world:
            oom = OomWatch()
            endings = run_workers(
                run_dir,
                request["verb"],
                processes,
                master=config.endpoint,
                nodes=len(world) + 1,
                node_rank=world.index(number) + 1,
            )
            watch.check()
            meeting.say(f"account/{number}", watch.account(endings, oom))
        _decided(meeting, "verdict", VERDICT_S if world and number in world else None)
        watch.close()  # a word of its own under way would have the store's end break the connection, not close it
        return _verdict(meeting)
    finally:
        watch.close()


def _verdict(meeting: Meeting) -> dict[str, Any] | None:
    """The verdict, if it is out; the leading machine is told that it was heard."""
    verdict: dict[str, Any] | None = meeting.heard("verdict")
    if verdict is not None:
        with contextlib.suppress(Lost):
            meeting.count("heard")
    return verdict


def _decided(meeting: Meeting, key: str, seconds: float | None = None) -> Any:
    """A word of the leading machine, however long it takes; None once the verdict is out without it."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        value = meeting.heard(key)
        if value is not None or meeting.heard("verdict") is not None:
            return value
        time.sleep(RETRY_S / 2)
    return None


def _processes(config: LaunchConfig, request: dict[str, Any]) -> int:
    """How many workers this machine starts; their threads follow from it."""
    use_cpu = bool(request.get("args", {}).get("use_cpu"))
    resolved = check(config, use_cpu=use_cpu)
    os.environ.update(thread_variables(threads_of(resolved, {})))
    return int(resolved.processes)


def _use_interface(config: LaunchConfig) -> None:
    """Have the workers talk through the interface that leads to the others."""
    interface = config.interface or environment.interface_towards(config.endpoint[0])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # nothing is left to do, and taking torch apart takes a second
