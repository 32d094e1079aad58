"""The values of a table, on the disk where they are many."""

from __future__ import annotations

import itertools
import json
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

from typing_extensions import override

from trainer_lib.base.json_text import parse_json

SPOOL_BYTES = 32 << 20
"""The most that a table keeps in memory, values that are not yet in the file and the file itself."""
_VALUE_BYTES = 60
_LEAST_BYTES, _MOST_BYTES = 1 << 14, 2 << 20
_PLAIN = (str, int, float, bool)


class Spool:
    """A file without a name for the values of a table: in memory while it is small, then on the disk."""

    def __init__(self) -> None:
        self.file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - closed with the last value

    def __del__(self) -> None:
        self.file.close()


_Chunk = list[Any] | tuple[Spool, int, int]
"""Values in memory; or their file, start and size."""


def _load(chunk: _Chunk) -> list[Any]:
    if isinstance(chunk, list):
        return chunk
    spool, start, size = chunk
    spool.file.seek(start)
    return parse_json(zlib.decompress(spool.file.read(size)), list)


class SpooledValues(Sequence[Any]):
    """Values in their order, in chunks of JSON in a `Spool`; the newest ones, and lists and objects, are in memory.

    Args:
        columns: of the table, which share the memory.
    """

    def __init__(self, spool: Spool, columns: int) -> None:
        self._spool, self._most = spool, max(_LEAST_BYTES, min(_MOST_BYTES, SPOOL_BYTES // columns))
        self._newest: list[Any] = []
        self._bytes = 0
        self._chunks: list[_Chunk] = []
        self._ends: list[int] = []  # of the chunks, in values
        self._loaded: tuple[int, list[Any]] = (-1, [])

    def append(self, value: Any) -> None:
        """Put a value behind the others."""
        self._newest.append(value)
        self._bytes += _VALUE_BYTES + (len(value) if isinstance(value, str) else 0)
        if self._bytes > self._most:
            self._store()

    def _store(self) -> None:
        if not self._newest:
            return
        chunk: _Chunk = self._newest
        if all(value is None or type(value) in _PLAIN for value in self._newest):
            data = zlib.compress(json.dumps(self._newest).encode(), 1)
            chunk = (self._spool, self._spool.file.seek(0, 2), len(data))
            self._spool.file.write(data)
        self._chunks.append(chunk)
        self._ends.append(len(self))
        self._newest, self._bytes = [], 0

    def extend(self, values: Iterable[Any]) -> None:
        """Put values behind the others; chunks of another column stay where they are."""
        if isinstance(values, SpooledValues):
            self._store()
            start = len(self)
            self._chunks += values._chunks
            self._ends += [start + end for end in values._ends]
            values = values._newest
        for value in values:
            self.append(value)

    @override
    def __len__(self) -> int:
        return (self._ends[-1] if self._ends else 0) + len(self._newest)

    @override
    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(itertools.chain.from_iterable(map(_load, self._chunks)), self._newest)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(islice(self, *index.indices(len(self))))
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        if number == len(self._ends):
            return self._newest[index - start]
        if self._loaded[0] != number:
            self._loaded = number, _load(self._chunks[number])
        return self._loaded[1][index - start]
