"""Seeds, restores and watches the three CPU generators that a sample may draw from: Python's, NumPy's and torch's.

Most data draws no random numbers, but only the data itself could declare it. Watching finds it out: a batch is read
without seeding, and when a generator has moved, it is restored and the batch is read again with every sample seeded.

Reading the states through the public interface is slow (NumPy 31 µs, Python 8 µs), so their words are compared in
memory. Both memory layouts are first verified against the public interface. Where they differ (another interpreter,
another NumPy, another generator), nothing is watched and every sample is seeded.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_WORDS = 624  # a Mersenne twister's state: 624 words of 32 bits, and a position
_BYTES = 4 * (_WORDS + 1)


@contextlib.contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed the Python, NumPy and torch CPU generators for a block, then restore their states."""
    with keep_generators():
        seed_generators(seed)
        yield


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the states of the Python, NumPy and torch CPU generators after a block."""
    python, legacy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the three CPU generators from one 64-bit number."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed would seed every device, which takes 100 µs.
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


class Watch:
    """The states of the three generators at one moment; created by `watch_generators`."""

    def __init__(self, python: bytes, numpy: bytes) -> None:
        self._python = python
        self._gauss = _read_python_gauss()
        self._numpy = numpy
        self._torch = torch.default_generator.get_state()

    def has_moved(self) -> bool:
        """Whether a generator was drawn from or seeded since."""
        python, numpy = _map_python_words(), _map_numpy_words()
        # As bytes: memory views are compared word by word.
        if python is None or numpy is None or bytes(python) != self._python or bytes(numpy) != self._numpy:
            return True
        now = torch.default_generator.get_state()
        return _read_python_gauss() != self._gauss or now.numpy().tobytes() != self._torch.numpy().tobytes()

    def restore(self) -> None:
        """Set the three generators back to that moment."""
        position, *words = np.frombuffer(self._python, dtype=np.uint32).tolist()
        random.setstate((3, (*words, position), self._gauss))
        *words, position = np.frombuffer(self._numpy, dtype=np.uint32).tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))
        torch.default_generator.set_state(self._torch)


_without_gauss = b""  # NumPy's newest words with which no second Gaussian number was kept


def watch_generators() -> Watch | None:
    """Watch the generators from now on; None when a draw could go unnoticed."""
    global _without_gauss
    python, numpy = _map_python_words(), _map_numpy_words()
    if python is None or numpy is None:
        return None
    words = bytes(numpy)
    # NumPy keeps the second of two Gaussian numbers outside the words: drawing that one would go unnoticed. Only a draw
    # creates one, and a draw changes the words: unchanged words need no second look.
    if words != _without_gauss:
        if np.random.get_state(legacy=False)["has_gauss"]:
            return None
        _without_gauss = words
    return Watch(bytes(python), words)


def _read_python_gauss() -> Any:
    return getattr(random, "_inst").gauss_next  # noqa: B009 - typed as private


@functools.cache
def _map_python_words() -> memoryview | None:
    """The memory of `random`'s generator: after the object's header, its position and then the words."""
    inst: Any = getattr(random, "_inst", None)
    base = type(inst).__mro__[1] if inst is not None else object
    if base.__basicsize__ < object.__basicsize__ + _BYTES:
        return None
    memory = _map_memory(id(inst) + object.__basicsize__)
    position, *words = np.frombuffer(memory, dtype=np.uint32).tolist()
    return memory if inst.getstate()[1] == (*words, position) else None


_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009 - missing in NumPy's own types


def _map_numpy_words() -> memoryview | None:
    return _map_words_of(_bit_generator())


@functools.lru_cache(maxsize=1)
def _map_words_of(generator: Any) -> memoryview | None:
    """The memory of NumPy's generator: the words, then its position."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = _map_memory(int(generator.ctypes.state_address))
    *words, position = np.frombuffer(memory, dtype=np.uint32).tolist()
    state = generator.state["state"]
    return memory if (state["key"].tolist(), state["pos"]) == (words, position) else None


def _map_memory(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _BYTES).from_address(address)).cast("B")


def parts_of_loader(loader: Any) -> list[Any]:
    """Readers of a DataLoader: batch sampler, sampler, dataset, and the sampler of the batch sampler."""
    parts = [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    return [*parts, getattr(parts[0], "sampler", None)]


class LoaderGenerators:
    """The torch generators of a user's DataLoader, which continue from epoch to epoch, as in torch.

    A loader that restores itself (`state_dict`) restores its generators as well: they are left alone.
    """

    def __init__(self, loader: Any) -> None:
        restores_itself = callable(getattr(loader, "state_dict", None))
        found = [getattr(part, "generator", None) for part in (loader, *parts_of_loader(loader))]
        own = [] if restores_itself else [generator for generator in found if isinstance(generator, torch.Generator)]
        self._generators = list(dict.fromkeys(own))
        self._as_given = self._start = self._read()
        self._epoch = 0
        self._reached: list[str] | None = None

    def _read(self) -> list[str]:
        return [base64.b64encode(generator.get_state().numpy().tobytes()).decode() for generator in self._generators]

    def _write(self, states: list[str]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))

    def begin_epoch(self, epoch: int) -> None:
        """Let an epoch that is read again, or resumed, begin in the states in which it began."""
        if epoch == self._epoch:
            self._write(self._start)
        self._epoch, self._start = epoch, self._read()

    def reach_position(self) -> None:
        """After a resume has read up to the position: an evaluation may have drawn from them before."""
        if self._reached is not None:
            self._write(self._reached)
            self._reached = None

    def state(self) -> dict[str, Any]:
        """The states in which the newest epoch began and those of now, as JSON; nothing without generators."""
        now = {"epoch": self._epoch, "start": self._start, "now": self._read()}
        return {"generators": now} if self._generators else {}

    def load_state(self, state: dict[str, Any], epoch: int) -> None:
        """Begin `epoch` as the run did that wrote the state."""
        if len(state["now"]) == len(self._generators):  # else the loader is another one
            is_open = state["epoch"] == epoch
            self._epoch, self._start = epoch, state["start" if is_open else "now"]
            self._reached = state["now"] if is_open else None

    def put_back(self) -> None:
        """Restore the states in which the generators were given."""
        self._write(self._as_given)
