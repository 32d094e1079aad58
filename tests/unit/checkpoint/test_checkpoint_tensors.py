"""Tensors come back bit for bit and dtype for dtype, from any store, and a damaged file is never used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.tensor_zoo import NAME, assert_same, bits, save, zoo
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.storage import Store


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    tensors = zoo()
    save(Store.open(tmp_path), tensors)
    assert_same(safetensors.torch.load_file(tmp_path / NAME), tensors)
    with safetensors.safe_open(tmp_path / NAME, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in zoo().items() if "conj" not in name}
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / NAME)
    assert_same(read_safetensors(Store.open(tmp_path), NAME), tensors)


def test_no_tensors_at_all_is_a_file_too(tmp_path: Path) -> None:
    save(Store.open(tmp_path), {})
    assert read_safetensors(Store.open(tmp_path), NAME) == {}
    assert safetensors.torch.load_file(tmp_path / NAME) == {}


def test_every_tensor_is_aligned_for_readers_that_map_the_file(tmp_path: Path) -> None:
    save(Store.open(tmp_path), zoo())
    data = (tmp_path / NAME).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    size = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % size.get(entry["dtype"], 1) == 0


class Tied(torch.nn.Module):
    """A language model's usual pair: the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, store = Tied(), Store.open(tmp_path)
    entry = save(store, model.state_dict())
    assert entry.size < 2 * 11 * 4 * 4

    found = read_safetensors(store, NAME, expect=entry)
    assert_same(found, model.state_dict())
    assert found["embed.weight"] is found["head.weight"]
    assert safetensors.torch.load_file(tmp_path / NAME).keys() == {"embed.weight"}
    other = Tied()
    safetensors.torch.load_model(other, tmp_path / NAME)
    assert bits(other.head.weight) == bits(model.head.weight)


def test_views_that_only_overlap_are_stored_each(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "row": base[1], "half": base[:2], "same": base.view(3, 4), "flat": base.view(12)}
    store = Store.open(tmp_path)
    found = read_safetensors(store, NAME, expect=save(store, tensors))
    assert_same(found, tensors)
    assert found["same"] is found["base"]


def test_a_conjugate_view_is_not_taken_for_its_base(tmp_path: Path) -> None:
    base = torch.randn(3, dtype=torch.complex64)
    tensors = {"base": base, "conjugate": base.conj()}
    store = Store.open(tmp_path)
    assert_same(read_safetensors(store, NAME, expect=save(store, tensors)), tensors)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_no_file(tensor: Tensor, reason: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(ConfigError, match=f"'layer.bad'.*{reason}"):
        save(store, {"layer.good": torch.ones(1), "layer.bad": tensor})
    assert store.list() == []


# ------------------------------------------------------------------------------------------------------------- damage


def test_any_changed_byte_is_noticed(memory_url: str) -> None:
    store = Store.open(memory_url)
    entry = save(store, {"a": torch.arange(6.0), "b": torch.ones(2, 2, dtype=torch.int64), "c": torch.tensor(True)})
    data = store.read_bytes(NAME)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        store.write_bytes(NAME, bytes(changed))
        with pytest.raises(DamagedError):
            read_safetensors(store, NAME, expect=entry)


def test_any_truncation_is_noticed_even_without_a_commit(memory_url: str) -> None:
    store = Store.open(memory_url)
    save(store, {"a": torch.arange(6.0), "c": torch.tensor(True)})
    data = store.read_bytes(NAME)
    for length in range(len(data)):
        store.write_bytes(NAME, data[:length])
        with pytest.raises(DamagedError):
            read_safetensors(store, NAME)
    store.write_bytes(NAME, data + b"x")
    with pytest.raises(DamagedError):
        read_safetensors(store, NAME)


def raw(header: Any, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + b"{}",
        struct.pack("<Q", 0),
        raw(b"not json"),
        raw(b"\xff\xff"),
        raw(b"[" * 50_000),
        raw([]),
        raw({"__metadata__": []}),
        raw({"__metadata__": {"trainflow.aliases": "[1]"}}),
        raw({"__metadata__": {"trainflow.aliases": '{"x": "absent"}'}}),
        raw({"__metadata__": {"trainflow.aliases": '{"x": 1}'}}),
        raw({"a": 1}),
        raw({"a": {}}),
        raw(one(dtype="PICKLE"), bytes(8)),
        raw(one(dtype=["F32"]), bytes(8)),
        raw(one(shape="2"), bytes(8)),
        raw(one(shape=[-2]), bytes(8)),
        raw(one(shape=[2.0]), bytes(8)),
        raw(one(shape=[True, 2]), bytes(8)),
        raw(one(shape=[2**61, 2**61]), bytes(8)),
        raw(one(shape=[3]), bytes(8)),
        raw(one(data_offsets=[0, 2**40]), bytes(8)),
        raw(one(data_offsets=[4, 12]), bytes(12)),
        raw(one(data_offsets=[8, 0]), bytes(8)),
        raw(one(data_offsets=[0]), bytes(8)),
        raw(one(), bytes(7)),
        raw(one(), bytes(9)),
        raw({**one(), "b": one()["a"]}, bytes(8)),
        raw({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(8)),
    ],
)
def test_a_crafted_file_is_refused_without_taking_memory(data: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        read_safetensors(Store.open(tmp_path), NAME)
    assert caught.value.field == f"{tmp_path}/{NAME}"


def test_an_absent_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file") as caught:
        read_safetensors(Store.open(tmp_path), NAME)
    assert not isinstance(caught.value, DamagedError)


@settings(max_examples=40)
@given(st.binary(max_size=60), st.binary(max_size=20))
def test_random_bytes_never_crash_the_reader(header: bytes, payload: bytes) -> None:
    store = Store.open("memory://test-tensors-fuzz")
    store.write_bytes(NAME, raw(header, payload))
    try:
        assert read_safetensors(store, NAME) == {}
    except DamagedError:
        pass
    finally:
        store.delete_tree()
