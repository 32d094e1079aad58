"""Claims on a checkpoint's folder: one of the processes that try wins, also over a dead writer's claim.

A claim is the file ``WRITING.json`` (a `lease.Holder`), created exclusively. The claim of a dead writer is not deleted,
because of two processes that find it the slower one would delete the faster one's new claim. It is *succeeded*: the
next claim is ``WRITING.<digest of the dead claim>.json``, created exclusively too, so one process gets it. The last
claim of this chain holds the folder::

    WRITING.json  (A, dead)  ->  WRITING.<digest of A>.json  (B, dead)  ->  WRITING.<digest of B>.json  (C, writes)

Claims are removed from the first to the last, so that no process joins a chain that is going away. They are not part
of the checkpoint.

On stores without exclusive create (`Store.exclusive`) two processes that come within the same milliseconds may both
write. `holds_claim`, right before the commit, lets at most one of them commit, and the digests show whether the other
has spoiled one of its files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from trainer_lib.locks.lease import Holder, read_small
from trainer_lib.storage import Store

WRITING = "WRITING.json"
_SUCCESSOR = re.compile(r"WRITING\.[0-9a-f]{32}\.json")


def is_claim(name: str) -> bool:
    """Whether a file of a checkpoint's folder is a claim."""
    return name == WRITING or _SUCCESSOR.fullmatch(name) is not None


def read_claim(store: Store) -> Holder | None:
    """Read which process writes a checkpoint's folder; None without a claim, or with one that cannot be read."""
    chain = _chain(store)
    return Holder.from_bytes(chain[-1][1]) if chain else None


def claim_folder(store: Store, claim: Holder, in_use: Callable[[Holder], bool]) -> Holder | None:
    """Claim a folder for writing: None when it is ours now, else the process that holds it. Raises StorageError.

    A claim whose writer is not `in_use` is succeeded.
    """
    name, ours = WRITING, claim.to_bytes()
    while not store.create(name, ours):
        data = read_small(store, name)
        if data == ours:  # the answer to our create was lost, and the client tried again
            return None
        other = Holder.from_bytes(data or b"")
        # The file's age does not matter: `in_use` asks whether its writer is running.
        if other is not None and in_use(other):
            return other
        name = WRITING if data is None else _successor(name, data)  # None: released just now, so start over
    return None


def holds_claim(store: Store, claim: Holder) -> bool:
    """Whether our claim is the last of the chain, so that the folder is still ours."""
    chain = _chain(store)
    return bool(chain) and chain[-1][1] == claim.to_bytes()


def release_claim(store: Store) -> None:
    """Remove all claims of a folder that is ours, the first one first."""
    chain = [name for name, _ in _chain(store)]
    strays = [info.path for info in store.list() if is_claim(info.path) and info.path not in chain]
    for name in [*strays, *chain]:
        store.delete(name)


def _chain(store: Store) -> list[tuple[str, bytes]]:
    """Names and contents of the claims, from the first to the one that holds the folder."""
    found: list[tuple[str, bytes]] = []
    name = WRITING
    while (data := read_small(store, name)) is not None:
        found.append((name, data))
        name = _successor(name, data)
    return found


def _successor(name: str, data: bytes) -> str:
    # With the name: after an empty claim, which a crash can leave, an empty one would be its own successor.
    return f"WRITING.{hashlib.sha256(name.encode() + data).hexdigest()[:32]}.json"
