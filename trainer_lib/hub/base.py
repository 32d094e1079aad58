"""What is published, where it went, and what a hub can do.

A *publication* is a set of files under repository paths. Its content digest is that of `trainer_lib.commit`: SHA-256
over the sorted (path, size, sha256) lines; no times, no run ids. A hub holds one history of revisions per target;
publishing what its newest revision already holds makes none.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from trainer_lib.commit import content_digest
from trainer_lib.storage import FileEntry, Store


@dataclass(frozen=True)
class Source:
    """A file to publish: where it lies, and the size and digest it must have."""

    store: Store
    entry: FileEntry


@dataclass(frozen=True)
class Content:
    """The files of one publication.

    Attributes:
        files: repository path to the file that goes there.
        texts: repository path to the bytes of small files made for the publication (card, metrics).
        kept: path prefixes under which files of earlier publications stay although this one has none of them.
        lineage: where it came from (stage keys, run ids): recorded beside the content, not part of its digest.
    """

    files: Mapping[str, Source]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    def entries(self) -> list[FileEntry]:
        """Every file by its repository path, sorted."""
        stored = [FileEntry(path, one.entry.size, one.entry.sha256) for path, one in self.files.items()]
        made = [FileEntry(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in self.texts.items()]
        return sorted(stored + made, key=lambda entry: entry.path)

    @property
    def digest(self) -> str:
        """The content digest."""
        return content_digest(self.entries())

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """The bytes of one file, by its repository path."""
        if path in self.texts:
            yield io.BytesIO(self.texts[path])
        else:
            source = self.files[path]
            with source.store.open_read(source.entry.path) as stream:
                yield stream


@dataclass(frozen=True)
class Published:
    """Where a publication is.

    Attributes:
        target: the hub's address as the user wrote it.
        url: where this very revision is found.
        revision: the revision's name: a folder's name, or a commit.
        created: whether a revision was made; False when the newest one already held this content.
    """

    target: str
    url: str
    revision: str
    content_digest: str
    created: bool
    files: tuple[FileEntry, ...]


class Hub(Protocol):
    """One target that can be published to."""

    def publish(self, content: Content, *, message: str) -> Published:
        """Make `content` the newest revision, whole or not at all; nothing when it is that already.

        Raises:
            ConfigError: the target refuses us; StorageError: it is out of reach (a retry can help).
        """

    def holds(self, revision: str, digest: str) -> bool:
        """Whether a revision made earlier is still there with this content digest."""
