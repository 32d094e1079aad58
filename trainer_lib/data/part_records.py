"""The records of a job's numbered parts: a small JSON file for each, which says that the part is finished.

    records/<folder>/000002/00002007.json    of part 2007

A thousand lie in a folder, so no listing and nothing in memory grows with their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer_lib.locks.shared_parts import BLOCK, block_name
from trainer_lib.storage import Store

RECORDS = "records"
_NAME = re.compile(r"(\d{8,})\.json")
_AT_ONCE = 16  # records that are read at a time: on an object store each takes a while, and little else

T = TypeVar("T")


class PartRecords:
    """The records of one job.

    Args:
        store: the job's folder.
        folder: of these records, below the folder of all.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store.child(RECORDS, *folder.split("/"))

    def read(self, part: int, *, limit: int) -> bytes | None:
        """The record of a part; None without one."""
        return self._store.read_if_exists(_path(part), limit=limit)

    def write(self, part: int, record: bytes) -> None:
        """Write a part's record."""
        # Created, so that no other process sees half of it. It may be there: of a process that lost the part to us.
        if not self._store.create(_path(part), record):
            self._store.write_bytes(_path(part), record)

    def delete(self, part: int) -> None:
        """Remove a part's record."""
        self._store.delete(_path(part))

    def list_block(self, block: int) -> set[int]:
        """The numbers of a block's parts that have a record."""
        return {int(match[1]) for name in self._store.children(block_name(block)) if (match := _NAME.fullmatch(name))}

    def list_blocks(self) -> list[int]:
        """The blocks that may have records, in order."""
        return sorted(int(name) for name in self._store.children() if name.isdigit())

    def is_empty(self) -> bool:
        """Whether there is no record at all."""
        return not any(map(self.list_block, self.list_blocks()))

    def look_at_all(self, look: Callable[[int], T]) -> Iterator[tuple[int, T]]:
        """Call a function for each part with a record, in threads; yield in order what it returns."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for block in self.list_blocks():
                numbers = sorted(self.list_block(block))
                yield from zip(numbers, threads.map(look, numbers), strict=True)


def _path(part: int) -> str:
    return f"{block_name(part // BLOCK)}/{part:08d}.json"
