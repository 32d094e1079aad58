"""Every damaged file is found before it is used, named, and gone round."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import FILES, no_damage, save
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import DamagedError
from trainer_lib.storage import Store


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("intact")
    save(Store.open(root), 1)
    save(Store.open(root), 2)
    return root


def flip(data: bytes, at: float) -> bytes:
    position = int(at * len(data))
    return data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :]


HARM: dict[str, Callable[[bytes], bytes | None]] = {
    "first byte": lambda data: flip(data, 0),
    "middle": lambda data: flip(data, 0.5),
    "last byte": lambda data: flip(data, 1 - 1e-9),
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "longer": lambda data: data + b"x",
    "missing": lambda data: None,
}


@pytest.mark.parametrize("name", FILES)
def test_any_damage_is_found_named_and_gone_round(name: str, intact: Path, tmp_path: Path) -> None:
    for kind, harm in HARM.items():
        root = tmp_path / kind.replace(" ", "-")
        shutil.copytree(intact, root)
        path = root / "checkpoint-2" / name
        harmed = harm(path.read_bytes())
        path.unlink() if harmed is None else path.write_bytes(harmed)
        store = Store.open(root)

        with pytest.raises(DamagedError) as caught:
            _read_all(store, "checkpoint-2")
        assert str(caught.value.field).endswith(name)

        told: list[str] = []
        found = find_newest_intact(store, on_damage=told.append)
        assert found is not None
        assert found.step == 1
        assert len(told) == 1
        assert f"checkpoint-2 is damaged and will not be used: {name}: " in told[0]
        assert [info.step for info in list_checkpoints(store)] == [1]
        record = json.loads((root / "checkpoint-2" / "DAMAGED.json").read_text())
        assert record["problems"][0].startswith(name)
        assert json.loads(record["commit"])["meta"]["step"] == 2
        assert find_newest_intact(store, on_damage=no_damage) == found  # set aside: it is not reported twice


def _read_all(store: Store, name: str) -> None:
    loaded = load_checkpoint(store, name, SingleProcess())
    loaded.read_model()
    loaded.read_optimizer()
    loaded.read_rng(0)
    for entry in loaded.commit.files:
        loaded.read_file(entry.path)
