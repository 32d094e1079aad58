"""Damaged files, and folders made to do harm, are found before they are used, named, and passed in little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fuzz
from tests.support.checkpoints import BLOCKS, FILES, divided, no_damage, save, snapshot
from tests.support.fuzz_targets import targets
from tests.support.hostile import bounded, with_file
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.checkpoint import catalogue, sharded
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.sharded import ShardedTensors
from trainer_lib.checkpoint.transformers_checkpoint import read_source
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.distributed.sharding import Box
from trainer_lib.errors import ConfigError, DamagedError, TrainflowError
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, read_commit, write_commit

ROWS = classification_rows(8)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("intact")
    for kind in ("whole", "blocks"):
        for step in (1, 2):
            state = snapshot(step)
            save_checkpoint(Store.open(root / kind), state if kind == "whole" else divided(state), SingleProcess())
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


@pytest.mark.parametrize("name", [*FILES, *BLOCKS])
def test_any_damage_is_found_named_and_gone_round(name: str, intact: Path, tmp_path: Path) -> None:
    for kind, harm in HARM.items():
        root = tmp_path / kind.replace(" ", "-")
        shutil.copytree(intact / ("blocks" if name in BLOCKS else "whole"), root)
        path = root / "checkpoint-2" / name
        harmed = harm(path.read_bytes())
        path.unlink() if harmed is None else path.write_bytes(harmed)
        store = Store.open(root)

        for singly in (False, True):
            with pytest.raises(DamagedError) as caught:
                _read_all(store, "checkpoint-2", singly=singly)
            assert str(caught.value.field).endswith(name)

        told: list[str] = []
        found = find_newest_intact(store, on_damage=told.append)
        assert found is not None and found.step == 1
        assert len(told) == 1
        assert f"checkpoint-2 is damaged and will not be used: {name}: " in told[0]
        assert [info.step for info in list_checkpoints(store)] == [1]
        record = json.loads((root / "checkpoint-2" / "DAMAGED.json").read_text())
        assert record["problems"][0].startswith(name) and json.loads(record["commit"])["meta"]["step"] == 2
        assert find_newest_intact(store, on_damage=no_damage) == found  # set aside: it is not reported twice


def _read_all(store: Store, name: str, *, singly: bool) -> None:
    loaded = load_checkpoint(store, name, SingleProcess())
    loaded.reads_singly = singly
    dict(loaded.read_model())
    loaded.read_optimizer()
    loaded.read_rng(0)
    for entry in loaded.commit.files:
        loaded.read_file(entry.path)


def load(root: Path) -> None:
    """Everything that a resume reads."""
    loaded = load_checkpoint(Store.open(root), "checkpoint-2", SingleProcess())
    loaded.read_model()
    loaded.read_optimizer()
    loaded.read_rng(0)


def refused(root: Path, match: str, names: str = "") -> TrainflowError:
    """The error that a resume meets; it names the file, and what to do."""
    with pytest.raises(DamagedError, match=match) as caught:
        load(root)
    assert names in str(caught.value.field)
    assert caught.value.remedy
    return caught.value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(Store.open(tmp_path / "run"), 1)
    save(Store.open(tmp_path / "run"), 2)
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------------------ commit files
def test_a_commit_of_a_wrong_world_or_step_is_refused(root: Path) -> None:
    folder = Store.open(root / "checkpoint-2")
    commit = read_commit(folder)
    assert commit is not None
    wrong = [("world_size", world, "world size") for world in (0, -1, "many", 1e300, 10**30, None)]
    for name, value, words in [*wrong, ("step", 3, "of step 3, its folder is named 'checkpoint-2'")]:
        folder.delete(COMMIT)
        write_commit(folder, "checkpoint", commit.files, {**commit.meta, name: value})
        refused(root, words, COMMIT)


# ------------------------------------------------------------------------------------------------------------- links
def test_a_link_in_the_place_of_a_file_is_not_followed(root: Path, tmp_path: Path) -> None:
    file = root / "checkpoint-2" / "model.safetensors"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")  # the bytes are right: only the place is not
    refused(root, "a link, not a file", "model.safetensors")
    file.unlink()
    file.symlink_to(file)  # a loop
    refused(root, "missing", "model.safetensors")
    file.unlink()
    os.mkfifo(file)  # reading it would wait for ever
    refused(root, "missing", "model.safetensors")


def test_a_pipe_or_an_endless_file_in_the_place_of_the_commit_holds_nobody_up(root: Path) -> None:
    commit = root / "checkpoint-2" / COMMIT
    commit.unlink()
    os.mkfifo(commit)
    with bounded(50), pytest.raises(ConfigError, match=r"no committed checkpoint\. .*is unfinished"):
        load(root)
    commit.unlink()
    commit.symlink_to("/dev/zero")
    with bounded(50), pytest.raises(ConfigError, match="no committed checkpoint"):
        load(root)


def test_a_commit_without_weights_is_refused(tmp_path: Path) -> None:
    write_commit(Store.open(tmp_path).child("checkpoint-2"), "checkpoint", [], {"step": 2})
    with pytest.raises(DamagedError, match="does not list it"):
        load(tmp_path)


def test_a_checkpoint_that_is_a_link_is_neither_used_nor_deleted(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "other" / "checkpoint-9"
    save(Store.open(outside.parent), 9)
    (root / "checkpoint-9").symlink_to(outside)
    (root / "checkpoint-10").symlink_to(root)
    (root / "checkpoint-11").symlink_to("checkpoint-11")
    store = Store.open(root)
    found = catalogue.find_newest_intact(store, on_damage=pytest.fail)
    assert found is not None and found.step == 2
    assert catalogue.rotate_checkpoints(store, keep=1, protect=()) == ["checkpoint-1"]
    assert catalogue.delete_leftovers(store) == []
    assert (outside / COMMIT).exists()


# --------------------------------------------------------------------------------------------------------------- JSON
@pytest.mark.parametrize("name", ["trainer_state.json", "data.json", "optimizer.json", "scheduler.json", "scaler.json",
                                  "training_args.json", "rng/rank-00000.json"])  # fmt: skip
def test_json_of_any_other_kind_or_shape_is_refused(name: str, root: Path) -> None:
    texts = [b"[" * 200_000, b'{"a":' * 200_000, b"[" + b"[]," * 5_000_000 + b"1]", b"\xff\xfe", b"nope", b"[]", b""]
    for text in (*texts, b"1" * 9000):
        with_file(Store.open(root / "checkpoint-2"), name, text)
        with bounded(150):
            refused(root, "is damaged", name)
    for value in ODD.get(name, []):
        with_file(Store.open(root / "checkpoint-2"), name, json.dumps(value).encode())
        refused(root, "damaged|malformed|refers to a tensor")


def test_a_file_of_ten_terabytes_is_not_read(root: Path) -> None:
    folder = root / "checkpoint-2"
    os.truncate(folder / "data.json", 10 * 2**40)  # sparse: takes no space
    record = json.loads((folder / COMMIT).read_text())
    entries = [FileEntry(**entry) for entry in record["files"]]
    entries = [FileEntry("data.json", 10 * 2**40, "0" * 64) if e.path == "data.json" else e for e in entries]
    (folder / COMMIT).unlink()
    write_commit(Store.open(folder), "checkpoint", entries, record["meta"])
    with bounded(50):
        refused(root, "more than", "data.json")


ODD: dict[str, list[Any]] = {
    "optimizer.json": [
        {"groups": [5], "scalars": {}},
        {"groups": [{}], "scalars": {}},
        {"groups": [{"params": [[]]}], "scalars": {}},
        {"groups": [], "scalars": {"state": []}},
        {"groups": [], "scalars": {"state": {"a": 5}}},
    ],
    "scheduler.json": [{"a": {"__tuple__": 5}}, {"a": {"__dict__": [[[], 1]]}}, {"a": {"__dict__": "ab"}}],
    "scaler.json": [{"scale": {"__tensor__": "x"}}],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trainer_state.json", {"global_step": "six"}),
        ("trainer_state.json", {"log_history": [5]}),
        ("trainer_state.json", {"stateful_callbacks": {"TrainerControl": {"args": {"x": 1}}}}),
        ("trainer_state.json", {"stateful_callbacks": {"Anything": 5}}),
        ("data.json", {"epoch": "one"}),
        ("data.json", {"epoch": None}),
        ("data.json", {"source": "text"}),
        ("data.json", {"history": {"since_log": [[1]]}}),
        ("optimizer.json", {"scalars": {"state": {"body.weight": {"step": {"__tensor__": "absent"}}}}}),
        ("scheduler.json", {"lr_lambdas": 5}),
        *((COMMIT, {"layout": sizes}) for sizes in ({"tensor": "two"}, {"tensor": None}, [4], 7)),
    ],
)
def test_a_state_that_cannot_be_taken_up_is_refused_by_file(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, max_steps=1, save_strategy="steps", save_steps=1).train()
    folder = Store.open(tmp_path / "checkpoint-1")
    if name == COMMIT:
        commit = read_commit(folder)
        assert commit is not None
        folder.delete(COMMIT)
        write_commit(folder, "checkpoint", commit.files, {**commit.meta, **change})
    else:
        with_file(folder, name, json.dumps(json.loads(folder.read_bytes(name)) | change).encode())
    with pytest.raises(DamagedError) as caught:
        trainer(tmp_path, ROWS, max_steps=2).train(resume_from_checkpoint=folder.url)
    assert str(caught.value.field).partition(": ")[0].endswith(name) and caught.value.remedy


# -------------------------------------------------------------------------------------------------------------- blocks
HEAD = "model/embed.weight"
LYING: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a file that is not committed": (lambda index, blocks: blocks[0].__setitem__(0, "../../etc/passwd"), HEAD),
    "a position beyond the end": (
        lambda index, blocks: blocks[0].__setitem__(3, 2**40),
        "behind the end of shards/rank",
    ),
    "a negative position": (lambda index, blocks: blocks[0].__setitem__(3, -8), "impossible place"),
    "rows twice": (lambda index, blocks: blocks.append(blocks[0]), "two blocks overlap"),
    "rows that are missing": (lambda index, blocks: blocks.pop(), "a block is missing"),
    "rows that overlap": (lambda index, blocks: blocks[1][1].__setitem__(0, 0), "two blocks overlap"),
    "rows outside": (lambda index, blocks: blocks[-1][1].__setitem__(0, 9), "outside of it"),
    "columns that are missing": (lambda index, blocks: blocks[1][2].__setitem__(1, 2), "a block is missing"),
    "a block of another dimension": (lambda index, blocks: blocks[0][2].append(1), "number of dimensions"),
    "a place that is not one": (lambda index, blocks: blocks[0].__setitem__(1, [0.0, True]), "impossible place"),
    "a huge shape": (lambda index, blocks: index["tensors"][HEAD].__setitem__("shape", [2**61, 2**61]), "its shape"),
    "a shape that is not one": (lambda index, blocks: index["tensors"][HEAD].__setitem__("shape", ["6"]), "its shape"),
    "an unknown type": (lambda index, blocks: index["tensors"][HEAD].__setitem__("dtype", "OBJECT"), "OBJECT"),
    "tied to nothing": (lambda index, blocks: index["tied"].__setitem__("model/other", "model/none"), "model/other"),
    "no tensors": (lambda index, blocks: index.__delitem__("tensors"), "not an index"),
    "a digest that is not one": (lambda index, blocks: blocks[0].__setitem__(4, []), "digest"),
    "a block that is not one": (lambda index, blocks: blocks.__setitem__(0, 7), HEAD),
}


@pytest.fixture
def in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A checkpoint in which every row of every tensor is a block."""
    monkeypatch.setattr(sharded, "_DIGESTED", 1)
    save_checkpoint(Store.open(tmp_path), divided(snapshot(2)), SingleProcess())
    return Store.open(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("name", LYING)
def test_an_index_that_lies_is_refused_and_names_the_tensor(name: str, in_rows: Store) -> None:
    index = json.loads(in_rows.read_bytes("shards.json"))
    change, words = LYING[name]
    change(index, index["tensors"][HEAD]["blocks"])
    commit = read_commit(in_rows)
    assert commit is not None
    with pytest.raises(DamagedError, match=r"shards\.json") as caught:
        ShardedTensors(in_rows, "model", index, {entry.path: entry for entry in commit.files})
    assert words in caught.value.message
    assert name in ("no tensors", "tied to nothing") or HEAD in caught.value.message


def test_a_block_with_other_bytes_names_tensor_and_file_and_its_neighbours_are_read(in_rows: Store) -> None:
    file, offset, _, position, _ = json.loads(in_rows.read_bytes("shards.json"))["tensors"][HEAD]["blocks"][1]
    path = Path(in_rows.url) / file
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    tensors = load_checkpoint(Store.open(Path(in_rows.url).parent), "checkpoint-2", SingleProcess()).read_model()
    with pytest.raises(DamagedError, match=rf"its block of '{HEAD}' from \[{offset[0]}, 0\]") as caught:
        tensors["embed.weight"]
    assert str(caught.value.field).endswith(file)
    assert isinstance(tensors, ShardedTensors)
    [row] = tensors.read_boxes("embed.weight", [Box((3, 0), (1, 3))])
    assert torch.equal(row, snapshot(2).model["embed.weight"][3:4])


# ---------------------------------------------------------------------------------------------- other programs' folders
FOREIGN = {
    "transformers": (["trainer_state.json", "optimizer.pt", "model.safetensors"], "transformers Trainer", "import"),
    "a random state": (["rng_state.pth"], "transformers Trainer", "import"),
    "arguments": (["training_args.bin"], "transformers Trainer", "import"),
    "deepspeed": (["global_step5/mp_rank_00_model_states.pt", "trainer_state.json"], "another program", "safetensors"),
    "distributed": ([".metadata", "__0_0.distcp"], "another program", "safetensors"),
    "fsdp": (["pytorch_model_fsdp_0/.metadata", "trainer_state.json"], "another program", "safetensors"),
    "accelerate": (["random_states_0.pkl", "model.safetensors"], "another program", "safetensors"),
    "lightning": (["epoch=1.ckpt"], "another program", "safetensors"),
    "weights": (["pytorch_model.bin"], "another program", "start a new training"),
    "pickles": (["state.pkl"], "another program", "any code"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_programs_folder_is_named_and_none_of_its_files_opened(kind: str, tmp_path: Path) -> None:
    names, what, remedy = FOREIGN[kind]
    for name in names:
        path = tmp_path / "run" / "checkpoint-2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)  # opening it waits for ever
    with pytest.raises(ConfigError, match=what) as caught:
        load(tmp_path / "run")
    assert remedy in str(caught.value.remedy)
    store = Store.open(tmp_path / "run")
    assert catalogue.find_newest_intact(store, on_damage=pytest.fail) is None
    assert catalogue.delete_leftovers(store) == [], "another program's checkpoint was deleted"
    assert (tmp_path / "run" / "checkpoint-2" / names[0]).exists()
    if what != "transformers Trainer":
        with pytest.raises(ConfigError, match=what):
            read_source(Store.open(tmp_path / "run" / "checkpoint-2"))


def test_no_reader_of_a_checkpoints_bytes_is_broken_by_what_it_reads(tmp_path: Path) -> None:
    cases, seed = int(os.environ.get("FUZZ_CASES", "20")), int(os.environ.get("SEED", "0"))
    found = targets(tmp_path)
    slow = {name: target for name, target in found.items() if name.startswith("resume")}
    assert fuzz.fuzz(slow, seed, cases // 10) == []
    assert fuzz.fuzz({name: found[name] for name in found.keys() - slow.keys()}, seed, cases) == []
