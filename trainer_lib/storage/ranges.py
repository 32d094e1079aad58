"""Read a remote file with several requests in flight, in order and in bounded memory.

Glossary: a *piece* is the range of one request; the *window* is the number of pieces in flight beyond the one in use.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, BinaryIO

from typing_extensions import override

PIECE = 16 * 2**20
"""Bytes of one request: so many that the latency of a request does not matter."""
WINDOW = 6
GAP = 2**20
"""Bytes between two wanted ranges up to which one request reads both and discards what lies between."""

Buffer = bytes | bytearray | memoryview
Fetch = Callable[[int, int], "Future[Buffer]"]
"""Start a request for the bytes [start, end)."""
Range = tuple[int, int]


def windowed(fetch: Fetch, ranges: Iterable[Range]) -> Iterator[Buffer]:
    """Yield the bytes of ranges in order, while requests for the next ones are in flight. `close` cancels those.

    Raises:
        OSError: the store sent fewer bytes than a range has.
    """
    flying: deque[tuple[int, Future[Buffer]]] = deque()
    try:
        for start, end in ranges:
            flying.append((end - start, fetch(start, end)))
            if len(flying) > WINDOW:  # the next requests start before the caller gets these bytes
                yield _arrived(*flying.popleft())
        while flying:
            yield _arrived(*flying.popleft())
    finally:
        for _, future in flying:
            future.cancel()
        for _, future in flying:  # a request must not outlive the stream, and asyncio logs exceptions never retrieved
            with contextlib.suppress(Exception, CancelledError):
                future.result()


def _arrived(size: int, future: Future[Buffer]) -> Buffer:
    data = future.result()
    if len(data) != size:
        raise OSError(errno.EIO, f"the store sent {len(data)} of {size} bytes")
    return data


def pieces(start: int, end: int) -> Iterator[Range]:
    """Cut a range into pieces."""
    return ((at, min(at + PIECE, end)) for at in range(start, end, PIECE))


def scatter(read: Callable[[Iterable[Range]], Iterator[Buffer]], parts: Sequence[tuple[int, memoryview]]) -> None:
    """Fill buffers with the bytes from their positions on; read neighbours in one request and no byte twice.

    Args:
        read: yields the bytes of ranges in order.
        parts: (position in the file, buffer of bytes), in any order.

    Raises:
        OSError: the file ends before one of the parts does.
    """
    wanted = sorted((part for part in parts if len(part[1])), key=lambda part: part[0])
    ranges = [piece for start, end in _runs(wanted) for piece in pieces(start, end)]
    first = 0
    for (start, end), data in zip(ranges, read(ranges), strict=True):
        view = memoryview(data)
        if len(view) != end - start:
            raise OSError(errno.EIO, f"the file ends at byte {start + len(view)}, {end} are wanted")
        # Parts that end before this range are done: they are not looked at again.
        while first < len(wanted) and wanted[first][0] + len(wanted[first][1]) <= start:
            first += 1
        for position, buffer in wanted[first:]:
            if position >= end:
                break
            low, high = max(position, start), min(position + len(buffer), end)
            if low < high:
                buffer[low - position : high - position] = view[low - start : high - start]


def _runs(parts: Sequence[tuple[int, memoryview]]) -> Iterator[Range]:
    """Join sorted parts into the fewest ranges that cover them and have no gap larger than GAP."""
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
    """A file of known size as a stream, which keeps a window of pieces in flight as long as it is read in order."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._piece = memoryview(b"")
        self._coming: Iterator[Buffer] | None = None

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        if position != self._position:
            self._drop()  # the pieces in flight belong to the old position
            self._position = position
        return position

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._size - self._position)
        wanted = rest if size is None or size < 0 else min(size, rest)
        parts = []
        while wanted:
            parts.append(self._take(wanted))
            wanted -= len(parts[-1])
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Copy into `buffer` what is left of the current piece, at most; return 0 only at the end of the file."""
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)

    def _take(self, most: int) -> memoryview:
        """Return the next bytes, at most what is left of the current piece."""
        if not len(self._piece) and most and self._position < self._size:
            if self._coming is None:
                self._coming = windowed(self._fetch, pieces(self._position, self._size))
            self._piece = memoryview(b"")  # the old one is freed before the next is asked for
            self._piece = memoryview(next(self._coming))
        data, self._piece = self._piece[:most], self._piece[most:]
        self._position += len(data)
        return data

    @override
    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        self._piece = memoryview(b"")
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.close()  # type: ignore[attr-defined]  # a generator


def read_up_to(stream: BinaryIO, size: int) -> bytes:
    """Read at most so many bytes, taking memory as they come: one large read would ask for all of it at once."""
    data = bytearray()
    while len(data) < size and (piece := stream.read(min(2**20, size - len(data)))):
        data += piece
    return bytes(data)
