"""How many samples a batch has, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_lib.data.items import count_samples

THREE = torch.zeros(3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(4, 2), "names": ["a", "b"]}, 4),
        ({"features": {"x": torch.zeros(4, 2)}, "names": ["a", "b"]}, 4),
        ({"label": [THREE, THREE], "texts": ["a", "b"]}, 2),
        ({"label": [THREE, THREE], "texts": [["a", "b", "c"], ["d", "e", "f"]]}, 2),
        ({"inputs": [THREE, THREE]}, 3),
        (["a", "b"], 2),
        ([{"x": THREE}, {"x": THREE}], 2),
        (3.5, None),
    ],
)
def test_samples_are_counted_by_tensors_else_by_texts(batch: Any, expected: int | None) -> None:
    assert count_samples(batch) == expected
