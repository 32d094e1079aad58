"""The address of a hub, the content of a publication, and the result of publishing it.

A publication is a set of files under repository paths. Its content digest is defined in `trainer_lib.storage.commit`:
SHA-256 over the sorted (path, size, sha256) lines, without times or run ids. A hub holds one history of revisions per
target. Publishing what the newest revision already holds does not create another.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from trainer_lib.errors import ConfigError
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import content_digest

SCHEME = "hf://"
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,119}")

ADAPTER = "adapter"  # folder of a publication whose weights have adapters merged in: the adapters as they were trained


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


@dataclass(frozen=True)
class Target:
    """A parsed address: a repository on the Hub, or a folder (`repo` is None)."""

    url: str
    repo: str | None
    revision: str | None


def parse_target(to: str, *, revision: str | None = None, field: str = "publish.to") -> Target:
    """Parse `hf://organisation/name[@revision]`, or the path or URL of a folder.

    Raises ConfigError when the address is malformed, or names another revision than `revision`.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        what = "The name cannot be used for a branch."
        raise ConfigError(what, field="publish.revision", value=revision, remedy="Use a name like main.")
    if not to.startswith(SCHEME):
        if to.lower().startswith("hf:"):  # a local path of this name is "./hf:name"
            remedy = "Write hf://organisation/name, with two slashes and in lower case."
            what = "This is neither an address on the Hub nor a folder."
            raise ConfigError(what, field=field, value=to, remedy=remedy)
        return Target(to, None, revision)
    repo, _, named = to.removeprefix(SCHEME).partition("@")
    # `partition` cannot tell an empty branch ("name@") from none.
    if not _is_repository(repo) or (named and not _REVISION.fullmatch(named)) or to.endswith("@"):
        remedy = "Write hf://organisation/name, or …@branch."
        raise ConfigError("The address is not one on the Hub.", field=field, value=to, remedy=remedy)
    if named and revision and named != revision:
        what = f"The address names another revision than publish.revision = {revision}."
        raise ConfigError(what, field=field, value=to, remedy="Name the revision once.")
    return Target(to, repo, named or revision)


def _is_repository(repo: str) -> bool:
    """Whether the text is `organisation/name` by the rules of `huggingface_hub.utils.validate_repo_id`."""
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        return False
    return not repo.endswith(".git") and not any(part.endswith(("-", ".")) for part in repo.split("/"))
