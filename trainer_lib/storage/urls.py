"""Check the URL of a store and a path inside a store, and name the files there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from trainer_lib.base.paths import expand_home
from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL = {"file", "local"}
_PATH_BYTES, _NAME_BYTES = 1024, 255
HUB = "hf"
_REVISION = r"@(?:refs/convert/\w+|refs/pr/\d+|[^/]+)"  # a slash elsewhere is written %2F
_KINDS = "(?:datasets|models|spaces|buckets)/"
_REPOSITORY = re.compile(rf"((?:{_KINDS})?(?!{_KINDS})[^/@]+/[^/@*?\[]+(?:{_REVISION})?)(?:/(.*))?")


def split_url(url: str | os.PathLike[str], *, field: str) -> tuple[str, str]:
    """Return the scheme and the path of a URL; ``("file", absolute path)`` for every way to write a local one.

    Raises ConfigError for one that is chained (``::``), has an unknown scheme, credentials or a query, or no bucket.
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        remedy = "Give a path or a URL like s3://bucket/name."
        raise ConfigError("A storage URL is empty or not text.", field=field, remedy=remedy)
    # fsspec reads "a::b" as a file inside another file system.
    if "::" in text:
        remedy = "Give the store's own URL."
        raise ConfigError("Chained URLs are not supported.", field=field, value=text, remedy=remedy)
    match = _SCHEME.match(text)
    scheme = match.group(1).lower() if match else "file"
    rest = text[match.end() :] if match else text
    if scheme in _LOCAL:
        if match and not rest.startswith("/"):
            remedy = f"Write file:///{rest} for an absolute path, or leave the scheme out for a relative one."
            raise ConfigError("A file:// URL needs an absolute path.", field=field, value=text, remedy=remedy)
        # Not resolved: a path through a link stays as the user wrote it.
        return "file", str(expand_home(rest).absolute())
    from fsspec.registry import known_implementations, registry

    if scheme not in known_implementations and scheme not in registry:
        near = nearest(scheme, sorted(known_implementations))
        hint = f"Did you mean {near}://? " if near else ""
        remedy = f"{hint}Use a local path, s3://, gs:// or another scheme that fsspec knows."
        raise ConfigError(f"Unknown URL scheme {scheme!r}.", field=field, value=text, remedy=remedy)
    if "@" in rest.split("/", 1)[0] or "?" in rest or "#" in rest:  # an "@" further on is part of a name
        what = f"A {scheme}:// URL must not carry credentials, a query or a fragment: URLs are logged and kept."
        remedy = "Give credentials and endpoints through the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."
        raise ConfigError(what, field=field, remedy=remedy)  # without the value, which may hold a password
    parts = [part for part in rest.split("/") if part]
    if not parts or ".." in parts or "." in parts:
        remedy = f"Write {scheme}://bucket/folder."
        raise ConfigError("The URL names no bucket or has '..' in it.", field=field, value=text, remedy=remedy)
    return scheme, "/".join(parts)


def split_root(scheme: str, path: str, *, field: str) -> tuple[str, str]:
    """A remote path's bucket, or on the Hub its repository with the revision, and the path below that."""
    if scheme != HUB:
        bucket, _, rest = path.partition("/")
        return bucket, rest
    match = _REPOSITORY.fullmatch(path)
    if match is None:
        what = "The address names no repository on the Hub."
        remedy = "Write hf://datasets/organisation/name/file, or …/name@revision/file."
        raise ConfigError(what, field=field, value=f"{scheme}://{path}", remedy=remedy)
    return match[1], match[2] or ""


def checked_address(address: str, *, field: str, unset: str) -> str:
    """The address of a server, such as ``http://host:9000``, from the environment variable `field`. Raises ConfigError.

    `unset` says what is used without it. A client would refuse another form much later and in its own words.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remedy = f"Write http://host:port or https://host, or unset it for {unset}."
        raise ConfigError("This is not the address of a server.", field=field, value=address, remedy=remedy)
    return address


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, halves of surrogate pairs


def relative_problem(rel: str) -> str | None:
    """Return why `rel` must not be used as a path inside a store; None when it is plain and stays inside.

    Refused are empty and absolute paths, ``.``, ``..``, empty parts, backslashes, NUL and other control characters,
    lone surrogates (UTF-8 cannot encode them), and paths longer than disks and object stores allow.
    """
    if not isinstance(rel, str) or not rel:
        return "is empty"
    if rel.startswith("/"):
        return "is absolute"
    if "\\" in rel:
        return "has a backslash"
    if _UNPRINTABLE.search(rel):
        return "has a control character or half a surrogate pair"
    if any(part in ("", ".", "..") for part in rel.split("/")):
        return "has an empty part, '.' or '..'"
    if len(rel.encode()) > _PATH_BYTES or any(len(part.encode()) > _NAME_BYTES for part in rel.split("/")):
        return f"is longer than {_PATH_BYTES} bytes, or a part of it than {_NAME_BYTES}"
    return None


def checked(rel: str, *, root_too: bool = False) -> str:
    """Return `rel` if it is safe inside a store (``""`` only if `root_too`); raise ConfigError if it is not."""
    if root_too and rel == "":
        return rel
    problem = relative_problem(rel)
    if problem:
        raise ConfigError(f"A path inside a store {problem}.", value=rel, remedy="Use a plain relative path.")
    return rel


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: its path relative to the store, size in bytes, SHA-256 in hexadecimal digits."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """A file as a store lists it: its path relative to the store, size in bytes.

    `tag` identifies the content without reading it (an ETag or a checksum of the store); None where the store has none.
    """

    path: str
    size: int
    tag: str | None = None
