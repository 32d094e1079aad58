"""Trees of arrays on disk: padded with -100, memory-mapped, changed without changing the file, and gone afterwards."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.prediction_spool import MAX_MEMORY_BYTES, PredictionSpool

BIG = MAX_MEMORY_BYTES  # bytes that stay in memory


def filled(folder: Path, arrays: list[np.ndarray]) -> np.ndarray:
    one = PredictionSpool(folder)
    for array in arrays:
        one.append(array)
    found = one.tree()
    one.close()
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("width", [3, BIG // 4])
def test_rows_come_back_as_one_array_from_memory_and_from_disk(width: int, tmp_path: Path) -> None:
    arrays = [np.arange(count * width, dtype=np.float32).reshape(count, width) for count in (2, 1)]
    assert np.array_equal(filled(tmp_path, arrays), np.concatenate(arrays))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [2, BIG // 4])
def test_ragged_rows_are_padded_on_the_right(width: int, tmp_path: Path) -> None:
    found = filled(tmp_path, [np.ones((2, width), np.int64), np.ones((1, width + 3), np.int64)])
    assert found.shape == (3, width + 3)
    assert (found[:2, width:] == -100).all()
    assert found.sum() == 2 * width + width + 3 - 2 * 3 * 100


def test_a_mapped_array_can_be_changed_by_its_owner_only(tmp_path: Path) -> None:
    one = PredictionSpool(tmp_path)
    one.append(np.zeros((3, BIG // 4), np.float32))
    first = one.tree()
    first[0] = 7.0
    assert not one.tree().any()
    one.close()
    assert first[0, 0] == 7.0


def test_memory_stays_flat(tmp_path: Path) -> None:
    """200 MB of predictions cost pages of the file, which the system reclaims, not memory of the process."""
    one = PredictionSpool(tmp_path)
    block = np.ones((1 << 18, 10), np.float32)  # 10 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        one.append(block)
    found = one.tree()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    one.close()
    assert found.shape == (20 << 18, 10)
    assert grown < 100_000 * (1024 if sys.platform == "darwin" else 1)  # kB


def test_trees_keep_their_shape(tmp_path: Path) -> None:
    one = PredictionSpool(tmp_path)
    for _ in range(2):
        one.append({"logits": (np.ones((2, 3)), [np.zeros(2)]), "labels": None})
    found = one.tree()
    assert found["labels"] is None
    assert found["logits"][0].shape == (4, 3)
    assert isinstance(found["logits"][1], list)
    assert [len(each["logits"][0]) for each in one.by_batch()] == [2, 2]
    with pytest.raises(DataError, match="differ in what the model returns"):
        one.append({"logits": (np.ones((2, 3)),), "labels": None})
    one.append({"logits": (np.ones((2, 3, 1)), [np.zeros(2)]), "labels": None})
    with pytest.raises(DataError, match="number of dimensions"):
        one.tree()
    one.close()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=4), st.booleans())
def test_packing_is_undone_by_unpacking(shapes: list[tuple[int, int]], nest: bool) -> None:
    arrays = [np.arange(a * b, dtype=np.int32).reshape(a, b) for a, b in shapes]
    tree = {"a": tuple(arrays), "b": [None, np.float64(3.5)]} if nest else arrays
    found = nested.unpack_tree(nested.pack_tree(nested.to_numpy(tree)))
    assert nested.describe_structure(found) == nested.describe_structure(tree)
    for mine, theirs in zip(nested.list_leaves(tree), nested.list_leaves(found), strict=True):
        assert np.array_equal(mine, theirs)
        assert np.asarray(mine).dtype == theirs.dtype


def test_tensors_become_arrays() -> None:
    found = nested.to_numpy((torch.ones(2, dtype=torch.bfloat16), torch.tensor([1]), None))
    assert found[0].dtype == np.float32
    assert found[1].dtype == np.int64
    assert found[2] is None
    with pytest.raises(ConfigError, match="not a tensor"):
        nested.to_numpy({"cache": object()})
