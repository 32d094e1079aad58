"""Checkpoints and files crafted to do harm."""

from __future__ import annotations

import io
import json
import os
import resource
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, read_commit, write_commit


class Evil:
    """Unpickled, it makes a file: what real ones do is worse."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.touched}",)


def with_file(folder: Store, name: str, data: bytes) -> None:
    """Replace a committed file by other bytes and commit the folder again."""
    commit = read_commit(folder)
    assert commit is not None
    others = [entry for entry in commit.files if entry.path != name]
    crafted = [*others, folder.write_bytes(name, data)]
    folder.delete(COMMIT)
    write_commit(folder, "checkpoint", crafted, commit.meta)


def safetensors(header: dict[str, Any] | bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    """Build a safetensors file with this header; `length` replaces the length that the file states."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


def rezipped(
    data: bytes, program: bytes | None = None, *, compression: int = zipfile.ZIP_STORED, more: str | None = None
) -> bytes:
    """A file of torch.save with another program, one more record, or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", compression) as target:
        for record in source.infolist():
            is_program = record.filename.endswith("data.pkl") and program is not None
            target.writestr(record.filename, program if is_program and program is not None else source.read(record))
        if more is not None:
            target.writestr(f"archive/{more}", b".")
    return out.getvalue()


def program_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@contextmanager
def bounded(megabytes: int, seconds: float = 20.0) -> Iterator[None]:
    """Allow a block so many bytes beyond what the process has, and so many seconds."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        limit = pages * resource.getpagesize() + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    began = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - began < seconds
