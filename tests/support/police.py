"""The leak police: what a test must leave as it found it.

Environment variables, threads, processes (orphans included: every process started under the test session carries its
token in the environment, wherever it was re-parented to), torch's process group, and files outside `tmp_path`. The
session's own embedded Prefect server is spared: its keeper may put another process in its place during any test.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.command import command_words
from trainer_lib.guard import start_time  # in ticks since boot: the system's clock may step

TOKEN = "TRAINFLOW_TEST_SESSION"
SETTLE_S = 20.0  # what ends in time is not waited for
_LOADING_S = 0.05

# Variables that come and go by themselves.
ENV_ALLOWED = {
    "PYTEST_CURRENT_TEST": "set by pytest around every phase",
    "KMP_INIT_AT_FORK": "set by scikit-learn (threadpoolctl) when it is imported",
    "KMP_DUPLICATE_LIB_OK": "set by scikit-learn when it is imported",
    "PREFECT__SERVER_WEBSERVER_ONLY": "set by Prefect for its own server process",
    "TORCHINDUCTOR_CACHE_DIR": "set by torch.compile's first call",
    "TRITON_CACHE_DIR": "set by torch.compile's first call",
    "KERAS_BACKEND": "set by importing TFTrainer, and by loading a recipe, so that Keras runs on torch",
    "TF_FORCE_GPU_ALLOW_GROWTH": "set by Keras when it is imported",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "set by importing DeepSpeed, which transformers does when it loads weights",
    "RAY_CLIENT_MODE": "set by Ray when it is imported",
}
# Threads of other people's libraries that live as long as the process, by the start of their name or class.
THREADS_ALLOWED = {
    "fsspecIO": "fsspec's event loop, one for the process",
    "ThreadPoolExecutor-": "idle workers of a library's executor; joined by concurrent.futures at exit",
    "asyncio_": "idle workers of fsspec's event loop; joined at exit",
    "AnyIO worker thread": "idle workers of anyio, ended with their event loop",
    "GlobalEventLoopThread": "Prefect's background loop, one for the process",
    "RunSyncEventLoopThread": "Prefect's loop for calls from synchronous code, one for the process",
    "APILogWorkerThread": "Prefect's sender of logs, one for the process and its settings",
    "EventsWorkerThread": "Prefect's sender of events, one for the process and its settings",
    "QueueingSpanExporter": "Prefect's and MLflow's tracing",
    "OtelBatchSpanRecordProcessor": "MLflow's tracing",
    "TMonitor": "tqdm's monitor, one for the process",
}


@dataclass(frozen=True)
class Scene:
    """What the process owned at one moment."""

    env: dict[str, str]
    threads: frozenset[int]
    processes: frozenset[tuple[int, str | None]]
    files: frozenset[Path]
    cwd: str

    @classmethod
    def look(cls, watched: tuple[Path, ...]) -> Scene:
        """Record what the process owns now; `watched` folders are listed one level deep."""
        return cls(
            env=dict(os.environ),
            threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
            processes=frozenset((process.pid, start_time(process.pid)) for process in session_processes()),
            files=frozenset(path for folder in watched for path in _entries(folder)),
            cwd=str(Path.cwd()),
        )


def session_processes() -> list[psutil.Process]:
    """Return every living process that this test session started, this one excepted."""
    if (token := os.environ.get(TOKEN)) is None:
        return []
    pids = set(psutil.pids())
    others = _others.setdefault(token, set())
    others &= pids
    found = []
    for pid in sorted(pids - others - {os.getpid()}):
        try:
            process = psutil.Process(pid)
            if _environ(process).get(TOKEN) != token:
                others.add(pid)
            elif not _is_multiprocessing_helper(process):
                found.append(process)
        except psutil.NoSuchProcess:  # it has ended, is a zombie, or is a thread of the kernel
            others.add(pid)
        except (psutil.Error, OSError):  # it belongs to somebody else
            continue
    return found


# By token: what other programs started, which never gets the token. Every test looks three times, and to read what
# belongs to each process of the machine took longer than most tests.
_others: dict[str, set[int]] = {}


def _environ(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment, also of one that is just starting: it looks empty until its program is loaded."""
    deadline = time.monotonic() + _LOADING_S
    while not (environ := process.environ()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return environ


def _is_multiprocessing_helper(process: psutil.Process) -> bool:
    """Recognise the resource tracker and the fork server of this process; what the server forked is not a helper."""
    command = " ".join(process.cmdline())
    return "resource_tracker" in command or ("multiprocessing.forkserver" in command and process.ppid() == os.getpid())


# Prefect homes whose embedded server is kept for the whole session.
_homes: set[Path] = set()


@contextlib.contextmanager
def server_kept(home: Path) -> Iterator[None]:
    """Inside the block, spare the embedded server of this Prefect home, however often it is replaced."""
    _homes.add(home)
    try:
        yield
    finally:
        _homes.discard(home)


def _is_kept_server(process: psutil.Process) -> bool:
    """Recognise an embedded server of the session: it was started for a folder of its home."""
    command = command_words(process)
    if not any(word.endswith("flows/server/embedded.py") for word in command):
        return False
    return any(command[-1] == str(folder) for home in _homes for folder in (home / "trainflow").glob("*/"))


def leaks(before: Scene, watched: tuple[Path, ...]) -> list[str]:
    """Return what differs now, one line each, and end leaked processes and process groups for the next test."""
    return [
        *_env_leaks(before),
        *_process_leaks(before),
        *_thread_leaks(before),
        *_group_leaks(),
        *_file_leaks(before, watched),
    ]


def _env_leaks(before: Scene) -> list[str]:
    now = dict(os.environ)
    changed = {name for name in before.env.keys() | now.keys() if before.env.get(name) != now.get(name)}
    found = sorted(changed - ENV_ALLOWED.keys())
    for name in found:
        if name in before.env:
            os.environ[name] = before.env[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}: {before.env.get(name)!r} before, {now.get(name)!r} after" for name in found]


def _process_leaks(before: Scene) -> list[str]:
    def fresh() -> list[psutil.Process]:
        found = [p for p in session_processes() if (p.pid, start_time(p.pid)) not in before.processes]
        return [p for p in found if not _is_kept_server(p)]

    if not (left := fresh()):
        return []
    psutil.wait_procs(left, timeout=SETTLE_S)
    found = []
    for process in fresh():
        with contextlib.suppress(psutil.Error):
            found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return found


def _thread_leaks(before: Scene) -> list[str]:
    deadline = time.monotonic() + SETTLE_S
    found = []
    for thread in threading.enumerate():
        names = (thread.name, type(thread).__name__)
        if thread.ident in before.threads or any(name.startswith(tuple(THREADS_ALLOWED)) for name in names):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            found.append(f"thread {thread.name!r} ({'daemon' if thread.daemon else 'not a daemon'})")
    return found


def _group_leaks() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["torch.distributed is still initialised"]


def _file_leaks(before: Scene, watched: tuple[Path, ...]) -> list[str]:
    deadline = time.monotonic() + SETTLE_S  # SQLite of a server removes a temporary file right after making it
    while True:
        new = sorted({path for folder in watched for path in _entries(folder)} - before.files)
        if not new or time.monotonic() >= deadline:
            return [f"file {path}" for path in new]
        time.sleep(0.05)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
