"""Watching the generators: no draw goes unnoticed, and what was drawn in vain is put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib.data.generators import keep_generators, watch_generators

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(5),
    "numpy": np.random.rand,
    "numpy gauss": np.random.randn,
    "numpy seed": lambda: np.random.seed(5),
    "torch": lambda: torch.rand(1),
    "torch gauss": lambda: torch.randn(1),
    "torch seed": lambda: torch.manual_seed(5),
}


@pytest.fixture(autouse=True)
def _known_states() -> Iterator[None]:
    with keep_generators():
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        yield


def _next() -> tuple[float, ...]:
    return (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), *torch.randn(2).tolist())


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_noticed_and_put_back(name: str) -> None:
    with keep_generators():
        expected = _next()
    watched = watch_generators()
    assert watched is not None
    assert not watched.has_moved()
    DRAWS[name]()
    assert watched.has_moved()
    watched.restore()
    assert not watched.has_moved()
    assert _next() == expected


def test_half_of_pythons_pair_of_gaussians_is_noticed_and_put_back() -> None:
    random.gauss(0, 1)  # keeps the second of the pair beside the words
    with keep_generators():
        expected = _next()
    watched = watch_generators()
    assert watched is not None
    random.gauss(0, 1)
    assert watched.has_moved()
    watched.restore()
    assert _next() == expected


def test_nothing_is_watched_while_numpy_holds_half_a_pair_of_gaussians() -> None:
    assert watch_generators() is not None
    np.random.randn()
    assert watch_generators() is None  # handing out the other half would change no word
    np.random.randn()
    assert watch_generators() is not None


def test_nothing_is_watched_with_another_generator_in_numpys_place() -> None:
    given: Any = np.random
    own = given.get_bit_generator()
    try:
        given.set_bit_generator(np.random.PCG64(1))
        assert watch_generators() is None
    finally:
        given.set_bit_generator(own)
    assert watch_generators() is not None
