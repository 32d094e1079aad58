"""A full disk ends work with a typed failure that names the place and the bytes, and the next run goes on."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tests.support.full_disk import run_case
from trainer_lib.errors import CodeError, StorageFullError, from_exception


@pytest.mark.needs("namespaces")
def test_a_full_storage_leaves_earlier_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    seen = run_case("storage", tmp_path / "case")
    assert seen["first"]["class"] == "StorageFullError"
    assert "A checkpoint needs" in seen["first"]["text"]
    assert re.search(r"bytes, [\d,]+ are free", seen["first"]["text"])
    assert seen["steps"] == [4, 8]
    assert {name for name in seen["folders"] if name.startswith("checkpoint-")} == {"checkpoint-4", "checkpoint-8"}
    assert seen["again"] == {"class": None, "step": 14}


@pytest.mark.needs("namespaces")
def test_a_full_folder_of_temporary_files_refuses_a_launch_and_does_not_end_one(tmp_path: Path) -> None:
    seen = run_case("temporary", tmp_path / "case")
    assert seen["before"]["class"] == "StorageFullError"
    assert "TMPDIR = " in seen["before"]["text"]
    assert "0 are free" in seen["before"]["text"]
    assert seen["left"] == []
    assert seen["meanwhile"] == {"class": None, "step": 36}
    assert seen["failing"]["class"] == "NonFiniteError"


@pytest.mark.needs("namespaces")
def test_predictions_that_do_not_fit_end_typed_and_kill_nothing(tmp_path: Path) -> None:
    seen = run_case("predictions", tmp_path / "case")
    for name in ("collecting", "joining", "objects"):
        assert seen[name]["class"] == "StorageFullError", (name, seen)
        assert "case/disk: The predictions need" in seen[name]["text"]
        assert "are free" in seen[name]["text"]
    assert seen["left"] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_any_error_of_a_full_disk_is_typed(number: int, tmp_path: Path) -> None:
    error = from_exception(OSError(number, os.strerror(number), str(tmp_path / "file")))
    assert type(error) is StorageFullError
    assert "bytes are free" in error.message
    assert str(tmp_path / "file") in error.message
    rust = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert type(from_exception(rust)) is StorageFullError
    assert type(from_exception(RuntimeError("no space"))) is CodeError
