"""What errors say when they are told in one line."""

from __future__ import annotations

import pytest

from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import first_line
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


def test_memory_that_ran_out_is_noticed_whatever_the_message_begins_with() -> None:
    def work() -> None:
        raise MemoryError("\nCUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(MemoryRanOut, match="CUDA out of memory"):
        call_within_memory(SingleProcess(), work)
