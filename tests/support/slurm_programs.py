"""Slurm's programs on PATH, as `tests.support.stand_ins.slurm` plays them, and what happens to their jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.launched import wait_until
from tests.support.stand_ins import slurm


class FakeSlurm:
    """A cluster of two machines. `set` and `unset` make and remove the files that change what its programs say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (folder / "tmp").mkdir()
        for name in (*slurm.PROGRAMS, "requeue", "daemon"):
            command = f'exec {sys.executable} -I -S {Path(slurm.__file__)} {folder} {name} "$@"'
            (programs / name).write_text(f"#!/bin/sh\n{command}\n")
            (programs / name).chmod(0o755)
        self.path = str(programs)
        self.set("machines", "2")
        self._daemon = subprocess.Popen([f"{programs}/daemon"], start_new_session=True, stdin=subprocess.DEVNULL)

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink()

    def calls(self, program: str) -> list[str]:
        """The command lines of a program so far."""
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [line for line in lines if line.split()[0] == program]

    def jobs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "jobs").glob("*") if (path / "state.json").exists())

    def state(self, number: str = "1") -> str:
        return str(slurm.state_of(self.folder, number)["state"])

    def wait_for(self, state: str, number: str = "1", timeout: float = 60.0) -> None:
        wait_until(lambda: number in self.jobs() and self.state(number) == state, timeout)

    def take(self, state: str, number: str = "1", *, kind: int = signal.SIGTERM, by: str = "") -> None:
        """End a job: its tasks are asked to end, and have a while for it, or killed; then it is in that state."""
        slurm.set_state(self.folder, number, state=state, by=by)
        slurm.signal_tasks(self.folder, number, kind)
        wait_until(lambda: not slurm.signal_tasks(self.folder, number, 0), 60)

    def requeue(self, number: str = "1") -> None:
        """Take the machines of a job, and put it back into the queue, from which it starts again."""
        self.take("PENDING", number)
        subprocess.run([f"{self.path}/requeue", number], check=True)

    def close(self) -> None:
        """End what a failed test left."""
        for number in self.jobs():
            self.take("CANCELLED", number, kind=signal.SIGKILL)
        self.set("stop")
        self._daemon.wait(30)
