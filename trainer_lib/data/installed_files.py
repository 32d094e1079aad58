"""The files of the running interpreter's library and of installed packages, as sources of data."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from trainer_lib.data.row_sources import RowFile, format_of
from trainer_lib.errors import ConfigError

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_installed_files(kind: str, rest: str, formats: Mapping[str, str], *, field: str) -> list[RowFile]:
    """The files that ``stdlib:REST`` or ``package:REST`` stands for, by name; test suites are left out.

    Args:
        kind: "stdlib" or "package".
        rest: a path below the library; or a package's name, and perhaps a path below it.
        formats: ending of a file's name -> its format; other files are not taken.
        field: the setting that names the source, for errors.

    Raises:
        ConfigError: the package is not installed.
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
