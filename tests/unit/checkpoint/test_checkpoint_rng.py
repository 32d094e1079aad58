"""After a restore every generator gives the numbers it would have given."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib.checkpoint.rng import capture_rng, restore_rng
from trainer_lib.errors import DamagedError


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def draw() -> list[Any]:
    numbers = [random.random(), random.gauss(), random.randrange(10**12)]
    numbers += [np.random.rand(), np.random.randn(), int(np.random.randint(1 << 30))]
    return [
        *numbers,
        *torch.randn(5).tolist(),
        *torch.randperm(7).tolist(),
        torch.nn.functional.dropout(torch.ones(9)).tolist(),
    ]


def test_all_generators_go_on_where_they_were() -> None:
    random.gauss()  # Python and NumPy make normal numbers in pairs and keep the second: that is state as well
    np.random.randn()
    state = json.loads(json.dumps(capture_rng()))
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != expected[0]

    restore_rng(state)

    assert [draw() for _ in range(3)] == expected
    restore_rng(state)
    assert draw() == expected[0]


def test_capturing_draws_nothing() -> None:
    state = capture_rng()
    assert capture_rng() == state


@pytest.mark.parametrize(
    "change",
    [
        {"python": [1]},
        {"python": [3, [1, 2], None]},
        {"python": None},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]},
        {"numpy": ["Other", [1] * 624, 0, 0, 0.0]},
        {"numpy": ["MT19937", [-1] * 624, 0, 0, 0.0]},
        {"torch": "!!"},
        {"torch": ""},
        {"torch": "AAAA"},
    ],
)
def test_a_malformed_state_is_damage(change: dict[str, Any]) -> None:
    state = {**capture_rng(), **change}
    with pytest.raises(DamagedError) as caught:
        restore_rng(state)
    assert caught.value.field == "rng"


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_missing_generator_is_damage(name: str) -> None:
    state = capture_rng()
    del state[name]
    with pytest.raises(DamagedError):
        restore_rng(state)
