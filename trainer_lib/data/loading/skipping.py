"""Reads a stream up to a position when it cannot be restored there, and logs how long that takes.

Map-style data never needs this. A stream without a `state_dict` can only be read from its start. So can one whose state
is incomplete: the state of datasets' shuffled streams leaves out the samples in the shuffle buffer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)
_ESTIMATE_AFTER_S = 0.5  # long enough for an estimate, short enough to be useful


class Skip:
    """Batches that are read and discarded.

    Args:
        batches: number of batches to discard on this rank.
        what: what they are read from, and why; begins the log message.
        samples: number of samples over all ranks; None when unknown.
        logs: whether this rank logs.
    """

    def __init__(self, batches: int, what: str, *, samples: int | None = None, logs: bool = True) -> None:
        self.batches = batches
        self._what = what
        self._samples = samples
        self._logs = logs and batches > 0
        self._done = 0
        self._started: float | None = None
        self._estimated = False

    def announce(self) -> None:
        """Log what will be read, before it starts."""
        if self._logs:
            read = f"{self.batches:,} batches" if self._samples is None else f"{self._samples:,} samples"
            inside = "" if self._samples is None else f" ({self.batches:,} batches)"
            text = "%s: reading and discarding %s%s up to the position; an estimate of the time follows."
            _log.warning(text, self._what, read, inside)

    def begin(self) -> None:
        """Start the clock, before the first batch is read."""
        self._started = time.perf_counter()

    def tick(self) -> None:
        """Count a discarded batch; log an estimate, or the total at the end."""
        self._done += 1
        if self._started is None or not self._logs:
            return
        seconds = time.perf_counter() - self._started
        if self._done == self.batches:
            _log.info("%d batches were discarded in %.1f s.", self.batches, seconds)
        elif not self._estimated and seconds >= _ESTIMATE_AFTER_S:
            self._estimated = True
            left = seconds / self._done * (self.batches - self._done)
            _log.warning(
                "%d of %d batches were discarded in %.1f s: about %.0f s more.", self._done, self.batches, seconds, left
            )

    def discard_from(self, items: Iterator[Any]) -> None:
        """Read and discard all batches."""
        self.begin()
        # The count first: the other way round `zip` would read one batch too many.
        for _, _ in zip(range(self.batches), items, strict=False):
            self.tick()


def has_complete_state(stream: Any) -> bool:
    """Whether a stream's `state_dict` restores it exactly; False for one with a shuffle buffer."""
    # datasets wraps its sources in each other: any of them may hold a buffer.
    waiting, seen = [stream], set()
    while waiting:
        source = waiting.pop()
        if id(source) in seen or source is None:
            continue
        seen.add(id(source))
        if "BufferShuffled" in type(source).__name__:
            return False
        waiting += [getattr(source, name, None) for name in ("_ex_iterable", "ex_iterable", "dataset")]
        waiting += getattr(source, "ex_iterables", None) or []
    return True


def with_own_position(stream: Any) -> Any:
    """A stream of datasets over the same data with a position of its own; any other stream as it is.

    Such a stream keeps its position in the sources that it wraps. Otherwise an evaluation of the stream that is trained
    on would move the position that the next checkpoint saves, and a resume would leave the user's stream positioned.
    """
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return _copy_sources(stream) if kind is not None and isinstance(stream, kind) else stream


def _copy_sources(stream: Any) -> Any:
    copied = object.__new__(type(stream))  # `copy.copy` makes an IterableDataset that shares its attributes
    copied.__dict__.update(vars(stream))
    for name, value in vars(stream).items():
        if callable(getattr(value, "_init_state_dict", None)):
            setattr(copied, name, _copy_sources(value))
        elif isinstance(value, list) and any(callable(getattr(source, "_init_state_dict", None)) for source in value):
            setattr(copied, name, [_copy_sources(source) for source in value])
    return copied
