"""The columns of a Parquet file as numbers, for comparisons."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.storage import Store


def read_columns(store: Store, path: str) -> dict[str, np.ndarray[Any, Any] | list[Any]]:
    """Read every column: numbers flat, as `[values]` of float64; anything else as it is.

    Raises:
        StorageError: the file cannot be read.
    """
    with store.open_read(path) as stream:
        table = pq.read_table(cast(Any, stream))
    return {name: _values(table.column(name)) for name in table.column_names}


def _values(column: Any) -> np.ndarray[Any, Any] | list[Any]:
    array = column.combine_chunks()
    kind = array.type
    flat = array
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        flat = flat.flatten()
        kind = flat.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float64)
    return list(array.to_pylist())
