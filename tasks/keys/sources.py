"""Declared sources of the data, each as one digest, before anything is prepared.

    data/labels.csv, data/scans/      SHA-256 of every file, remembered by (size, modification time, inode)
    data/*.csv, s3://bucket/**/*.csv  the same of the files that match; `**` stands for any folders
    s3://bucket/path, gs://…          sorted names, sizes and the store's own content tags; nothing is downloaded
    hf://datasets/org/name[@revision] the same, by git's names of the contents, of a repository on the Hub
    sftp://host/path and others       SHA-256 of every file, which is read at each command
    https://host/file.csv             the server's ETag
    package:scikit-learn[/sub/path]   the digests an installed package was recorded with
    stdlib:[sub/path]                 the running interpreter's own library

Hidden files, as `row_sources.is_hidden` has them, do not belong to a source. A key holds the digest and a label without
absolute paths, so another machine finds the same key.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import read_json
from trainer_lib.base.suggestions import nearest
from trainer_lib.data.rows.row_sources import is_hidden, is_pattern, list_matches
from trainer_lib.errors import ConfigError, StorageError, StoreUnreachableError, first_line
from trainer_lib.storage import FileInfo, Store, split_root, split_url
from trainer_lib.storage.local import make_folders
from trainer_lib.storage.outages import describe_outage

if TYPE_CHECKING:
    from importlib import metadata

_HTTP_TIMEOUT_S = 30.0
_RACY_NS = 2_000_000_000
"""A file changed this shortly before we looked may change again within its time stamp: its digest is not remembered."""
_TAGGED = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf")
"""Schemes whose stores identify a file's content without reading it."""


def check(sources: Sequence[str], *, field: str = "prepare.sources") -> None:
    """Refuse a source of an unknown kind, and a local one that is missing. Reads no data."""
    for source in sources:
        kind, rest = _kind(source, field)
        if kind == "local" and not Path(rest).exists() and not is_pattern(rest):
            what = "This file or folder does not exist."
            raise ConfigError(what, field=field, value=source, remedy="Check the path.")
        if kind == "package":
            _distribution(rest, field, source)
        if kind == "stdlib" and not (_stdlib() / rest).exists():
            remedy = "Name a file or folder of it, such as stdlib:json."
            raise ConfigError("The standard library has no such part.", field=field, value=source, remedy=remedy)


def find_absent(sources: Sequence[str]) -> list[str]:
    """The local sources that do not exist on this machine."""
    kinds = [(source, *_kind(source, "prepare.sources")) for source in sources]
    absent = [(source, path) for source, kind, path in kinds if kind == "local" and not Path(path).exists()]
    return [source for source, path in absent if not (is_pattern(path) and list_matches(path)[1])]


def find_remote(sources: Sequence[str]) -> list[str]:
    """The sources that lie on a store or a server."""
    return [source for source in sources if _kind(source, "prepare.sources")[0] in ("store", "http")]


def resolve(sources: Sequence[str]) -> tuple[str, ...]:
    """The sources as a recipe gets them: a local one as an absolute path, any other as it is declared."""
    kinds = [_kind(source, "prepare.sources") for source in sources]
    pairs = zip(sources, kinds, strict=True)
    return tuple(str(Path(rest).absolute()) if kind == "local" else source for source, (kind, rest) in pairs)


def fingerprints(
    sources: Sequence[str],
    *,
    root: str | Path | None = None,
    memory: Path | None = None,
    field: str = "prepare.sources",
) -> list[dict[str, str]]:
    """``[{"source": label, "digest": hex}]`` in the order given; labels of local sources are relative to `root`.

    The file `memory` remembers local digests between runs; without it every file is read. Raises ConfigError as
    `check`, and for a server that gives no ETag; StorageError where a source cannot be listed or read.
    """
    check(sources, field=field)
    known = _Memory(memory)
    found = []
    for source in sources:
        kind, rest = _kind(source, field)
        if kind == "local":
            label, digest = _label(Path(rest), root), _combine(_local_files(Path(rest), known, field=field))
        elif kind == "stdlib":
            label = f"stdlib:{rest} (Python {sys.version_info.major}.{sys.version_info.minor})"
            digest = _combine(_local_files(_stdlib() / rest, known, keep=_is_library))
        elif kind == "package":
            label, digest = f"package:{rest}", _combine(_package_files(rest, field, source))
        elif kind == "store":
            label, digest = source, _combine(_store_files(source, field))
        else:
            label, digest = source, _http_tag(source, field)
        found.append({"source": label, "digest": digest})
    known.save()
    return found


def memory(storage: str) -> Path | None:
    """The file that remembers digests of local sources, next to a local storage; else none."""
    store = Store.open(storage)
    return store.local_path("cache/sources.json") if store.is_local else None


def _kind(source: str, field: str) -> tuple[str, str]:
    if not source.strip():
        remedy = 'Name a file, a folder or a URL; "." is the spec\'s folder.'
        raise ConfigError("The name of a source is empty.", field=field, remedy=remedy)
    for prefix in ("package", "stdlib"):
        if source.startswith(f"{prefix}:") and not source.startswith(f"{prefix}://"):
            return prefix, source.partition(":")[2].strip("/")
    scheme, separator, rest = source.partition("://")
    if not separator:
        return "local", source
    if scheme in ("file", "local"):
        return "local", rest
    if scheme in ("http", "https"):
        return "http", source
    split_root(*split_url(source, field=field), field=field)  # refuses unknown schemes and malformed addresses
    return "store", source


def _combine(files: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    # Sorted, because file systems list in any order.
    for name, content in sorted(files):
        # A file's name may hold bytes that are not UTF-8.
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _label(path: Path, root: str | Path | None) -> str:
    path = path.absolute()
    if root is not None and path.is_relative_to(Path(root).absolute()):
        return path.relative_to(Path(root).absolute()).as_posix()
    return path.name


# -- local files ------------------------------------------------------------------------------------------------------


class _Memory:
    """Digests of local files, remembered by size, time of change and inode. Losing them costs only time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        self.changed = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self.entries = read_json(path, dict)

    def digest(self, path: Path) -> str:
        status = path.stat()
        marks = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = self.entries.get(str(path))
        if isinstance(entry, list) and entry[:3] == marks:
            return str(entry[3])
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        if time.time_ns() - status.st_mtime_ns > _RACY_NS:
            self.entries[str(path)] = [*marks, digest.hexdigest()]
            self.changed = True
        return digest.hexdigest()

    def save(self) -> None:
        if self.path is None or not self.changed:
            return
        with contextlib.suppress(OSError):
            make_folders(self.path.parent)
            draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            draft.write_text(json.dumps(self.entries), "utf-8")
            # In one step: pipelines that share a storage share this file.
            draft.replace(self.path)


def _local_files(
    path: Path, known: _Memory, keep: Callable[[Path], bool] = lambda _: True, *, field: str = ""
) -> Iterator[tuple[str, str]]:
    """(name relative to `path`, size and SHA-256) of a file, or of every file below a folder; links are followed."""
    try:
        if is_pattern(str(path)) and not path.exists():
            store, matches = _list_matches(str(path), field)
            path = store.local_path()
            files = [path / info.path for info in matches]
        else:
            below = (file for file in path.rglob("*") if not is_hidden(file.relative_to(path).as_posix()))
            files = [path] if path.is_file() else [file for file in below if file.is_file()]
        for file in files:
            name = file.relative_to(path)
            if keep(name):
                yield name.as_posix(), f"{file.stat().st_size} {known.digest(file)}"
    except OSError as error:
        where = str(error.filename or path)
        what = f"A source cannot be read: {error.strerror}."
        raise StorageError(what, field=where, remedy="Check its permissions.") from error


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_library(name: Path) -> bool:
    # Installed packages lie below the standard library's folder.
    return name.suffix == ".py" and name.parts[0] not in ("site-packages", "dist-packages")


def _distribution(rest: str, field: str, source: str) -> metadata.Distribution:
    from importlib import metadata

    name = rest.partition("/")[0]
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        installed = sorted({str(found.metadata["Name"]) for found in metadata.distributions()})
        near = nearest(name, installed)
        hint = f"Did you mean package:{near}?" if near else "Install it, or correct the name."
        raise ConfigError("This package is not installed.", field=field, value=source, remedy=hint) from None


def _package_files(rest: str, field: str, source: str) -> list[tuple[str, str]]:
    """Digests that the installer recorded: only files without one are read."""
    name, _, below = rest.partition("/")
    found = []
    for file in _distribution(rest, field, source).files or []:
        path = file.as_posix()
        # Byte code, scripts and the installer's records differ between installations of one version.
        volatile = path.endswith(".pyc") or path.startswith("../") or ".dist-info/" in path
        if volatile or not (path == below or path.startswith(f"{below}/" if below else "")):
            continue
        if file.hash is not None and file.hash.mode == "sha256":
            # RECORD leaves base64's padding out.
            content = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
        else:
            content = hashlib.sha256(Path(str(file.locate())).read_bytes()).hexdigest()
        found.append((path, content))
    if not found:
        what = f"The package {name} has no such files."
        raise ConfigError(what, field=field, value=source, remedy="Leave the part after '/' out.")
    return found


# -- remote ones ------------------------------------------------------------------------------------------------------


def _list_matches(source: str, field: str) -> tuple[Store, list[FileInfo]]:
    store, files = list_matches(source, field=field)
    if not files:
        what = "No file matches this pattern."
        raise ConfigError(what, field=field, value=source, remedy="Correct the pattern, or name a folder.")
    return store, files


def _store_files(source: str, field: str) -> list[tuple[str, str]]:
    scheme, path = split_url(source, field=field)
    if is_pattern(source):
        store, files = _list_matches(source, field)
    else:
        root, rest = split_root(scheme, path, field=field)
        store = Store.open(f"{scheme}://{root}", field=field)
        files = [info for info in store.list(rest) if not is_hidden(info.path.removeprefix(rest))]
    if not files:
        raise ConfigError("There is nothing at this address.", field=field, value=source, remedy="Check the URL.")
    if scheme not in _TAGGED:
        return [(info.path, f"{info.size} {store.digest(info.path)}") for info in files]
    untagged = [info.path for info in files if info.tag is None]
    if untagged:
        what = f"The store gives no content tag for {untagged[0]}."
        raise ConfigError(what, field=field, value=source, remedy="Download it to a folder and declare that.")
    return [(info.path, f"{info.size} {info.tag}") for info in files]


def _http_tag(source: str, field: str) -> str:
    request = urllib.request.Request(source, method="HEAD")  # noqa: S310 - only http and https come here
    try:
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as answer:  # noqa: S310
            tag = answer.headers.get("ETag")
            size = answer.headers.get("Content-Length", "")
    except urllib.error.HTTPError as error:
        what = f"The server answers {error.code} {error.reason}."
        raise ConfigError(what, field=field, value=source, remedy="Check the URL.") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        what = describe_outage(error) or first_line(error)
        remedy = "Check the address and the network, then run the same command again."
        raise StoreUnreachableError(f"The server cannot be reached: {what}.", field=source, remedy=remedy) from error
    if not tag:
        what = "The server gives no ETag, so a change could not be noticed."
        raise ConfigError(what, field=field, value=source, remedy="Download the file to a folder and declare that.")
    # A weak tag names the same content under another encoding: good enough to notice a change.
    return hashlib.sha256(f"{tag.removeprefix('W/')} {size}".encode()).hexdigest()
