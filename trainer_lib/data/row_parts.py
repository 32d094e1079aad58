"""Where predictions and the sums of metrics lie, and which of them are finished. Imports neither torch nor pyarrow."""

from __future__ import annotations

from trainer_lib.data.parts import NumberedParts
from trainer_lib.storage import Store

FOLDER = "predictions"
SUMS = "sums"
ERROR = "error"
"""Column with what is wrong with a row, where bad rows are allowed."""


def numbered_parts(store: Store, key: str, file_format: str) -> NumberedParts:
    """The files of the predictions below `store`; a file that was made under another key is not one of them."""
    return NumberedParts(store, FOLDER, file_format, lambda part: {"key": key, "part": part})


def split_parts(store: Store, split: str, *, rows: int, rows_per_file: int) -> NumberedParts:
    """The files with a split's predictions below a stage's folder; each holds a fixed range of the rows."""
    return NumberedParts(
        store, f"{FOLDER}/{split}", "parquet", lambda part: {"rows": list(row_range(part, rows, rows_per_file))}
    )


def sum_parts(store: Store, split: str, *, rows: int, rows_per_range: int) -> NumberedParts:
    """The files with what each range of a split's rows adds to the sums of its metrics, while it is evaluated."""
    return NumberedParts(
        store, f"{SUMS}/{split}", "json", lambda part: {"rows": list(row_range(part, rows, rows_per_range))}
    )


def row_range(part: int, rows: int, rows_per_file: int) -> tuple[int, int]:
    """The rows [start, stop) of a part of so many rows."""
    start = part * rows_per_file
    return start, min(start + rows_per_file, rows)
