"""A real Dask cluster on this machine: a scheduler and workers, each a process that a test may kill like a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import police
from tests.support.launched import wait_until
from tests.support.repository import ROOT

_QUIET = {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}


class DaskCluster:
    """A scheduler on loopback, and so many workers of one thread each."""

    def __init__(self, folder: Path, workers: int, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        # Its workers' own helpers are not what a test left behind.
        kept = {name: value for name, value in os.environ.items() if name != police.TOKEN}
        self._env = {**kept, **_QUIET, "DASK_TEMPORARY_DIRECTORY": str(folder), "PYTHONPATH": str(ROOT), **(env or {})}
        address = folder / "address"
        words = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(address))
        self.processes = [self._start("dask_scheduler", *words)]
        wait_until(address.exists, 60)
        self.workers = [self.add() for _ in range(workers)]

    @property
    def address(self) -> str:
        """Return the scheduler's address."""
        return str(json.loads((self._folder / "address").read_text())["address"])

    def add(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a worker. Without a nanny: one that is killed stays away, as a machine does."""
        usual = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(self._folder))
        file = ("--scheduler-file", str(self._folder / "address"))
        process = self._start("dask_worker", *usual, *file, *words)
        self.processes.append(process)
        return process

    def _start(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / "cluster.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{program}", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._env,
                start_new_session=True,
            )

    def close(self) -> None:
        """End every process, the workers first."""
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
