"""The storages on which this user has run pipelines: only there is the code of a run executed without a question.

Noted in the user's own folder: what a storage says of itself, a stranger may have written.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from trainer_lib.trackers.spool import user_data_dir


def trust_storage(url: str) -> None:
    """Note that this user runs pipelines on a storage; without a place for notes, there will be a question."""
    note, address = _note(url)
    with contextlib.suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(f"{address}\n", encoding="utf-8")


def is_trusted(url: str) -> bool:
    """Whether this user has run a pipeline on a storage, at this address."""
    return _note(url)[0].is_file()


def _note(url: str) -> tuple[Path, str]:
    address = url.rstrip("/") if "://" in url else str(Path(url).resolve())
    return user_data_dir() / "storages" / hashlib.sha256(address.encode()).hexdigest()[:32], address
