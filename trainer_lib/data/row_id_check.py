"""Whether two splits have a row in common, by its id, in memory that does not grow with the number of rows.

Ids go to files by their remainder, so that equal ones meet in one file, and one file at a time is in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer_lib.data.columns import ROW_ID
from trainer_lib.errors import DataError
from trainer_lib.storage import Store

IDS_AT_ONCE = 4_000_000  # 32 MB
_SHOWN = 3


def count_repeated_ids(store: Store, files: Mapping[str, Iterable[str]], rows: int) -> dict[str, int]:
    """Check that no id is in two splits; return, by split, how many ids are there more than once.

    Args:
        store: the stage's folder.
        files: split -> paths of its Arrow files.
        rows: of all splits together.

    Raises:
        DataError: an id is in two splits: what the model is measured on was trained on.
    """
    buckets = -(-rows // IDS_AT_ONCE)
    repeated = dict.fromkeys(files, 0)
    with tempfile.TemporaryDirectory(prefix="trainflow-ids-") as name:
        folder = Path(name)
        for number, paths in enumerate(files.values()):
            for ids in _read_many(store, paths):
                _sort_out(folder, number, ids, buckets)
        for bucket in range(buckets):
            found = [_load(folder, bucket, number) for number in range(len(files))]
            unique = [np.unique(ids) for ids in found]
            for split, ids, once in zip(files, found, unique, strict=True):
                repeated[split] += len(ids) - len(once)
            for (split, ids), (other, others) in itertools.combinations(zip(files, unique, strict=True), 2):
                if len(shared := np.intersect1d(ids, others, assume_unique=True)):
                    raise _leak(split, other, shared)
    return repeated


def _read_many(store: Store, paths: Iterable[str]) -> Iterator[npt.NDArray[np.int64]]:
    """The ids of many files, as many at a time as memory holds: small files are not sorted out one by one."""
    held: list[npt.NDArray[np.int64]] = []
    count = 0
    for path in paths:
        held.append(_read_ids(store, path))
        count += len(held[-1])
        if count >= IDS_AT_ONCE:
            yield np.concatenate(held)
            held, count = [], 0
    if held:
        yield np.concatenate(held)


def _read_ids(store: Store, path: str) -> npt.NDArray[np.int64]:
    with store.open_read(path) as stream:
        schema = pa.ipc.open_file(stream).schema
        only = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(ROW_ID)])
        stream.seek(0)
        column = pa.ipc.open_file(stream, options=only).get_batch(0).column(0)
        if pa.types.is_integer(column.type):
            ids: npt.NDArray[np.int64] = column.to_numpy()
            return ids.copy()
        digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in column.to_pylist())
        return np.frombuffer(b"".join(digests), np.int64)


def _sort_out(folder: Path, split: int, ids: npt.NDArray[np.int64], buckets: int) -> None:
    places = ids % buckets
    order = np.argsort(places, kind="stable")
    found, starts = np.unique(places[order], return_index=True)
    for bucket, some in zip(found, np.split(ids[order], starts[1:]), strict=True):
        with _file(folder, int(bucket), split).open("ab") as file:
            file.write(some.tobytes())


def _load(folder: Path, bucket: int, split: int) -> npt.NDArray[np.int64]:
    path = _file(folder, bucket, split)
    return np.fromfile(path, np.int64) if path.exists() else np.empty(0, np.int64)


def _file(folder: Path, bucket: int, split: int) -> Path:
    return folder / f"{bucket}-{split}"


def _leak(split: str, other: str, shared: npt.NDArray[np.int64]) -> DataError:
    shown = ", ".join(str(number) for number in shared[:_SHOWN])
    return DataError(
        f"Rows with the same row_id are in the splits '{split}' and '{other}' (such as {shown}).",
        field="prepare_shard",
        value=shown,
        remedy="Give each row to one split, for example by a digest of its id.",
    )
