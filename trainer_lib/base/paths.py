"""Paths in the options of a recipe, relative ones from the spec's folder; folders of this user on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A URL, a source by name, or hf:name, which is a mistyped hf://.
_NO_PATH = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://|package:|stdlib:|(?i:hf):)")

Declared = Mapping[str, Any]
"""Name of an option that is a path, or a list or mapping of paths -> True; of one that holds such options -> those.

An ending (".jinja") stands for True where only values with this ending are paths, and others are names.
"""


@dataclass(frozen=True)
class PathOptions:
    """Options of a stage, and of the model's settings, that are paths; relative ones start from `folder`."""

    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def resolved(self, values: Mapping[str, Any], declared: Declared) -> dict[str, Any]:
        """The values as a recipe gets them: each path as an absolute `pathlib.Path`."""
        return map_paths(values, declared, lambda text: Path(absolute_path(text, self.folder)))


def is_path(value: Any) -> bool:
    """Whether a value is the text of a path, and not a URL or a source by name."""
    return isinstance(value, str) and bool(value) and not _NO_PATH.match(value)


def expand_home(text: str) -> Path:
    """The path with a user's home in place of `~` or `~user`; without such a user it is an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - that of Path raises where there is no such user


def absolute_path(text: str, folder: str | os.PathLike[str]) -> str:
    """A path as an absolute one: `~` stands for the home of the user, and a relative one starts from `folder`."""
    # Lexical, not resolve(): a path through a link stays the path that the user wrote.
    return os.path.normpath(Path(folder) / expand_home(text))


def map_paths(values: Mapping[str, Any], declared: Declared, convert: Callable[[str], Any]) -> dict[str, Any]:
    """A copy of the values with each declared path converted; URLs and other values stay as they are."""
    return {name: _map(value, declared.get(name), convert) for name, value in values.items()}


def _map(value: Any, declared: Any, convert: Callable[[str], Any]) -> Any:
    if not declared:
        return value
    if isinstance(value, list):
        return [_map(item, declared, convert) for item in value]
    is_whole = declared is True or isinstance(declared, str)
    if isinstance(value, Mapping):
        if is_whole:
            return {name: _map(item, declared, convert) for name, item in value.items()}
        return map_paths(value, declared, convert)
    ending = declared if isinstance(declared, str) else ""
    return convert(value) if is_whole and is_path(value) and value.endswith(ending) else value


def state_folder(name: str) -> Path:
    """The private folder `name` below ``~/.local/state/trainflow`` (or XDG_STATE_HOME), made where it is missing."""
    return _private_folder("XDG_STATE_HOME", ".local/state", name)


def cache_folder(name: str) -> Path:
    """The private folder `name` below ``~/.cache/trainflow`` (or XDG_CACHE_HOME), for what can be made again."""
    return _private_folder("XDG_CACHE_HOME", ".cache", name)


def _private_folder(variable: str, place: str, name: str) -> Path:
    folder = Path(os.environ.get(variable) or Path.home() / place, "trainflow", name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
