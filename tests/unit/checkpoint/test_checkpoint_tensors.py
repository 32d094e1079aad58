"""Tensors come back bit for bit and dtype for dtype, from any store, and a damaged file is never used."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tests.support.checkpoints import Net
from tests.support.hostile import bounded, saved
from tests.support.hostile import safetensors as crafted
from tests.support.tensor_zoo import NAME, assert_same, bits, save, zoo
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainer_lib.storage import Store

TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


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
    assert read_safetensors(Store.open(tmp_path), NAME) == {} and safetensors.torch.load_file(tmp_path / NAME) == {}


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


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, store = Net(), Store.open(tmp_path)
    found = read_safetensors(store, NAME, expect=save(store, model.state_dict()))
    assert_same(found, model.state_dict())
    assert found["embed.weight"] is found["head.weight"]
    assert safetensors.torch.load_file(tmp_path / NAME).keys() == model.state_dict().keys() - {"head.weight"}
    other = Net()
    safetensors.torch.load_model(other, tmp_path / NAME)
    assert bits(other.head.weight) == bits(model.head.weight)


def test_views_that_only_overlap_are_stored_each(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "row": base[1], "half": base[:2], "same": base.view(3, 4), "flat": base.view(12)}
    tensors |= {"complex": (numbers := torch.randn(3, dtype=torch.complex64)), "conjugate": numbers.conj()}
    store = Store.open(tmp_path)
    found = read_safetensors(store, NAME, expect=save(store, tensors))
    assert_same(found, tensors)
    assert found["same"] is found["base"]


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


def one(payload: int = 8, **changes: Any) -> bytes:
    """A file of one tensor with a changed entry and so many bytes of payload."""
    return crafted({"a": {**TENSOR, **changes}}, bytes(payload))


def many(count: int) -> bytes:
    entries = (f'"{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(count))
    return ("{" + ",".join(entries) + "}").encode()


HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "no bytes": (lambda: b"", "impossible length"),
    "a length beyond the file": (lambda: crafted(b"{}", length=2**63), "impossible length"),
    "a length of nothing": (lambda: crafted(b"{}", length=0), "impossible length"),
    "a negative length": (lambda: b"\xff" * 8 + b"{}", "impossible length"),
    "a ZIP archive": (lambda: saved({"a": torch.ones(3)}), "impossible length"),
    "overlapping": (lambda: crafted({"a": TENSOR, "b": TENSOR}, b"\0" * 8), "contradicts itself"),
    "a gap": (lambda: one(16, data_offsets=[8, 16]), "contradicts itself"),
    "backwards": (lambda: one(data_offsets=[8, 0]), "contradicts itself"),
    "beyond the end": (lambda: one(4), "promises 8 bytes, there are 4"),
    "bytes left over": (lambda: one(12), "promises 8 bytes, there are 12"),
    "a negative shape": (lambda: one(shape=[-2]), "malformed"),
    "a huge shape": (lambda: one(shape=[2**61, 2**61]), "malformed"),
    "shapes beyond numbers": (lambda: one(shape=[2**70]), "malformed"),
    "nothing of a huge shape": (lambda: one(0, shape=[0, 2**61, 2**61], data_offsets=[0, 0]), "malformed"),
    "a fraction": (lambda: one(shape=[2.0]), "malformed"),
    "truth for a number": (lambda: one(shape=[True]), "malformed"),
    "a million dimensions": (lambda: one(0, shape=[2**61] * 10**6), "malformed"),
    "an unknown type": (lambda: one(dtype="PICKLE"), "malformed"),
    "no type": (lambda: crafted({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "malformed"),
    "a type that is a list": (lambda: one(dtype=[]), "malformed"),
    "a name twice": (lambda: crafted('{{"a":{0},"a":{0}}}'.format(json.dumps(TENSOR)).encode(), bytes(8)), "malformed"),
    "no object": (lambda: crafted(b"[]"), "malformed"),
    "nested too deeply": (lambda: crafted(b'{"a":' + b"[" * 10**6), "malformed"),
    "a million names": (lambda: crafted(many(10**6)), "impossible length"),
    "aliases that are not text": (lambda: crafted({"__metadata__": {"trainflow.aliases": 5}}), "malformed"),
    "aliases of nothing": (lambda: crafted({"__metadata__": {"trainflow.aliases": '{"a":"b"}'}}), "tied tensors"),
    "a header that is no text": (lambda: crafted(b"\xff\xff"), "malformed"),
    "a header that is no JSON": (lambda: crafted(b"not json"), "malformed"),
    "metadata in a list": (lambda: crafted({"__metadata__": []}), "malformed"),
    "aliases in a list": (lambda: crafted({"__metadata__": {"trainflow.aliases": "[1]"}}), "malformed"),
    "an entry that is a number": (lambda: crafted({"a": 1}), "malformed"),
    "a shape that is text": (lambda: one(shape="2"), "malformed"),
    "a shape of other bytes": (lambda: one(shape=[3]), "contradicts itself"),
    "half an offset": (lambda: one(data_offsets=[0]), "malformed"),
    "a terabyte of numbers": (lambda: one(shape=[2**40], data_offsets=[0, 2**42]), "promises"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_crafted_file_is_refused_without_taking_memory(kind: str, tmp_path: Path) -> None:
    make, reason = HEADERS[kind]
    (tmp_path / NAME).write_bytes(make())
    with bounded(200), pytest.raises(DamagedError, match=reason) as caught:
        read_safetensors(Store.open(tmp_path), NAME)
    assert caught.value.field == f"{tmp_path}/{NAME}" and caught.value.remedy


def test_a_header_takes_no_more_memory_than_its_limit_allows(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(crafted(many(100_000)))
    with bounded(300):
        assert len(read_safetensors(Store.open(tmp_path), NAME)) == 100_000


def test_an_absent_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file") as caught:
        read_safetensors(Store.open(tmp_path), NAME)
    assert not isinstance(caught.value, DamagedError)
