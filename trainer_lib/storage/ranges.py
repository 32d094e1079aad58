"""Reading a far-away file with several requests in flight, in order and in bounded memory.

Glossary: a *piece* is one request's range; the *window* is how many pieces are on their way beyond the one in use.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

PIECE = 16 * 2**20
"""Bytes of one request: large enough that the latency of a request does not count."""
WINDOW = 6
GAP = 2**20
"""Bytes between two wanted ranges that are read and thrown away rather than asked for around."""

Buffer = bytes | bytearray | memoryview
Fetch = Callable[[int, int], "Future[Buffer]"]
"""Begin reading bytes [start, end)."""
Range = tuple[int, int]


def windowed(fetch: Fetch, ranges: Iterable[Range]) -> Iterator[Buffer]:
    """The bytes of each range in order, while the next ones are on their way. Closing it cancels those.

    Raises:
        OSError: the store sent fewer bytes than the range has.
    """
    flying: deque[tuple[int, Future[Buffer]]] = deque()
    try:
        for start, end in ranges:
            flying.append((end - start, fetch(start, end)))
            if len(flying) > WINDOW:
                yield _arrived(*flying.popleft())
        while flying:
            yield _arrived(*flying.popleft())
    finally:
        for _, future in flying:
            future.cancel()
        for _, future in flying:  # wait: a request must not outlive the stream, nor its failure go unheard
            with contextlib.suppress(Exception, CancelledError):
                future.result()


def _arrived(size: int, future: Future[Buffer]) -> Buffer:
    data = future.result()
    if len(data) != size:
        raise OSError(errno.EIO, f"the store sent {len(data)} of {size} bytes")
    return data


def pieces(start: int, end: int) -> Iterator[Range]:
    """A range, cut into pieces."""
    return ((at, min(at + PIECE, end)) for at in range(start, end, PIECE))


def scatter(read: Callable[[Iterable[Range]], Iterator[Buffer]], parts: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each buffer with the bytes from its position on; neighbours are read in one go, nothing is read twice.

    Args:
        read: gives the bytes of ranges in order.
        parts: (position in the file, buffer of bytes), in any order.
    """
    wanted = sorted((part for part in parts if len(part[1])), key=lambda part: part[0])
    ranges = [piece for start, end in _runs(wanted) for piece in pieces(start, end)]
    first = 0
    for (start, end), data in zip(ranges, read(ranges), strict=True):
        view = memoryview(data)
        if len(view) != end - start:
            raise OSError(errno.EIO, f"the file ends at byte {start + len(view)}, {end} are wanted")
        while first < len(wanted) and wanted[first][0] + len(wanted[first][1]) <= start:
            first += 1
        for position, buffer in wanted[first:]:
            if position >= end:
                break
            low, high = max(position, start), min(position + len(buffer), end)
            if low < high:
                buffer[low - position : high - position] = view[low - start : high - start]


def _runs(parts: Sequence[tuple[int, memoryview]]) -> Iterator[Range]:
    """Sorted parts as the fewest ranges that cover them, without gaps larger than GAP."""
    run: Range | None = None
    for position, buffer in parts:
        end = position + len(buffer)
        if run is None or position > run[1] + GAP:
            if run is not None:
                yield run
            run = (position, end)
        else:
            run = (run[0], max(run[1], end))
    if run is not None:
        yield run


class AheadReader(io.RawIOBase):
    """A file of known size as a stream: read from front to back it keeps a window of pieces in flight."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._piece = memoryview(b"")
        self._coming: Iterator[Buffer] | None = None

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes; what was on its way is given up."""
        return True

    def tell(self) -> int:
        """Bytes from the start of the file."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere; the new position."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        if position != self._position:
            self._drop()
            self._position = position
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes: fewer only at the end of the file."""
        rest = max(0, self._size - self._position)
        wanted = rest if size is None or size < 0 else min(size, rest)
        parts = []
        while wanted:
            parts.append(self._take(wanted))
            wanted -= len(parts[-1])
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as the piece at hand goes; 0 only at the end of the file."""
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)

    def _take(self, most: int) -> memoryview:
        """The next bytes, as far as the piece at hand goes."""
        if not len(self._piece) and most and self._position < self._size:
            if self._coming is None:
                self._coming = windowed(self._fetch, pieces(self._position, self._size))
            self._piece = memoryview(b"")  # the old one is freed before the next is asked for
            self._piece = memoryview(next(self._coming))
        data, self._piece = self._piece[:most], self._piece[most:]
        self._position += len(data)
        return data

    def close(self) -> None:
        """Give up what is on its way."""
        self._drop()
        super().close()

    def _drop(self) -> None:
        self._piece = memoryview(b"")
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.close()  # type: ignore[attr-defined]  # a generator
