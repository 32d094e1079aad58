"""A thread on each machine that watches, during an attempt, whether the others live and what they ask.

The main thread waits in torchrun. This one never uses the workers' process group, and costs them nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

from typing_extensions import override

from trainer_lib.guard import is_alive, send_signal
from trainer_lib.launch.kernel_oom import OomWatch
from trainer_lib.launch.run_dir import RunDir, read_process
from trainer_lib.machines.rendezvous import LOST_S, Lost, Pulses, Rendezvous

BEAT_S = 0.5
PATIENCE_S = 5.0  # seconds for workers to notice by themselves that a peer is gone
STUCK_S = 20.0  # seconds for torchrun to notice that its workers are gone
ACCOUNTS_S = 20.0
STACKS_S = 1.0


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
        for path in self._run_dir.path.glob("worker-*.pid"):
            process = read_process(path)
            if process is not None and is_alive(process):
                self._ended.add(process.pid)
                send_signal(process, signal.SIGKILL)
        return True

    def _ask_workers(self) -> None:
        """Have this machine's workers write their stacks into the run directory."""
        for path in self._run_dir.path.glob("worker-*.pid"):
            process = read_process(path)
            if process is not None:
                send_signal(process, signal.SIGUSR1)


class FollowerWatch(Watch):
    """The watch of a following machine."""

    def start_as(self, number: int) -> None:
        """Start giving signs of life under the number that this machine has taken."""
        self._number = number
        self._beat = 0
        self._asked = False
        self._lost = False
        self.start()

    def raise_if_lost(self) -> None:
        """Raise Lost when the leading machine was lost while the workers ran."""
        if self._lost:
            raise Lost("the leading machine is gone")

    @override
    def _look(self) -> None:
        self._beat += 1
        self._rendezvous.set(f"alive/{self._number}", self._beat)
        if not self._asked and self._rendezvous.get("stacks"):
            self._asked = True
            self._run_dir.request_stacks()  # the workers write their traces when they see this
            self._ask_workers()
            # The workers need a moment to write.
            time.sleep(STACKS_S)
            self._rendezvous.set(f"stacks/{self._number}", self._run_dir.read_stacks())
            self._rendezvous.set(f"traces/{self._number}", self._run_dir.read_traces())
        if self._over_since is not None or self._rendezvous.get("end"):
            self._end_attempt()

    @override
    def _handle_lost_rendezvous(self) -> None:
        self._lost = True
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
            if number in self._answered or (traces := self._rendezvous.get(f"traces/{number}")) is None:
                continue  # a machine writes its traces last
            self._answered.add(number)
            for name, text in self._rendezvous.get(f"stacks/{number}").items():
                self._run_dir.write_stack(name, text)
            for name, text in traces.items():
                self._run_dir.write_trace(name, text)

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
