"""The content of a publication, and the result of publishing it.

A publication is a set of files under repository paths. Its content digest is defined in `trainer_lib.storage.commit`:
SHA-256 over the sorted (path, size, sha256) lines, without times or run ids. A hub holds one history of revisions per
target. Publishing what the newest revision already holds does not create another.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import content_digest

ADAPTER = "adapter"
"""Folder of a publication whose weights have adapters merged in: the adapters as they were trained."""


@dataclass(frozen=True)
class Source:
    """A file to publish: its store and path, and the size and digest that it must have."""

    store: Store
    entry: FileEntry


@dataclass(frozen=True)
class Content:
    """The files of one publication, by their paths in the repository; `texts` are made for it (card, metrics).

    `lineage` (stage keys, run ids) is recorded next to the content and not part of its digest. Files of earlier
    publications stay under the prefixes `kept`, although this content lacks them.
    """

    files: Mapping[str, Source]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    def entries(self) -> list[FileEntry]:
        """Every file under its repository path, sorted by path."""
        stored = [FileEntry(path, source.entry.size, source.entry.sha256) for path, source in self.files.items()]
        made = [FileEntry(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in self.texts.items()]
        return sorted(stored + made, key=lambda entry: entry.path)

    @property
    def digest(self) -> str:
        """The content digest, hexadecimal."""
        return content_digest(self.entries())

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open the file at a repository path for reading."""
        if path in self.texts:
            yield io.BytesIO(self.texts[path])
        else:
            source = self.files[path]
            with source.store.open_read(source.entry.path) as stream:
                yield stream


@dataclass(frozen=True)
class Published:
    """The result of publishing to `target`, the address as the user wrote it; `url` is that of the revision.

    `created` is False when the newest revision already held this content. A revision is a folder's name, or a commit.
    """

    target: str
    url: str
    revision: str
    content_digest: str
    created: bool
    files: tuple[FileEntry, ...]
