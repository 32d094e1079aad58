"""The storage that a command or a call means when none was named: that of the working directory."""

from __future__ import annotations

from pathlib import Path

from flows.spec.spec import storage_of


def storage_here() -> str | None:
    """The storage of pipeline.yaml in the working directory, else .trainflow there; None: it has neither.

    Raises:
        ConfigError: the file is not a spec.
    """
    if Path("pipeline.yaml").is_file():
        return storage_of("pipeline.yaml")
    return ".trainflow" if Path(".trainflow").is_dir() else None
