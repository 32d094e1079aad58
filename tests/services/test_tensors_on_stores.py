"""Tensors of every dtype and layout come back bit for bit from every kind of store."""

from __future__ import annotations

from tests.support.tensor_zoo import NAME, assert_same, save, zoo
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.storage import Store


def test_every_dtype_and_layout_comes_back_bit_for_bit(any_store: Store) -> None:
    tensors = zoo()
    entry = save(any_store, tensors)
    assert_same(read_safetensors(any_store, NAME, expect=entry), tensors)
    assert_same(read_safetensors(any_store, NAME), tensors)
    assert any_store.digest(NAME) == entry.sha256
