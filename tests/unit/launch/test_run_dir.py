"""The folder of a launch is private and belongs to one launch at a time."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.guard import Process, start_time
from trainer_lib.launch.run_dir import RunDir


def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"trainflow-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"trainflow-{os.getuid()}").chmod(0o777)
    with pytest.raises(ConfigError, match="not private"):
        RunDir.create({}, 1.0, lambda: False)
    (tmp_path / f"trainflow-{os.getuid()}").chmod(0o700)
    assert stat.S_IMODE(RunDir.create({}, 1.0, lambda: False).path.stat().st_mode) == 0o700


def test_a_second_launch_on_the_same_output_is_refused_while_the_first_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = RunDir.create({"output": "s3://bucket/a"}, 1.0, lambda: False)
    first.record_process("worker-0", os.getpid())
    with pytest.raises(InfrastructureError, match="already at work"):
        RunDir.create({"output": "s3://bucket/a"}, 1.0, lambda: False)
    other = RunDir.create({"output": "s3://bucket/b"}, 1.0, lambda: False)
    assert first.path.exists()
    first.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_process_whose_program_is_still_being_loaded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Process(os.getpid(), start_time(os.getpid()) or "")
    looks = iter([set(), {mine}])  # until then the environment that it will have cannot be read
    monkeypatch.setattr(RunDir, "_find_marked", lambda folder: next(looks))
    assert RunDir(tmp_path).find_processes() == {mine}
