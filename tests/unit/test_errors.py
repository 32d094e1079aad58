"""What errors say when they are told in one line."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import (
    CodeError,
    ConfigError,
    DataError,
    StorageError,
    TrainflowError,
    first_line,
    from_exception,
)
from trainer_lib.trainer.micro_batch_search import MemoryRanOut, call_within_memory


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\ntwo", "one"),
        ("\n  \nthe reason\n", "the reason"),
        ("", "OSError"),
        (" \n", "OSError"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_an_error_is_told_in_one_line_that_is_never_empty(message: str, line: str) -> None:
    assert first_line(OSError(message)) == line


@pytest.mark.parametrize("cls", [ConfigError, DataError])
def test_what_callers_catch_as_value_errors_with_transformers_they_catch_here(cls: type[TrainflowError]) -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise cls("The input is wrong.")


def test_memory_that_ran_out_is_noticed_whatever_the_message_begins_with() -> None:
    def work() -> None:
        raise MemoryError("\nCUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(MemoryRanOut, match="CUDA out of memory"):
        call_within_memory(SingleProcess(), work)


def test_a_folder_for_temporary_files_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with pytest.raises(FileNotFoundError) as missing:
        tempfile.mkdtemp()
    failure = from_exception(missing.value)
    assert isinstance(failure, StorageError)
    assert (failure.field, failure.value) == ("TMPDIR", str(tmp_path / "removed"))
    with pytest.raises(FileNotFoundError) as another:
        (tmp_path / "data.csv").read_text()
    assert isinstance(from_exception(another.value), CodeError)
