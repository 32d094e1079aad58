"""Two writers, killed writers, failing peers: one checkpoint or none, and a clear word to the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import no_damage, save, snapshot
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.errors import CodeError, LeaseLostError, StorageError, TrainflowError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def test_two_saves_of_one_process_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    errors: list[TrainflowError] = []
    write = writer._write_shared

    def meanwhile(store: Store, given: Snapshot) -> Any:
        monkeypatch.setattr(writer, "_write_shared", write)
        with pytest.raises(StorageError, match="being written") as caught:
            save(root, 2)
        errors.append(caught.value)
        return write(store, given)

    monkeypatch.setattr(writer, "_write_shared", meanwhile)
    info = save(root, 2)
    assert len(errors) == 1
    assert find_newest_intact(root, on_damage=no_damage) == info


def test_a_writer_that_was_replaced_cannot_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    write = writer._write_shared
    theirs = replace(Holder.this_process(), machine="elsewhere")

    def replaced(store: Store, given: Snapshot) -> Any:
        store.write_bytes(WRITING, theirs.to_bytes())
        return write(store, given)

    monkeypatch.setattr(writer, "_write_shared", replaced)
    with pytest.raises(LeaseLostError, match="taken this checkpoint's folder over"):
        save(root, 2)
    assert list_checkpoints(root) == []
    assert root.read_bytes(f"checkpoint-2/{WRITING}") == theirs.to_bytes()  # not ours to remove


# --------------------------------------------------------------------------------------------------------- many ranks


class Ranks:
    """Rank 0 of a world whose other ranks answer from a script."""

    rank = 0
    local_rank = 0

    def __init__(self, failing: TrainflowError | None = None, at: int = 0, shared: Store | None = None) -> None:
        self.world_size = 2
        self._shared = shared
        self.local_world_size = 2
        self._failing, self._at, self._agreed = failing, at, 0

    def agree(self, error: TrainflowError | None) -> None:
        self._agreed += 1
        error = error or (self._failing if self._agreed == self._at else None)
        if error is not None:
            raise error

    def gather_json(self, obj: Any) -> list[Any] | None:
        if self._shared is not None:
            self._shared.write_bytes("checkpoint-2/rng/rank-00001.json", b"{}")
        return [
            obj,
            [
                [
                    {
                        "path": "rng/rank-00001.json",
                        "size": 2,
                        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
                    }
                ],
                {},  # of a shard: it has none
            ],
        ]

    def broadcast_json(self, obj: Any) -> Any:
        return json.loads(json.dumps(obj))


@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_another_rank_at_any_point_leaves_nothing(at: int, tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    comm: Any = Ranks(CodeError("rank 1 failed", rank=1), at, root)
    with pytest.raises(CodeError, match="rank 1 failed"):
        save_checkpoint(root, snapshot(2), comm)
    assert root.children() == []


def test_a_rank_whose_files_are_not_on_this_storage_prevents_the_commit(tmp_path: Path) -> None:
    comm: Any = Ranks()
    with pytest.raises(StorageError, match=r"rng/rank-00001\.json: missing") as caught:
        save_checkpoint(Store.open(tmp_path), snapshot(2), comm)
    assert "must share the storage" in str(caught.value.remedy)
