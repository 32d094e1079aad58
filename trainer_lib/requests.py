"""What the orchestrator asks a worker for, and what the worker answers. Both ends import this module.

No torch and no pydantic is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_lib.storage import FileEntry


@dataclass(frozen=True)
class PreparedSplit:
    """One split as prepare-data leaves it.

    Attributes:
        rows: number of rows.
        shards: paths of its Arrow files below the stage's folder, in the order of the rows.
        columns: name -> type of each column.
    """

    rows: int
    shards: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedData:
    """Prepared data as a request carries it: where it lies, what it is, and every file with its digest."""

    url: str
    splits: dict[str, PreparedSplit]
    info: dict[str, Any]
    files: tuple[FileEntry, ...]
