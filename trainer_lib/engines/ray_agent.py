"""The actor on a machine of a Ray cluster. Ray loads this module there: it imports next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

from trainer_lib import guard
from trainer_lib.base.json_text import parse_json

KILL_S = 5.0
MOST_LINES = 100_000
"""Lines that wait for the driver; beyond them the member waits, as it does for any reader of its output."""


class Agent:
    """Starts the member of its machine. Every method takes and returns JSON text."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._first = 0  # the number of the first of them
        self._room = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self, text: str) -> str:
        """Describe this machine; `seen` says whether a file of the driver is there."""
        import ray

        path = parse_json(text)["path"]
        node = ray.get_runtime_context().get_node_id()
        seen = path is None or Path(path).exists()
        host = ray.util.get_node_ip_address()
        return json.dumps({"host": host, "node": node, "seen": seen})

    def start(self, text: str) -> str:
        """Start the member, in an environment without what Ray sets for its own workers."""
        asked = parse_json(text)
        self._folder = tempfile.TemporaryDirectory(prefix="trainflow-ray-")
        folder = Path(self._folder.name)
        (folder / "job.json").write_text(asked["job"], encoding="utf-8")
        part = "lead" if asked["leads"] else "follow"
        # Results' bits depend on the number of threads, which Ray sets to the CPUs of an actor.
        kept = {name: value for name, value in os.environ.items() if name not in asked["without"]}
        member = [sys.executable, "-P", "-u", "-m", "trainer_lib.engines.member", part, str(folder / "job.json")]
        member += ["--host", asked["host"], "--nodes", str(asked["nodes"]), "--address", str(folder / "address")]
        member += ["--guarded"]  # Ray kills the guard itself when its machine is lost
        self._process = subprocess.Popen(
            # A machine without its agent cannot report: nothing there may go on, not even to save.
            [sys.executable, "-I", "-S", str(guard.__file__), "--grace", "0", "--", *member],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**kept, **asked["env"]},
            start_new_session=True,
        )
        # The driver reads the lines of the leading member only.
        listen = self._listen if asked["leads"] else self._drain
        threading.Thread(target=listen, args=(self._process.stdout,), daemon=True).start()
        return "{}"

    def _listen(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                with self._room:
                    self._room.wait_for(lambda: len(self._lines) < MOST_LINES)
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))

    def _drain(self, output: IO[bytes]) -> None:
        with output:  # a member whose pipe is full would stand still
            while output.read(1 << 16):
                pass

    def lead(self, text: str) -> str:
        """Tell the member, which waits for it, where the leading machine is."""
        folder = Path(self._folder.name)
        written = folder / "address.new"
        written.write_text(parse_json(text)["leader"], encoding="utf-8")
        written.replace(folder / "address")
        return "{}"

    def read(self, text: str) -> str:
        """Return the lines from a number on, and the exit code once the member has ended.

        The driver has the lines before that number, so they are dropped. It asks for the same ones again when an
        answer was lost, and a call that comes late asks for some that are gone.
        """
        code = None if self._process is None else self._process.poll()
        with self._room:
            read = max(0, int(parse_json(text)["after"]) - self._first)
            del self._lines[:read]
            self._first += read
            self._room.notify()
            return json.dumps({"lines": self._lines, "code": code})

    def tell(self, text: str) -> str:
        """Have the workers save and end, or kill them, after which the member is gone."""
        word = parse_json(text)["word"]
        if self._process is None or self._process.poll() is not None:
            return "{}"
        if word == "stop":  # as Slurm does it: what starts the workers ignores this signal
            for process in guard.descendants(self._process.pid):
                guard.send_signal(process, signal.SIGUSR2)
        elif self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        return "{}"
