"""Parts of a job, shared among processes of one machine or many: a part is for one process at a time.

    claims/000002/00002007/WRITING.json    the claim of part 2007 (`locks.claim`), removed once the part is finished
    claims/<id>.beat                       renewed by the process with that id

Processes take the first part that is neither finished nor claimed, so a fast one does more of them. The part of a
process that is gone is taken over: at once if it ran on this machine, else after its beat was seen to stand still.

Parts are looked at a block at a time, so that neither a listing nor a set grows with their number.

Claims save work and protect nothing. The bytes of a part depend on nothing but the job, so a process that was stopped,
lost its part and wakes up later writes what is there already.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator
from typing import Protocol

from typing_extensions import override

from trainer_lib.locks.claim import claim_folder, holds_claim, release_claim
from trainer_lib.locks.lease import Heartbeat, Holder, read_small
from trainer_lib.storage import Store

CLAIMS = "claims"
BLOCK = 1000  # parts whose records, and claims, are in one folder: as many as an object store lists in one answer
TTL_S = 30.0


def block_name(block: int) -> str:
    """The folder of a block."""
    return f"{block:06d}"


class Finished(Protocol):
    """The finished parts."""

    def list_finished(self, block: int) -> set[int]:
        """Those of the parts [block * BLOCK, (block + 1) * BLOCK), at one look."""

    def is_finished(self, part: int) -> bool:
        """Whether this one is."""


class SharedParts(Heartbeat):
    """The parts that this process works on; used in a ``with`` block, and iterated over once.

    Args:
        finished: which parts are finished, by any process.
        total: number of parts; None: it is not known, and the one that finds the end calls `end_at`.
        ttl_s: seconds without a beat after which another process may take over a part of this one.
        poll_s: seconds between two looks at the parts of others, once none is left to begin.
    """

    def __init__(
        self, store: Store, finished: Finished, *, total: int | None = None, ttl_s: float = TTL_S, poll_s: float = 0.5
    ) -> None:
        self._folder = store.child(CLAIMS)
        self._finished = finished
        self._total = total
        self._poll_s = poll_s
        self._holder = Holder.this_process(ttl_s)
        self._beats: dict[str, tuple[bytes | None, float]] = {}
        self._held: int | None = None
        super().__init__(ttl_s / 3, "this process")  # two beats may fail before it expires

    def __iter__(self) -> Iterator[int]:
        """Yield the parts that are ours, lower ones first, until every part is finished, by any process."""
        block, unfinished = 0, set[int]()
        while not self._is_beyond(block * BLOCK):
            if (yield from self._walk(block)):
                unfinished.add(block)
            block += 1
        yield from self._take_over(unfinished)

    def _walk(self, block: int) -> Generator[int, None, bool]:
        """Yield the parts of a block that are ours; return whether others work on some of it."""
        taken, has_others = self._finished.list_finished(block), False
        for part in range(block * BLOCK, (block + 1) * BLOCK):
            if self._is_beyond(part):
                break
            if part in taken:
                continue
            if self._claim(part):
                yield from self._begin(part)
            else:
                # The others are ahead of us: one look finds all that they have finished, and that they work on.
                # What is claimed, or was: on a disk an empty folder stays.
                claimed = {int(name) for name in self._folder.children(block_name(block)) if name.isdecimal()}
                taken, has_others = self._finished.list_finished(block) | claimed, True
        return has_others

    def end_at(self, total: int) -> None:
        """Note the number of parts, once it is known."""
        self._total = total

    def is_ours(self, part: int) -> bool:
        """Whether the part is still ours: asked right before it is written."""
        return self._held == part and holds_claim(self._child(part), self._holder)

    def _take_over(self, blocks: set[int]) -> Iterator[int]:
        """Wait for the parts of others; yield those whose process is gone."""
        while True:
            for block in sorted(blocks):
                finished = self._finished.list_finished(block)
                parts = range(block * BLOCK, (block + 1) * BLOCK)
                left = [part for part in parts if part not in finished and not self._is_beyond(part)]
                for part in left:
                    if self._claim(part):
                        yield from self._begin(part)
                if not left:
                    blocks.discard(block)
            if not blocks:
                return
            time.sleep(self._poll_s)

    def _begin(self, part: int) -> Iterator[int]:
        # Looked at once more: it may have been finished between our look and the claim.
        if not self._finished.is_finished(part):
            yield part
        self._release()

    def _is_beyond(self, part: int) -> bool:
        return self._total is not None and part >= self._total

    def _child(self, part: int) -> Store:
        return self._folder.child(block_name(part // BLOCK), f"{part:08d}")

    def _claim(self, part: int) -> bool:
        if claim_folder(self._child(part), self._holder, self._is_at_work) is not None:
            return False
        self._held = part
        return True

    def _release(self) -> None:
        if self._held is None:
            return
        child, self._held = self._child(self._held), None
        if holds_claim(child, self._holder):  # else another process works on it now
            release_claim(child)

    def _is_at_work(self, holder: Holder) -> bool:
        """Whether another process still works: it is not known to be gone, and its beat does not stand still."""
        if holder.is_gone():
            return False
        beat = read_small(self._folder, f"{holder.id}.beat")
        known = self._beats.get(holder.id)
        if known is None or known[0] != beat:
            # Timed by our own clock: those of two machines differ.
            self._beats[holder.id] = (beat, time.monotonic())
            return True
        return time.monotonic() - known[1] < holder.ttl_s

    @override
    def _beat(self) -> None:
        self._folder.write_bytes(f"{self._holder.id}.beat", uuid.uuid4().hex.encode())

    @override
    def _end(self) -> None:
        self._release()
        self._folder.delete(f"{self._holder.id}.beat")
