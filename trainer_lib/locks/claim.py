"""Who writes a checkpoint's folder: one of those who try, also when they find the claim of one that died.

``WRITING.json`` is created exclusively. The claim of a dead writer is not deleted, for of two who find it the slower
one would delete the faster one's: it is *succeeded*, by creating ``WRITING.<digest of that claim>.json``, exclusively
too. The last claim of this chain holds the folder. They are removed first to last, so that nobody joins a chain that is
going away, and are no part of the checkpoint.

On stores without exclusive create (`Store.exclusive`) two who come in the same milliseconds may both write;
`holds_claim`, right before the commit, lets one of them at most commit, and the digests tell if the other has spoiled
a file of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from trainer_lib.errors import DamagedError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

WRITING = "WRITING.json"
_SUCCESSOR = re.compile(r"WRITING\.[0-9a-f]{32}\.json")
_LIMIT = 4096


def is_claim(name: str) -> bool:
    """Whether a file of a checkpoint's folder is a claim on it."""
    return name == WRITING or _SUCCESSOR.fullmatch(name) is not None


def read_claim(store: Store) -> Holder | None:
    """Who is writing a checkpoint's folder; None when nobody is, or nobody that can be told."""
    chain = _chain(store)
    return Holder.from_bytes(chain[-1][1]) if chain else None


def claim_folder(store: Store, claim: Holder, in_use: Callable[[Holder], bool]) -> Holder | None:
    """Claim a folder. None when it is ours now, else whose it is.

    Args:
        store: the folder.
        claim: ours.
        in_use: whether the writer of another claim is still at it; who is not is succeeded.
    """
    name, ours = WRITING, claim.to_bytes()
    while not store.create(name, ours):
        data = _read(store, name)
        if data == ours:  # our create's answer was lost, and the client asked again
            return None
        other = Holder.from_bytes(data or b"")
        if other is not None and in_use(other):
            return other
        name = WRITING if data is None else _successor(data)  # None: it is just being given back
    return None


def holds_claim(store: Store, claim: Holder) -> bool:
    """Whether the folder is still ours."""
    chain = _chain(store)
    return bool(chain) and chain[-1][1] == claim.to_bytes()


def release_claim(store: Store) -> None:
    """Give a folder back that is ours."""
    chain = [name for name, _ in _chain(store)]
    strays = [info.path for info in store.list() if is_claim(info.path) and info.path not in chain]
    for name in [*strays, *chain]:
        store.delete(name)


def _chain(store: Store) -> list[tuple[str, bytes]]:
    """The claims from the first to the one that holds: name, content."""
    found: list[tuple[str, bytes]] = []
    name = WRITING
    while (data := _read(store, name)) is not None:
        found.append((name, data))
        name = _successor(data)
    return found


def _successor(data: bytes) -> str:
    return f"WRITING.{hashlib.sha256(data).hexdigest()[:32]}.json"


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read_if_exists(name, limit=_LIMIT)
    except DamagedError:  # too large to be one of ours
        return b""
