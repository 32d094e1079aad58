"""Files of new rows: addresses with wildcards and folders, resolved to files of known formats.

This module imports neither torch nor pyarrow, so a wrong address is refused before any worker starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

from trainer_lib.base.suggestions import counted, nearest
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.storage import FileInfo, Store, split_root, split_url

FIELD = "NEW_DATA"
FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""Ending of a file's name -> its format."""

TABLES = {**FORMATS, ".xlsx": "sheet"}  # the same, with workbooks, which the extra `excel` reads
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ONLY_NAMED = (*_PACKED[1:], ".xlsx")
"""Endings of files that are read where an address ends so; in a folder they are often the sources of its data."""
_RECORDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "COMMIT.json")
_TEXTS = ("csv", "tsv", "json lines")
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_WILD = re.compile(r"[*?\[]")
_UNLISTED = ("package", "stdlib", "http", "https")
_OF_SYSTEMS = ("__macosx", "thumbs.db", "desktop.ini")
"""Folders and files that systems leave among those of people; in lower case."""


@dataclass(frozen=True)
class RowFile:
    """A file with new rows: its folder's URL, its path below that folder, and its size in bytes."""

    url: str
    path: str
    size: int

    @property
    def address(self) -> str:
        """Its URL."""
        return f"{self.url.rstrip('/')}/{self.path}"


def packing_of(path: str) -> str:
    """The ending by which a file's name says that its text is packed, such as .gz; empty where there is none."""
    return next((ending for ending in _PACKED if path.lower().endswith(ending)), "")


def format_of(path: str, formats: Mapping[str, str] = TABLES) -> str | None:
    """The format that a file's name stands for; None for an unknown one. A text may be packed (`packing_of`)."""
    plain = path.lower().removesuffix(packing_of(path))
    found = formats.get(f".{plain.rpartition('.')[2]}") if "." in plain else None
    return None if plain != path.lower() and found not in _TEXTS else found


def find_row_files(
    addresses: Sequence[str], formats: Mapping[str, str] = TABLES, others: list[str] | None = None
) -> list[RowFile]:
    """The files that paths, URLs, folders and patterns (``s3://bucket/day=*/part-*.csv``) stand for.

    The addresses keep their order; what one of them stands for is sorted by name. `**` stands for any folders. Files
    whose ending is not in `formats` are not taken: `others` gets the paths of those in folders.

    Raises:
        ConfigError: an address stands for no file, for a file of an unknown format, or for one that another stands for.
        StorageError: a store cannot be listed.
    """
    found = [file for address in addresses for file in _resolve(address, formats, others)]
    seen: set[str] = set()
    for file in found:
        if file.address in seen:
            raise ConfigError("The file is given twice.", field=FIELD, value=file.address, remedy="Give it once.")
        seen.add(file.address)
    return found


def _resolve(address: str, formats: Mapping[str, str], others: list[str] | None) -> list[RowFile]:
    if is_pattern(address):
        store, listed = list_matches(address)
        if not (files := _find_data(store, listed, formats, address)):
            kind = "Files match this pattern, but none of a known format."
            what = kind if listed else "No file matches this pattern."
            raise ConfigError(what, field=FIELD, value=address, remedy=_formats(formats))
        return files
    folder, name = _split(address)
    store = Store.open(folder, field=FIELD)
    if name and store.exists(name):
        if format_of(name, formats) is None:
            what = "The format of this file is not known."
            raise ConfigError(what, field=FIELD, value=address, remedy=_formats(formats))
        return [RowFile(store.url, name, store.size(name))]
    below = store.child(name) if name else store
    listed = [info for info in below.list() if not is_hidden(info.path)]
    if files := _find_data(below, listed, formats, address):
        if others is not None:
            others += [info.path for info in listed if format_of(info.path, formats) is None]
        return files
    near = nearest(name, store.children()) if name and not listed else None
    raise ConfigError(
        "The folder has no files of rows."
        if listed
        else "There is no such file, and no folder with files of new rows.",
        field=FIELD,
        value=address,
        remedy=f"Did you mean {near}?" if near else _formats(formats),
    )


def is_pattern(address: str) -> bool:
    """Return whether an address has wildcards."""
    return _WILD.search(address.partition("://")[2] or address) is not None


def is_hidden(path: str) -> bool:
    """Whether a file is never data: a name in its path starts with a dot, or is one that systems write."""
    return any(name.startswith(".") or name.lower() in _OF_SYSTEMS for name in path.split("/"))


def describe_hidden(addresses: Sequence[str]) -> list[str]:
    """A sentence about the files of folders and patterns that are never data; none where there are no such files."""
    hidden: dict[str, str] = {}  # whole address -> path; sources may have files in common
    for address in addresses:
        if address.partition(":")[0] in _UNLISTED:
            continue
        with contextlib.suppress(TrainflowError):  # the recipe names a source that cannot be read
            if is_pattern(address):
                store, listed = list_matches(address, hidden=True)
            else:
                listed = (store := Store.open(address)).list()
            hidden |= {f"{store.url.rstrip('/')}/{info.path}": info.path for info in listed if is_hidden(info.path)}
    files = f"{counted(len(hidden), 'hidden file')} {'is' if len(hidden) == 1 else 'are'}"
    return [f"{files} left out, such as {min(hidden.values())}."] if hidden else []


def list_matches(address: str, *, field: str = FIELD, hidden: bool = False) -> tuple[Store, list[FileInfo]]:
    """List the files of any format that a pattern stands for, below the folder in front of its first wildcard.

    `hidden`: let wildcards stand for the names of hidden files and folders as well. Raises ConfigError, about `field`,
    if the folder's address is malformed, and StorageError if it cannot be listed.
    """
    scheme, separator, rest = address.rpartition("://")
    parts = rest.split("/")
    first = next(index for index, part in enumerate(parts) if _WILD.search(part))
    head = "/".join(parts[:first])
    store = Store.open(f"{scheme}{separator}{head}" or ("/" if rest.startswith("/") else "."), field=field)
    return store, [info for info in store.list() if _matches(info.path.split("/"), parts[first:], hidden=hidden)]


def _matches(names: Sequence[str], pattern: Sequence[str], *, hidden: bool) -> bool:
    """Whether a path's parts match a pattern's. A wildcard stands for characters of one name, `**` for folders."""
    if not pattern or not names:
        return not pattern and not names
    may_stand = hidden or not is_hidden(names[0]) or names[0] == pattern[0]
    if pattern[0] == "**":
        rest = may_stand and _matches(names[1:], pattern, hidden=hidden)
        return _matches(names, pattern[1:] or ["*"], hidden=hidden) or rest
    return may_stand and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:], hidden=hidden)


def _find_data(store: Store, listed: Sequence[FileInfo], formats: Mapping[str, str], address: str) -> list[RowFile]:
    """The listed files that hold rows: markers (_SUCCESS), and records of a commit or of `datasets`, do not."""
    folders = {folder for folder, _, name in (info.path.rpartition("/") for info in listed) if name == _RECORDS[0]}
    found = []
    for info in listed:
        folder, _, name = info.path.rpartition("/")
        is_record = name in _RECORDS or (name == "state.json" and folder in folders)
        is_unnamed = name.lower().endswith(_ONLY_NAMED) and not address.lower().endswith(_ONLY_NAMED)
        kind = format_of(info.path, formats)
        is_left_out = is_record or is_unnamed or (name.startswith("_") and kind != "image")
        if kind is not None and not is_left_out:
            found.append(RowFile(store.url, info.path, info.size))
    return found


def _split(address: str) -> tuple[str, str]:
    if address.startswith("hf://") and not split_root(*split_url(address, field=FIELD), field=FIELD)[1]:
        return address, ""  # a whole repository: nothing above it is a folder
    head, slash, name = address.rstrip("/").rpartition("/")
    if not slash:
        return ".", name
    return ("/", name) if not head else (address, "") if head.endswith(":/") else (head, name)


def _formats(formats: Mapping[str, str]) -> str:
    return f"The name of a file ends in {', '.join(formats)}; texts may be packed ({', '.join(_PACKED)})."


def find_installed_files(kind: str, rest: str, formats: Mapping[str, str], *, field: str) -> list[RowFile]:
    """The files that ``stdlib:REST`` or ``package:REST`` stands for, by name; test suites are left out.

    `rest` is a path below the library; or a package's name, and perhaps a path below it. Files whose ending is not in
    `formats` are not taken. Raises ConfigError, about `field`, if the package is not installed.
    """
    if kind == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        below = root / rest
        paths = [Path(rest)] if below.is_file() else [Path(rest, name) for name in sorted(_walk(below))]
    else:
        name, _, inner = rest.partition("/")
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            remedy = "Install it, or name another one."
            raise ConfigError("This package is not installed.", field=field, value=name, remedy=remedy) from None
        root = Path(str(distribution.locate_file("")))
        paths = sorted(Path(str(file)) for file in distribution.files or () if str(file).startswith(inner))
    kept = [path for path in paths if format_of(path.name, formats) and not _LEFT_OUT & set(path.parts)]
    return [RowFile(str(root), path.as_posix(), (root / path).stat().st_size) for path in kept]


def _walk(root: Path) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        # Not entered: site-packages has many times the files of the library.
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in files)
