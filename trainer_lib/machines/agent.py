"""One machine of a launch. ``python -m trainer_lib.machines.agent <run dir>`` starts the workers, and waits for them.

torchrun starts them, with a store that listens on loopback only, or ``accelerate launch``, whose options then follow.
Of several machines, one leads and the others follow it. Ranks follow from the order of the machines at the rendezvous;
the leading machine comes first, so rank 0, its events and its result are there. Whatever ends the workers of one
machine ends the attempt: every machine writes an account of its workers, the leading machine gathers the accounts,
publishes the outcome, and leaves the failure to its launcher, which may start a new attempt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from typing_extensions import override

from trainer_lib.arguments import environment
from trainer_lib.errors import InfrastructureError, Interrupted, TrainflowError, from_record
from trainer_lib.guard import is_alive, send_signal
from trainer_lib.launch.failures import find_failure
from trainer_lib.launch.run_dir import NOTHING, PLACES, RunDir, read_settings
from trainer_lib.launch.settings.config import LaunchConfig, resolve_config
from trainer_lib.launch.settings.variables import thread_variables, threads_of
from trainer_lib.launch.supervise import Ending, OomWatch
from trainer_lib.machines.rendezvous import LOST_S, Lost, Pulses, Rendezvous, gather, open_store, reach

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05
BEAT_S = 0.5
PATIENCE_S = 5.0  # seconds for workers to notice by themselves that a peer is gone
STUCK_S = 20.0  # seconds for torchrun to notice that its workers are gone
ACCOUNTS_S = 20.0
STACKS_S = 1.0
LAST_CALL_S = 10.0  # for machines that may still come, once the least are there
OUTCOME_S = 60.0
READ_S = 10.0
RETRY_S = 0.25


def main(argv: list[str]) -> int:
    """Run the workers to their end. Returns 0, or 1 after leaving the failure in the run directory."""
    run_dir = RunDir(Path(argv[0]))
    run_dir.record_process("agent", os.getpid())
    config, request, _ = read_settings(run_dir)
    try:
        if config.several_nodes:
            return _follow(run_dir, config) if request.get("follow") else _lead(run_dir, config, request)
        if config.kind == "accelerate":
            sys.argv = ["accelerate-launch", *argv[1:]]  # runpy runs the module as a command, which reads them there
            # In this process, as its own command would: torchrun's failure can be read here.
            command = "accelerate.commands.launch"
            failures = _find_endings(run_dir, lambda: runpy.run_module(command, run_name="__main__"))
        else:
            store = open_store(LOOPBACK, 0)
            master = (LOOPBACK, store.port)
            failures = run_workers(run_dir, request["verb"], int(config.processes), master=master)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    if failures:
        run_dir.write_json("agent.json", {"failures": failures})
    return 1 if failures else 0


def run_workers(
    run_dir: RunDir, verb: str, processes: int, *, master: tuple[str, int], nodes: int = 1, node_rank: int = 0
) -> list[dict[str, Any]]:
    """Start this machine's workers through torchrun and wait for their end; the job's store listens at `master`.

    Returns how failed ranks ended (rank, exit code, pid, time); nothing if all ended well.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # agent.json has what it reports
    options = run.get_args_parser().parse_args(
        [
            # No restarts by torchrun: an attempt has one start, and the launcher decides on the next.
            *("--nproc-per-node", str(processes), "--max-restarts", "0", "--monitor-interval", "0.1"),
            *("--nnodes", str(nodes), "--node-rank", str(node_rank)),
            *("--rdzv-backend", "static", "--master-addr", master[0], "--master-port", str(master[1])),
            *("--shutdown-timeout", str(int(float(os.environ.get("TRAINFLOW_GRACE_S", "60"))))),
            *("--log-dir", str(run_dir.path / "torchelastic")),  # torchrun makes this folder even if nothing uses it
            *("-m", "trainer_lib.worker", verb, str(run_dir.path)),
        ]
    )
    return _find_endings(run_dir, lambda: run.run(options))  # type: ignore[no-untyped-call]


def _find_endings(run_dir: RunDir, start: Callable[[], object]) -> list[dict[str, Any]]:
    """Call what starts the workers and waits for their end, and return how failed ranks ended.

    torchrun reports one time for all, including the workers that it then ended itself, so its report alone does not
    show which one failed first: a thread records when workers died.
    """
    closed, died = threading.Event(), dict[int, float]()

    def watch() -> None:
        # Twice as often as torchrun looks, so that a death is seen before torchrun ends the other workers.
        while not closed.wait(LOOK_S):
            for process in run_dir.find_workers():
                if not is_alive(process):
                    died.setdefault(process.pid, time.time())

    threading.Thread(target=watch, name="trainflow-deaths", daemon=True).start()
    try:
        start()
    except ChildFailedError as error:
        return [
            {"rank": rank, "exitcode": end.exitcode, "pid": end.pid, "time": died.get(end.pid, end.timestamp)}
            for rank, end in error.failures.items()
        ]
    except subprocess.CalledProcessError as error:  # accelerate starts a single worker without torchrun
        return [{"rank": 0, "exitcode": error.returncode, "pid": 0, "time": time.time()}]
    finally:
        closed.set()
    return []


# -------------------------------------------------------------------------------------------------- several machines
class Watch(threading.Thread):
    """Base of both sides: ends this machine's workers, and accounts for them."""

    def __init__(self, run_dir: RunDir, rendezvous: Rendezvous) -> None:
        super().__init__(name="trainflow-watch", daemon=True)
        self._run_dir = run_dir
        self._rendezvous = rendezvous
        self._closed = threading.Event()
        self._ended: set[int] = set()
        self._over_since: float | None = None

    @override
    def run(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._look()
            except Lost:
                self._handle_lost_rendezvous()
                return

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        # A watch that was never started cannot be joined.
        if self.is_alive():
            self.join(BEAT_S * 10)

    def account(self, endings: list[dict[str, Any]], oom: OomWatch) -> dict[str, Any]:
        """Return how this machine's workers ended, without those that this thread ended: they are not a cause."""
        killed = oom.has_risen()
        host = socket.gethostname()
        # What this thread has killed is a consequence, whatever its exit code says.
        kept = [end for end in endings if end["pid"] not in self._ended]
        return {
            "failed": bool(endings),
            "endings": [{**end, "host": host, "out_of_memory": killed} for end in kept],
            "records": self._run_dir.read_errors(),
        }

    def _look(self) -> None:
        raise NotImplementedError

    def _handle_lost_rendezvous(self) -> None:
        """The store is gone while workers may still run."""

    def _end_attempt(self) -> bool:
        """End the workers that have not noticed within `PATIENCE_S` that the attempt is over; False until then."""
        now = time.monotonic()
        self._over_since = self._over_since or now
        if now - self._over_since < PATIENCE_S:
            return False
        for process in self._run_dir.find_workers():
            if is_alive(process):
                self._ended.add(process.pid)
                send_signal(process, signal.SIGKILL)
        return True


class FollowerWatch(Watch):
    """The watch of a following machine: gives signs of life under the number that it has taken.

    `is_lost`: the leading machine was lost while the workers ran.
    """

    def __init__(self, run_dir: RunDir, rendezvous: Rendezvous, number: int) -> None:
        super().__init__(run_dir, rendezvous)
        self._number, self._beat = number, 0
        self._asked = self.is_lost = False

    @override
    def _look(self) -> None:
        self._beat += 1
        self._rendezvous.set(f"alive/{self._number}", self._beat)
        if not self._asked and self._rendezvous.get("stacks"):
            self._asked = True
            self._run_dir.ask_workers_for_stacks()
            # The workers need a moment to write.
            time.sleep(STACKS_S)
            self._rendezvous.set(f"stacks/{self._number}", self._run_dir.read_places())
        if self._over_since is not None or self._rendezvous.get("end"):
            self._end_attempt()

    @override
    def _handle_lost_rendezvous(self) -> None:
        self.is_lost = True
        while not self._end_attempt() and not self._closed.wait(BEAT_S):
            pass


class LeaderWatch(Watch):
    """The watch of the leading machine."""

    def __init__(self, run_dir: RunDir, rendezvous: Rendezvous, followers: list[dict[str, Any]]) -> None:
        super().__init__(run_dir, rendezvous)
        self._pulses = Pulses(rendezvous, [node["number"] for node in followers])
        self._hosts = {node["number"]: node["host"] for node in followers}
        self._accounts: dict[int, dict[str, Any]] = {}
        self._lost: dict[int, float] = {}
        self._counted = 0
        self._answered: set[int] = set()
        self._asked = self._concluding = False

    def living(self) -> list[int]:
        """Return the numbers of the machines that still answer."""
        return [number for number in self._pulses.numbers if number not in self._lost]

    def conclude(self, own: dict[str, Any]) -> None:
        """Wait for the others' accounts, and leave everything in the run directory as if it had happened here."""
        self._concluding = True
        deadline = time.monotonic() + ACCOUNTS_S
        while set(self.living()) - self._accounts.keys() and time.monotonic() < deadline:
            time.sleep(BEAT_S / 2)
        self.close()
        # The store may be gone by now; what was read before counts.
        with contextlib.suppress(Lost):
            self._read_accounts()
        self._write(own)

    def _write(self, own: dict[str, Any]) -> None:
        accounts = [own, *self._accounts.values()]
        for record in (record for account in accounts[1:] for record in account["records"]):
            self._run_dir.write_json(f"error-rank{int(record['rank'] or 0)}.json", record)
        lost = [{"host": self._hosts[number], "silent_s": seconds} for number, seconds in self._lost.items()]
        endings = [end for account in accounts for end in account["endings"]]
        self._run_dir.write_json("agent.json", {"failures": endings, "lost": lost})

    @override
    def _look(self) -> None:
        self._read_accounts()
        if not self._asked and self._run_dir.has_stacks_request():
            self._asked = True
            self._rendezvous.set("stacks", True)
        if self._asked:
            self._read_stacks()
        failed = any(account["failed"] for account in self._accounts.values())
        over = (failed or self._lost) and not self._concluding and self._end_attempt()
        if over and time.monotonic() - (self._over_since or 0.0) > STUCK_S:
            # torchrun waits for a machine that will never come: write what is known; the launcher does the rest.
            self._write({"endings": [], "records": [], "failed": True})
            os._exit(1)

    def _read_stacks(self) -> None:
        for number in self._pulses.numbers:
            if number in self._answered or (stacks := self._rendezvous.get(f"stacks/{number}")) is None:
                continue
            self._answered.add(number)
            for name, text in stacks.items():
                if PLACES.fullmatch(name):  # it comes from another machine
                    self._run_dir.write(name, text)

    def _read_accounts(self) -> None:
        self._pulses.look()
        count = self._rendezvous.add("accounts", 0)
        is_new, self._counted = count != self._counted, count
        for number in self._pulses.numbers:
            if number in self._accounts:
                continue
            silent_s = self._pulses.silent_s(number)
            # Of a machine that is lost too: it may have died before it counted its account.
            account = self._rendezvous.get(f"account/{number}") if is_new or silent_s > LOST_S else None
            if account is not None:
                self._accounts[number] = account
                self._lost.pop(number, None)
            elif silent_s > LOST_S:
                self._lost.setdefault(number, silent_s)


# ------------------------------------------------------------------------------------------------------------- leading
def _lead(run_dir: RunDir, config: LaunchConfig, request: dict[str, Any]) -> int:
    host, port = config.endpoint
    rendezvous = Rendezvous(open_store(host, port))
    least, most = config.node_range
    if request["verb"] == NOTHING:
        _publish_outcome(rendezvous, None, most - 1, READ_S)
        return 0
    environment.use_interface(host, config.interface)
    rendezvous.set("request", request)
    followers: list[dict[str, Any]] = []
    try:
        followers = gather(
            rendezvous,
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
        _publish_outcome(rendezvous, error, rendezvous.add("arrivals", 0), READ_S)
        return 1
    rendezvous.set("world", [follower["number"] for follower in followers])
    watch = LeaderWatch(run_dir, rendezvous, followers)
    oom = OomWatch()
    watch.start()
    endings = run_workers(
        run_dir, request["verb"], int(config.processes), master=(host, port), nodes=len(followers) + 1, node_rank=0
    )
    if run_dir.read_json("result.json") is not None and not run_dir.read_errors():
        _publish_outcome(rendezvous, None, len(watch.living()), OUTCOME_S)  # their workers may take a while to leave
        watch.close()
        return 0
    rendezvous.set("end", True)
    watch.conclude(watch.account(endings, oom))
    if run_dir.was_cancelled():
        stopped = "The leading machine was asked to stop."
        failure: TrainflowError = Interrupted(stopped, remedy="Run the same commands to resume.")
    else:  # as the launcher of this machine will see it
        failure = find_failure(run_dir, Ending(1, False, None, False, None, ""), direct=False)
    _publish_outcome(rendezvous, failure, len(watch.living()), READ_S)
    return 1


def _publish_outcome(rendezvous: Rendezvous, error: TrainflowError | None, listeners: int, seconds: float) -> None:
    """Publish the outcome, and wait until the others have read it: the store ends with this process."""
    again = error is not None and error.retryable
    rendezvous.set("outcome", {"record": None if error is None else error.to_record(), "again": again})
    deadline = time.monotonic() + seconds
    while rendezvous.add("outcome_read", 0) < listeners and time.monotonic() < deadline:
        time.sleep(0.05)


# ----------------------------------------------------------------------------------------------------------- following
def _follow(run_dir: RunDir, config: LaunchConfig) -> int:
    host, port = config.endpoint
    deadline = time.monotonic() + config.join_timeout_s
    while True:
        store = reach(host, port)
        outcome = None
        if store is not None:
            environment.use_interface(host, config.interface)
            with contextlib.suppress(Lost):
                outcome = _attempt(run_dir, config, Rendezvous(store))
            # Counted from the last contact: a training may have taken days.
            deadline = time.monotonic() + config.join_timeout_s
        if outcome is not None and not outcome["again"]:
            run_dir.write_json("outcome.json", outcome)
            return 1 if outcome["record"] else 0
        if time.monotonic() > deadline:
            error = InfrastructureError(
                f"No machine leads there (waited {config.join_timeout_s:.0f} s).",
                field="train.launch.rendezvous",
                value=config.rendezvous,
                remedy="Start the pipeline on the leading machine, and see that its address can be reached from here.",
            )
            run_dir.write_json("outcome.json", {"record": error.to_record(), "again": False})
            return 1
        time.sleep(RETRY_S)


def _attempt(run_dir: RunDir, config: LaunchConfig, rendezvous: Rendezvous) -> dict[str, Any] | None:
    """Take part in one attempt, and return its outcome; None when none was published. Raises Lost."""
    run_dir.clear_attempt()
    request = _wait_for(rendezvous, "request", OUTCOME_S)
    if request is None:
        return _read_outcome(rendezvous)
    run_dir.write_json("request.json", request)
    problem, processes = None, 0
    try:
        resolved = resolve_config(config, use_cpu=bool(request.get("args", {}).get("use_cpu")))
        os.environ.update(thread_variables(threads_of(resolved, {})))
        processes = int(resolved.processes)
    except TrainflowError as error:
        error.message = f"{error.message.rstrip('.')} (on {socket.gethostname()})."
        problem = error.to_record()
    number = rendezvous.add("arrivals")
    watch = FollowerWatch(run_dir, rendezvous, number)
    watch.start()
    try:
        about = {"host": socket.gethostname(), "node_rank": config.node_rank, "number": number, "problem": problem}
        rendezvous.set(f"node/{number}", about)
        world = _wait_for(rendezvous, "world")
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
            if watch.is_lost:
                raise Lost("the leading machine is gone")
            rendezvous.set(f"account/{number}", watch.account(endings, oom))
            rendezvous.add("accounts")
        _wait_for(rendezvous, "outcome", OUTCOME_S if world and number in world else None)
        watch.close()  # a message under way would make the end of the store reset the connection
        return _read_outcome(rendezvous)
    finally:
        watch.close()


def _read_outcome(rendezvous: Rendezvous) -> dict[str, Any] | None:
    """Return the outcome if it is published, and count this machine as a reader of it."""
    outcome: dict[str, Any] | None = rendezvous.get("outcome")
    if outcome is not None:
        with contextlib.suppress(Lost):
            rendezvous.add("outcome_read")
    return outcome


def _wait_for(rendezvous: Rendezvous, key: str, seconds: float | None = None) -> Any:
    """Wait for a key that the leading machine sets; None once the outcome is published without it."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        value = rendezvous.get(key)
        if value is not None or rendezvous.get("outcome") is not None:
            return value
        time.sleep(RETRY_S)
    return None


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(ended)  # nothing is left to do, and taking torch apart takes a second
