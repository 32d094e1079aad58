"""Reading up to a position where no other way leads there: said before it begins, priced after the first batches.

Map-style data never needs this. A stream can only be read from its start unless it can be put back (`state_dict`), and
then exactly: datasets' shuffle buffer is not part of its own state, so what it holds would be lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)
_PRICE_AFTER_S = 0.5  # long enough to tell, short enough to still be news


class Skip:
    """Batches that are read and discarded.

    Args:
        batches: how many, on this rank.
        what: what they are read from, and why.
        samples: how many samples that are over all ranks; None when unknown.
        says: whether this rank tells (one is enough).
    """

    def __init__(self, batches: int, what: str, *, samples: int | None = None, says: bool = True) -> None:
        self.batches = batches
        self._what = what
        self._samples = samples
        self._says = says and batches > 0
        self._done = 0
        self._begun: float | None = None
        self._priced = False

    def announce(self) -> None:
        """Say what is going to happen."""
        if self._says:
            read = f"{self.batches:,} batches" if self._samples is None else f"{self._samples:,} samples"
            inside = "" if self._samples is None else f" ({self.batches:,} batches)"
            text = "%s: reading and discarding %s%s up to the position; how long that takes is told after the first."
            _log.warning(text, self._what, read, inside)

    def begin(self) -> None:
        """The first one is about to be read."""
        self._begun = time.perf_counter()

    def tick(self) -> None:
        """One more was discarded."""
        self._done += 1
        if self._begun is None or not self._says:
            return
        seconds = time.perf_counter() - self._begun
        if self._done == self.batches:
            _log.info("%d batches were discarded in %.1f s.", self.batches, seconds)
        elif not self._priced and seconds >= _PRICE_AFTER_S:
            self._priced = True
            left = seconds / self._done * (self.batches - self._done)
            _log.warning(
                "%d of %d batches were discarded in %.1f s: about %.0f s more.", self._done, self.batches, seconds, left
            )

    def discard_from(self, items: Iterator[Any]) -> None:
        """Read and discard all of them."""
        self.begin()
        for _, _ in zip(range(self.batches), items, strict=False):
            self.tick()


def keeps_everything(stream: Any) -> bool:
    """Whether a stream's `state_dict` really puts it back; False for one that holds samples in a shuffle buffer."""
    waiting, seen = [stream], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or one is None:
            continue
        seen.add(id(one))
        if "BufferShuffled" in type(one).__name__:
            return False
        waiting += [getattr(one, name, None) for name in ("_ex_iterable", "ex_iterable", "dataset")]
        waiting += getattr(one, "ex_iterables", None) or []
    return True
