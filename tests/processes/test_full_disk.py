"""A full disk ends work with a typed failure that names the place and the bytes, and the next run goes on.

Cases have disks in a separate mount namespace: python -m tests.processes.test_full_disk FOLDER CASES
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.checkpoints import checkpoints
from tests.support.launched import request, wait_until
from tests.support.machine import fill, small_disk
from tests.support.repository import ROOT
from trainer_lib.errors import CodeError, StorageFullError, TrainflowError, from_exception
from trainer_lib.evaluation.prediction_spool import ObjectSpool, PredictionSpool
from trainer_lib.launch.base import launch
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.worker.process.session import Events

MIB = 1 << 20
Outcome = dict[str, Any]
OnEvent = Callable[[dict[str, Any]], None]


def run_cases(folder: Path, *names: str) -> Outcome:
    """Run cases in a process that may mount file systems, and return what it prints of each."""
    way = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    command = ["unshare", *way, sys.executable, "-m", "tests.processes.test_full_disk", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _attempt(work: Callable[[], Any]) -> Outcome:
    try:
        result = work()
    except TrainflowError as error:
        return {"class": type(error).__name__, "text": str(error)}
    return {"class": None, "step": getattr(result, "global_step", None)}


# A training that waits in its eleventh step until the file PAUSE is there.
_PAUSE = """
        if self.training and "PAUSE" in os.environ:
            self.calls = getattr(self, "calls", 0) + 1
            while self.calls == 11 and not os.path.exists(os.environ["PAUSE"]):
                time.sleep(0.01)
        time.sleep(float(os.environ.get("STEP_S", "0")))
"""


def _request(folder: Path, output: Path, **args: Any) -> Any:
    return tiny.train_request(folder, tiny.prepared(folder / "prepared"), str(output), save_steps=4, **args)


def _trained(asked: Any, on_event: OnEvent = lambda event: None, pause: str = "") -> Outcome:
    env = {"OMP_NUM_THREADS": "1", "STEP_S": "0.03", "TMPDIR": tempfile.gettempdir()}
    env |= {"PAUSE": pause} if pause else {}
    config = LaunchConfig(processes=1, grace_s=20.0)
    return _attempt(lambda: launch(asked, config, env=env, on_line=lambda line: None, on_event=on_event))


def _filling(disk: Path, step: int) -> OnEvent:
    """Fill the disk at the first event that tells `step` or a later one."""

    def note(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= step and not (disk / ".ballast").exists():
            fill(disk)

    return note


def _left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix)


def storage(folder: Path, disk: Path) -> Outcome:
    """The storage becomes full after two checkpoints, and between two saves; then it has room again."""
    output, filled = disk / "train", folder / "filled"
    asked = _request(folder, output, max_steps=14)
    recipe = folder / "recipe.py"
    recipe.write_text(recipe.read_text().replace(_PAUSE.splitlines()[-1] + "\n", _PAUSE.lstrip("\n")))

    def fill_between_saves() -> None:
        wait_until(lambda: checkpoints(output / "checkpoints") == [4, 8], timeout=60.0)
        fill(disk)
        filled.touch()

    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(fill_between_saves)
        first = _trained(asked, pause=str(filled))
        filling.result()
    steps, names = checkpoints(output / "checkpoints"), {path.parent.name for path in output.rglob("*.json")}
    (disk / ".ballast").unlink()
    again = _attempt(lambda: tiny.run(_request(folder / "again", output, max_steps=14), kind="in_process"))
    return {"first": first, "steps": steps, "folders": sorted(names), "again": again}


def temporary(folder: Path, disk: Path) -> Outcome:
    """The folder of temporary files is full before a launch, becomes full in one, and in one that fails."""
    tempfile.tempdir = str(disk)
    fill(disk)
    before = _attempt(lambda: tiny.run(request(folder, tiny.RECIPE), kind="process"))
    left = _left(disk)
    (disk / ".ballast").unlink()
    meanwhile = _trained(_request(folder / "ends", folder / "ends", logging_steps=1), _filling(disk, 1))
    (disk / ".ballast").unlink()
    diverging = _request(folder / "fails", folder / "fails", learning_rate=1e30, max_nonfinite_steps=1)
    failing = _trained(diverging, _filling(disk, 1))
    return {"before": before, "left": left, "meanwhile": meanwhile, "failing": failing}


def predictions(folder: Path, disk: Path) -> Outcome:
    """Predictions that do not fit: while they are collected, and when arrays of unequal widths become one."""

    def collect(spool: Any, batches: int) -> Any:
        try:
            for number in range(batches):
                spool.append(np.ones((64, 8192 + number), dtype=np.float32))  # 2 MiB
            return spool.tree()
        finally:
            spool.close()

    cases: dict[str, Callable[[], Any]] = {
        "collecting": lambda: collect(PredictionSpool(disk), 24),
        "joining": lambda: collect(PredictionSpool(disk), 12),
        "objects": lambda: collect(ObjectSpool(disk), 24),
    }
    return {name: _attempt(case) for name, case in cases.items()} | {"left": _left(disk)}


_CASES: dict[str, tuple[Callable[[Path, Path], Outcome], int]] = {
    "storage": (storage, 9 * MIB),
    "temporary": (temporary, 4 * MIB),
    "predictions": (predictions, 32 * MIB),
}


def _main(folder: Path, *names: str) -> None:
    seen = {}
    for name in names:
        case, size = _CASES[name]
        with small_disk(folder / name / "disk", size):
            seen[name] = case(folder / name, folder / name / "disk")
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(seen))


@pytest.mark.needs("namespaces")
def test_a_full_storage_keeps_earlier_checkpoints_and_predictions_that_do_not_fit_end_typed(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, "storage", "predictions")
    seen = outcomes["storage"]
    assert seen["first"]["class"] == "StorageFullError"
    assert "A checkpoint needs" in seen["first"]["text"]
    assert re.search(r"bytes, [\d,]+ are free", seen["first"]["text"])
    assert seen["steps"] == [4, 8]
    assert {name for name in seen["folders"] if name.startswith("checkpoint-")} == {"checkpoint-4", "checkpoint-8"}
    assert seen["again"] == {"class": None, "step": 14}
    seen = outcomes["predictions"]
    for name in ("collecting", "joining", "objects"):
        assert seen[name]["class"] == "StorageFullError", (name, seen)
        assert "predictions/disk: The predictions need" in seen[name]["text"]
        assert "are free" in seen[name]["text"]
    assert seen["left"] == []


@pytest.mark.needs("namespaces")
def test_a_full_folder_of_temporary_files_refuses_a_launch_and_does_not_end_one(tmp_path: Path) -> None:
    seen = run_cases(tmp_path, "temporary")["temporary"]
    assert seen["before"]["class"] == "StorageFullError"
    assert "TMPDIR = " in seen["before"]["text"]
    assert "0 are free" in seen["before"]["text"]
    assert seen["left"] == []
    assert seen["meanwhile"] == {"class": None, "step": 36}
    assert seen["failing"]["class"] == "NonFiniteError"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_any_error_of_a_full_disk_is_typed(number: int, tmp_path: Path) -> None:
    error = from_exception(OSError(number, os.strerror(number), str(tmp_path / "file")))
    assert type(error) is StorageFullError
    assert "bytes are free" in error.message
    assert str(tmp_path / "file") in error.message
    rust = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert type(from_exception(rust)) is StorageFullError
    assert type(from_exception(RuntimeError("no space"))) is CodeError


def test_an_event_behind_a_line_that_a_full_disk_has_cut_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    events, opened = Events(tmp_path / "events.jsonl", 0), Path.open

    def full(path: Path, mode: str) -> Any:
        with opened(path, mode) as file:
            file.write(b'{"event": "lo')
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "open", full)
    events.emit("log")
    monkeypatch.undo()
    events.emit("warning", message="seen")
    assert [event["event"] for event in run_dir.read_new_events()] == ["warning"]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
