"""`add_files` on a remote store: machines that write the same name agree on its bytes, or the save fails."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.checkpoint.added_files import add_files
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store


class WithAnotherMachine(SingleProcess):
    """Rank 0 of two machines; the other machine has uploaded one file."""

    world_size = 2

    def __init__(self, path: str, data: bytes) -> None:
        self._other = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def gather_json(self, obj: Any) -> list[Any] | None:
        return [*(super().gather_json(obj) or []), [self._other]]


def _write(folder: Path) -> None:
    (folder / "notes.txt").write_bytes(b"one")


@pytest.mark.parametrize(("path", "data"), [("notes.txt", b"one"), ("of-rank-1.txt", b"two")])
def test_two_machines_add_equal_files_or_files_of_different_names(path: str, data: bytes) -> None:
    added = add_files(Store.open("memory://added/equal"), WithAnotherMachine(path, data), _write)
    assert added.keys() == {"notes.txt", path}


def test_one_name_with_different_bytes_on_two_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="different bytes") as caught:
        add_files(Store.open("memory://added/different"), WithAnotherMachine("notes.txt", b"two"), _write)
    assert (caught.value.field, caught.value.value) == ("save_model", "notes.txt")
