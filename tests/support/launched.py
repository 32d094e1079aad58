"""An owner of a launch in a process of its own, so that a test can kill it, watch its tree and read its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.command import command_words
from tests.support.repository import ROOT
from trainer_lib.base.records import to_record
from trainer_lib.errors import TrainflowError
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.protocol.requests import RecipeFile, Request, read_request

# A recipe without torch: it writes a file when it is ready, leaves a grandchild in a session of its own, and waits.
WAITING_RECIPE = """
import os, subprocess, sys, time
from pathlib import Path

folder = Path(__file__).parent
rank = os.environ.get("RANK", "0")
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
mode = os.environ.get("MODE", "")
if mode == "deaf":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "raise" and rank == "1":
    raise ValueError("rank one dislikes this")
(folder / f"ready-{rank}").write_text(str(os.getpid()))
print("waiting", flush=True)
if mode != "through":
    time.sleep(300)

def prepare(options, out):
    return {"train": [{"x": 1}]}

def build_model(options, data):
    raise NotImplementedError
"""


def request(folder: Path, recipe: str = WAITING_RECIPE, verb: str = "prepare", **fields: Any) -> Any:
    """Write a recipe into `folder` and return a request for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.py").write_text(recipe)
    given = {"output": str(folder / "out"), "recipe": RecipeFile(str(folder / "recipe.py"), str(folder)), **fields}
    return Request.by_verb[verb](**given)


class Owner:
    """A process that calls `launch` with a request and a configuration, and writes down how it ended."""

    def __init__(self, folder: Path, request: Request[Any], prefix: Sequence[str] = (), **config: Any) -> None:
        self._outcome = folder / "outcome.json"
        (folder / "job.json").write_text(json.dumps({"request": request.to_json(), "config": config}))
        (folder / "tmp").mkdir(exist_ok=True)
        self.process = psutil.Popen(
            [*prefix, sys.executable, str(Path(__file__).resolve()), str(folder)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        self._seen: set[psutil.Process] = set()

    def tree(self) -> list[psutil.Process]:
        """Return the living processes below the owner, those of earlier calls included."""
        if self.process.is_running():
            self._seen |= set(self.process.children(recursive=True))
        return [process for process in self._seen if _alive(process)]

    def named(self, fragment: str) -> psutil.Process:
        """The process of the tree that runs `fragment` (the guard's command line holds all of its command's)."""
        found = [process for process in self.tree() if fragment in " ".join(command_words(process)[:5])]
        assert len(found) == 1, found
        return found[0]

    def wait_for(self, *files: Path, timeout: float = 60.0) -> None:
        wait_until(lambda: all(file.exists() for file in files), timeout)
        self.tree()

    def gone(self, timeout: float = 20.0) -> list[psutil.Process]:
        """Return the processes of the tree that are still alive after `timeout` seconds: an empty list if all ended."""
        return list(psutil.wait_procs([*self.tree(), self.process], timeout=timeout)[1])

    def outcome(self) -> dict[str, Any]:
        """Return how `launch` ended: its result, or the record of the error that it raised."""
        value: dict[str, Any] = json.loads(self._outcome.read_text())
        return value

    def close(self) -> None:
        for process in [*self.tree(), self.process]:
            if process.is_running():
                process.kill()
        self.process.wait()


def patience_s(module: str, least: float, starts: int = 4) -> float:
    """Seconds in which a process that imports `module` starts several times over, on this machine as busy as it is.

    A limit on silence has to be longer than the start of the workers that it watches, or it ends them before they do
    what the test is about.
    """
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
    return max(least, starts * (time.monotonic() - started))


@contextlib.contextmanager
def kept_files(error: TrainflowError) -> Iterator[Path]:
    """The folder that a hang names, for the length of the block; then it is removed."""
    found = re.search(r"are in (\S+)\. ", error.remedy or "")
    assert found is not None, error.remedy
    folder = Path(found[1])
    try:
        yield folder
    finally:
        RunDir(folder).remove()


def wait_until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Poll until `condition` holds; AssertionError when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _main(folder: Path) -> None:
    from trainer_lib.errors import from_exception
    from trainer_lib.launch.base import launch
    from trainer_lib.launch.settings.config import LaunchConfig

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
    job = json.loads((folder / "job.json").read_text())
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    try:
        result = launch(
            read_request(job["request"]),
            LaunchConfig(**job["config"]),
            env={},
            on_line=lines.append,
            on_event=events.append,
        )
        outcome = {"class": None, "result": to_record(result)}
    except BaseException as error:
        outcome = from_exception(error).to_record()
    temporary = folder / "outcome.tmp"
    temporary.write_text(json.dumps({**outcome, "lines": lines, "events": events}))
    temporary.replace(folder / "outcome.json")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
