"""What a machine watches while its workers train with others': whether those live, and what they ask.

A thread, for the main one waits in torchrun. It never speaks to the workers' process group, and costs them nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

from trainer_lib.guard import alive, send
from trainer_lib.launch.kernel_oom import OomWatch
from trainer_lib.launch.run_dir import RunDir, read_process
from trainer_lib.machines.rendezvous import LOST_S, Lost, Meeting, Pulse

BEAT_S = 0.5
PATIENCE_S = 5.0  # for workers to notice by themselves that a peer is gone
STUCK_S = 20.0  # for torchrun to notice that its workers are
ACCOUNTS_S = 20.0
STACKS_S = 1.0


class Watch(threading.Thread):
    """What both sides have in common: ending this machine's workers, and accounting for them."""

    def __init__(self, run_dir: RunDir, meeting: Meeting) -> None:
        super().__init__(name="trainflow-watch", daemon=True)
        self._run_dir = run_dir
        self._meeting = meeting
        self._closed = threading.Event()
        self._ended: set[int] = set()
        self._over_since: float | None = None

    def run(self) -> None:
        """Look twice a second."""
        while not self._closed.wait(BEAT_S):
            try:
                self._look()
            except Lost:
                self._meeting_lost()
                return

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        if self.is_alive():
            self.join(BEAT_S * 10)

    def account(self, endings: list[dict[str, Any]], oom: OomWatch) -> dict[str, Any]:
        """How this machine's workers ended: those that this thread had to end are left out, they are no cause."""
        killed = oom.rose()
        host = socket.gethostname()
        kept = [end for end in endings if end["pid"] not in self._ended]
        return {
            "failed": bool(endings),
            "endings": [{**end, "host": host, "out_of_memory": killed} for end in kept],
            "records": self._run_dir.errors(),
        }

    def _look(self) -> None:
        raise NotImplementedError

    def _meeting_lost(self) -> None:
        """The store is gone while workers may still run."""

    def _over(self) -> bool:
        """The attempt is over: whether the workers have had their time to notice. Those that did not are ended."""
        now = time.monotonic()
        self._over_since = self._over_since or now
        if now - self._over_since < PATIENCE_S:
            return False
        for path in self._run_dir.path.glob("worker-*.pid"):
            process = read_process(path)
            if process is not None and alive(process):
                self._ended.add(process.pid)
                send(process, signal.SIGKILL)
        return True

    def _ask_workers(self) -> None:
        """Have this machine's workers write their stacks into the run directory."""
        for path in self._run_dir.path.glob("worker-*.pid"):
            process = read_process(path)
            if process is not None:
                send(process, signal.SIGUSR1)


class FollowerWatch(Watch):
    """A following machine's."""

    def begin(self, number: int) -> None:
        """Start giving signs of life under the number that this machine has taken."""
        self._number = number
        self._beat = 0
        self._asked = False
        self._lost = False
        self.start()

    def check(self) -> None:
        """Raise Lost when the leading machine was lost while the workers ran."""
        if self._lost:
            raise Lost("the leading machine is gone")

    def _look(self) -> None:
        self._beat += 1
        self._meeting.say(f"alive/{self._number}", self._beat)
        if not self._asked and self._meeting.heard("stacks"):
            self._asked = True
            self._ask_workers()
            time.sleep(STACKS_S)
            self._meeting.say(f"stacks/{self._number}", self._run_dir.stack_files())
        if self._over_since is not None or self._meeting.heard("end"):
            self._over()

    def _meeting_lost(self) -> None:
        self._lost = True
        while not self._over() and not self._closed.wait(BEAT_S):
            pass


class LeaderWatch(Watch):
    """The leading machine's."""

    def __init__(self, run_dir: RunDir, meeting: Meeting, followers: list[dict[str, Any]]) -> None:
        super().__init__(run_dir, meeting)
        self._pulses = {node["number"]: Pulse(meeting, node["number"]) for node in followers}
        self._hosts = {node["number"]: node["host"] for node in followers}
        self._accounts: dict[int, dict[str, Any]] = {}
        self._lost: dict[int, float] = {}
        self._asked = self._concluding = False

    def living(self) -> list[int]:
        """The machines that still answer."""
        return [number for number in self._pulses if number not in self._lost]

    def conclude(self, own: dict[str, Any]) -> None:
        """Wait for the others' accounts, and leave everything in the run directory as if it had happened here."""
        self._concluding = True
        deadline = time.monotonic() + ACCOUNTS_S
        while set(self.living()) - self._accounts.keys() and time.monotonic() < deadline:
            time.sleep(BEAT_S / 2)
        self.close()
        with contextlib.suppress(Lost):
            self._hear()
        self._write(own)

    def _write(self, own: dict[str, Any]) -> None:
        accounts = [own, *self._accounts.values()]
        for record in (record for account in accounts[1:] for record in account["records"]):
            self._run_dir.write_json(f"error-rank{int(record['rank'] or 0)}.json", record)
        lost = [{"host": self._hosts[number], "silent_s": seconds} for number, seconds in self._lost.items()]
        endings = [end for account in accounts for end in account["endings"]]
        self._run_dir.write_json("agent.json", {"failures": endings, "lost": lost})

    def _look(self) -> None:
        self._hear()
        if not self._asked and self._run_dir.stacks_asked():
            self._asked = True
            self._meeting.say("stacks", True)
        if self._asked:
            for number in self._pulses:
                for name, text in (self._meeting.heard(f"stacks/{number}") or {}).items():
                    self._run_dir.write_stack(name, text)
        failed = any(account["failed"] for account in self._accounts.values())
        over = (failed or self._lost) and not self._concluding and self._over()
        if over and time.monotonic() - (self._over_since or 0.0) > STUCK_S:
            # torchrun waits for a machine that will never come: leave what is known, and let the launcher see to it.
            self._write({"endings": [], "records": [], "failed": True})
            os._exit(1)

    def _hear(self) -> None:
        for number, pulse in self._pulses.items():
            account = self._accounts.get(number) or self._meeting.heard(f"account/{number}")
            if account is not None:
                self._accounts[number] = account
                self._lost.pop(number, None)
            elif (silent_s := pulse.silent_s()) > LOST_S:
                self._lost.setdefault(number, silent_s)
