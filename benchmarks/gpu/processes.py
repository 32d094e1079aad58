"""Jobs as processes that are forked from one in which torch and transformers are imported, where CUDA allows that.

An import of both takes longer than most jobs. The process that is forked has asked CUDA for nothing (its versions and
devices are asked through NVML), so children have a GPU context each. Where such a child cannot use the GPU,
every job starts as a new interpreter instead.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

MARK = "RESULT "
FORKS = "TRAINFLOW_GPU_BENCHMARK_FORKS"  # set to 1 in the environment where children may be forked


def prepare(*, dry: bool) -> None:
    """Let the processes that are started from now on be forked from one with everything imported."""
    if dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # several jobs share few cores
    os.environ.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    os.environ[FORKS] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.gpu.imported"])


class Job:
    """A process that runs `measure` of `benchmarks.gpu.<module>`, and writes its output to a file.

    Args:
        module: its name.
        settings: keyword arguments of `measure`.
        output: the file.
        inside: this process is itself a job; what it starts ends with it.
    """

    def __init__(self, module: str, settings: dict[str, Any], output: Path, *, inside: bool = False) -> None:
        self._output = output
        self._popen: subprocess.Popen[str] | None = None
        if os.environ.get(FORKS) == "1":
            context: Any = multiprocessing.get_context("fork" if inside else "forkserver")
            self._process = context.Process(target=_serve, args=(module, settings, str(output), inside))
            self._process.start()
            self.pid = int(self._process.pid)
            return
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", json.dumps(settings)]
        with output.open("w") as file:
            self._popen = subprocess.Popen(command, stdout=file, stderr=file, text=True, start_new_session=not inside)
        self.pid = self._popen.pid

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait for the end; the exit code, negative for a signal. None: it was killed at the limit, with its group."""
        try:
            if self._popen is not None:
                return self._popen.wait(limit_s)
            self._process.join(limit_s)
            if self._process.exitcode is not None:
                return int(self._process.exitcode)
        except subprocess.TimeoutExpired:
            pass
        except BaseException:
            self.kill()
            raise
        self.kill()
        return None

    def kill(self) -> None:
        """Kill the process and those that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended, or has no group yet
            (self._popen or self._process).kill()
        if self._popen is None:
            self._process.join()
        else:
            self._popen.wait()

    def text(self) -> str:
        """Return what it has written."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def result(self) -> dict[str, Any] | None:
        """Return what `measure` returned; None without that."""
        lines = [line for line in self.text().splitlines() if line.startswith(MARK)]
        return dict(json.loads(lines[-1][len(MARK) :])) if lines else None


def _serve(module: str, settings: dict[str, Any], output: str, inside: bool) -> None:
    if not inside:
        os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        measured = importlib.import_module(f"benchmarks.gpu.{module}").measure(**settings)
        print(MARK + json.dumps(measured), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # past what the imported libraries do at the end, which may wait for threads that were not forked
