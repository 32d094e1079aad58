"""Two machines on this one: a network namespace each, with an address of its own and a wire between them.

A process of a namespace sees that namespace's interfaces only, so what was bound to loopback cannot be reached from the
other one, and a broken wire is a lost machine: no packet says goodbye.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
_SETUP = """
set -e
ip link set lo up
unshare -n sleep 600 &
other=$!
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
ip link add wire0 type veth peer name wire1 netns $other
ip addr add 10.77.0.1/24 dev wire0
ip link set wire0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev wire1; ip link set wire1 up'
echo $other
wait $other
"""


class Network:
    """Two namespaces; `inside` puts a command into one of them."""

    def __init__(self, pids: tuple[int, int]) -> None:
        self._pids = pids

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on that machine."""
        return ["nsenter", "-t", str(self._pids[node]), "-U", "--preserve-credentials", "-n", *command]

    def cut(self) -> None:
        """Cut the wire: from now on every packet between the two is dropped."""
        subprocess.run(self.inside(1, ["ip", "link", "set", "wire1", "down"]), check=True)


@contextlib.contextmanager
def two_machines() -> Iterator[Network]:
    """Two namespaces for as long as the block runs; whatever runs in them is the caller's to end."""
    holder = subprocess.Popen(
        ["unshare", "-Urn", "--kill-child", "bash", "-c", _SETUP], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        line = holder.stdout.readline().strip()
        assert line.isdigit(), f"no namespaces (exit code {holder.wait()})"
        yield Network((holder.pid, int(line)))
    finally:
        holder.kill()
        holder.wait()
        if line.isdigit():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), 9)
        if holder.stdout is not None:
            holder.stdout.close()


class Follower:
    """A following machine: ``python -m trainer_lib.launch`` in a process of its own, its output in a file."""

    def __init__(self, folder: Path, *options: str, prefix: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "follower.log"
        root = str(Path(__file__).resolve().parents[2])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "trainer_lib.launch", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=root,
                env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": root},
                start_new_session=True,
            )

    def output(self) -> str:
        """Return everything printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(timeout)

    def kill_all(self) -> None:
        """Kill the machine: its owner, guard, agent and workers at once."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for process in family:
                process.suspend()
            for process in family:
                process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it if a failed test left it."""
        if self.process.poll() is None:
            self.kill_all()
