"""The three CPU generators a sample may draw from - Python's, NumPy's, torch's: seeded, put back, and watched.

Most data draws nothing, yet only the data itself could say so. Watching finds out: a batch is read as it is, and when a
generator has moved by then it is put back, and the batch is read again with every sample seeded.

Asking for states is slow (NumPy's 31 µs, Python's 8 µs: word by word), so the words are compared where they lie in
memory. Both layouts are compared with what the public interface says before they are relied on; where they differ
(another interpreter, another NumPy, another generator) nothing is watched and every sample is seeded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of a Mersenne twister, 32 bits each; then its position
_BYTES = 4 * (_WORDS + 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under freshly seeded Python, NumPy and torch CPU generators, then put the old states back."""
    with keep_generators():
        seed_generators(seed)
        yield


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Put the states of the Python, NumPy and torch CPU generators back after a block."""
    python, legacy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the three CPU generators from one 64-bit number. (torch.manual_seed would visit every device: 100 µs.)"""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


class Watch:
    """What the three generators were at one moment; made by `watch`."""

    def __init__(self, python: bytes, numpy: bytes) -> None:
        self._python = python
        self._gauss = _python_gauss()
        self._numpy = numpy
        self._torch = torch.default_generator.get_state()

    def moved(self) -> bool:
        """Whether anything was drawn from one of them since, or one was seeded."""
        python, numpy = _python_words(), _numpy_words()  # copied, for views are compared word by word
        if python is None or numpy is None or bytes(python) != self._python or bytes(numpy) != self._numpy:
            return True
        now = torch.default_generator.get_state()
        return _python_gauss() != self._gauss or now.numpy().tobytes() != self._torch.numpy().tobytes()

    def put_back(self) -> None:
        """Set all three back to that moment."""
        position, *words = np.frombuffer(self._python, dtype=np.uint32).tolist()
        random.setstate((3, (*words, position), self._gauss))
        *words, position = np.frombuffer(self._numpy, dtype=np.uint32).tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))
        torch.default_generator.set_state(self._torch)


def watch() -> Watch | None:
    """Watch the generators from here on; None when that cannot be done without missing a draw."""
    python, numpy = _python_words(), _numpy_words()
    # NumPy keeps the second of two Gaussian numbers where no word shows it: handing it out would go unnoticed.
    if python is None or numpy is None:
        return None
    words = bytes(numpy)
    return Watch(bytes(python), words) if _holds_no_gauss(words) else None


def _python_gauss() -> Any:
    return getattr(random, "_inst").gauss_next  # noqa: B009 - typed as private


@functools.cache
def _python_words() -> memoryview | None:
    """The memory of `random`'s own generator: behind the object's header its position, then the words."""
    inst: Any = getattr(random, "_inst", None)
    base = type(inst).__mro__[1] if inst is not None else object
    if base.__basicsize__ < object.__basicsize__ + _BYTES:
        return None
    memory = _memory(id(inst) + object.__basicsize__)
    position, *words = np.frombuffer(memory, dtype=np.uint32).tolist()
    return memory if inst.getstate()[1] == (*words, position) else None


_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009 - missing in NumPy's own types


def _numpy_words() -> memoryview | None:
    return _words_of(_bit_generator())


@functools.lru_cache(maxsize=1)
def _words_of(generator: Any) -> memoryview | None:
    """The memory of a generator of NumPy's: the words, then its position."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = _memory(int(generator.ctypes.state_address))
    *words, position = np.frombuffer(memory, dtype=np.uint32).tolist()
    state = generator.state["state"]
    return memory if (state["key"].tolist(), state["pos"]) == (words, position) else None


def _memory(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _BYTES).from_address(address)).cast("B")


_without_gauss = b""  # the words beside which there was certainly no second Gaussian number


def _holds_no_gauss(words: bytes) -> bool:
    # One appears only by drawing, which changes the words; as long as they have not changed there is none.
    global _without_gauss
    if words != _without_gauss:
        if np.random.get_state(legacy=False)["has_gauss"]:
            return False
        _without_gauss = words
    return True
