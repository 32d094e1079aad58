"""Prepared data, source by source: the rows of one source are one part, whose bytes depend on nothing else.

    data/<split>/000007-00000.arrow       rows of source 7; a part has a file for every `shard_rows` rows of a split
    records/parts/000000/00000007.json    written last: the part is finished; its files, columns and statistics

Rows without ids of their own get ``source << 32 | row``, so ids keep the order of sources and rows.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer_lib.base.suggestions import nearest
from trainer_lib.data.rows.columns import ROW_ID, Schema
from trainer_lib.data.rows.parts import Part, Parts
from trainer_lib.data.rows.shards import check_split_name, to_arrow_file
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

# Statistics of prepared columns that can be merged: those of many parts, in any grouping, are those of the whole.
#
# scalar number     rows, min, max, sum few values        counts, up to 100 different ones: the distribution of labels
# list, text        rows, and the fewest, most and sum of elements (of characters)


MAX_VALUES = 100
Statistics = dict[str, dict[str, Any]]  # column -> name of the statistic -> value, plain JSON


def describe(batch: pa.RecordBatch) -> Statistics:
    """The statistics of a record batch ``[rows]``, at least one row."""
    return {field.name: _describe_column(batch.column(field.name)) for field in batch.schema}


def merge(many: Iterable[Statistics]) -> Statistics:
    """The statistics of all rows together."""
    merged: Statistics = {}
    for part in many:
        for name, found in part.items():
            merged[name] = _merge_two(merged[name], found) if name in merged else dict(found)
    return merged


def _describe_column(column: pa.Array) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": len(column)}
    kind = column.type
    if pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        is_list = pa.types.is_large_list(kind)
        sizes = pc.list_value_length(column) if is_list else pc.binary_length(column)
        ends = pc.min_max(sizes)
        found |= {"shortest": ends["min"].as_py(), "longest": ends["max"].as_py(), "elements": pc.sum(sizes).as_py()}
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        ends = pc.min_max(column)
        # An integer's sum as one: the float's would depend on the order of merging.
        found |= {"min": ends["min"].as_py(), "max": ends["max"].as_py(), "sum": pc.sum(column).as_py()}
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_large_string(kind):
        values = pc.value_counts(column)
        if len(values) <= MAX_VALUES:
            counts = {str(pair["values"]): int(pair["counts"]) for pair in values.to_pylist()}
            found["counts"] = dict(sorted(counts.items()))
    return found


def _merge_two(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    rules: dict[str, Callable[[Any, Any], Any]] = {"min": min, "shortest": min, "max": max, "longest": max}
    common = [name for name in one if name in other]
    merged = {name: rules.get(name, operator.add)(one[name], other[name]) for name in common if name != "counts"}
    if "counts" in common:
        counts = Counter(one["counts"]) + Counter(other["counts"])
        if len(counts) <= MAX_VALUES:
            merged["counts"] = dict(sorted(counts.items()))
    return merged


ID_BITS = 32


class SourceParts(Parts):
    """The finished parts of one job.

    Files are compared with their digests once, before the commit, and only those that an earlier command wrote: a
    digest of what this one writes is made of the bytes themselves.
    `command` names this command, for all of its workers alike.
    """

    def __init__(self, store: Store, settings: Callable[[int], Mapping[str, Any]], command: str = "") -> None:
        super().__init__(store, "parts", settings)
        self._command = command

    def write(self, part: int, files: Sequence[FileEntry], splits: Mapping[str, Any]) -> None:
        """Record that a part is finished, with the facts and the files of its splits, in one order."""
        self.record(part, files, {"command": self._command, "splits": splits})

    def read_all(self, *, verify: bool = False) -> Iterator[tuple[int, Part | None]]:
        """The numbers and the records of finished parts, in order, read some at a time.

        `verify`: read the files of earlier commands; a part that is not intact comes as None and loses its record.
        """
        return self.look_at_all(self._verify if verify else self.read)

    def _verify(self, part: int) -> Part | None:
        found = self.read(part)
        if found is not None and found.notes["command"] != self._command:
            found = self.find(part, digests=True)
        if found is None:
            self.forget(part)
        return found


def write_rows(
    store: Store,
    part: int,
    split: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    source: str,  # as text, for errors
    shard_rows: int,
    allow_nan: bool,
    on_rows: Callable[[int], None],  # called with the number of rows so far
) -> tuple[dict[str, Any], list[FileEntry]]:
    """Write the rows that a source has of a split, perhaps none; return what the part's record has of it, and files.

    Raises DataError for a row without the type of the source's first ones, and for NaN and infinite values.
    """
    check_split_name(split)
    rows_left = iter(rows)
    entries: list[FileEntry] = []
    lengths: list[int] = []
    statistics: Statistics = {}
    schema, has_ids, rows_so_far = None, False, 0
    for number in itertools.count():
        if not (chunk := list(itertools.islice(rows_left, shard_rows))):
            break
        if schema is None:
            schema = Schema.infer(chunk, f"{split}', source '{source}")
            has_ids = ROW_ID in chunk[0]
        batch = schema.batch(chunk, rows_so_far, allow_nan=allow_nan, first_id=(part << ID_BITS) + rows_so_far)
        # One write, so that a killed run leaves a whole file or none.
        entries.append(store.write_bytes(f"data/{split}/{part:06d}-{number:05d}.arrow", to_arrow_file(batch)))
        lengths.append(len(chunk))
        rows_so_far += len(chunk)
        statistics = merge([statistics, describe(batch)])
        on_rows(rows_so_far)
    facts = {"rows": rows_so_far, "lengths": lengths, "own_ids": has_ids, "statistics": statistics}
    return {**facts, "columns": {} if schema is None else schema.to_texts()}, entries


@dataclass
class SplitOfParts:
    """A split put together from the records of its parts, one after the other; it keeps no record."""

    rows: int = 0  # of all parts so far
    files: list[FileEntry] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # rows of the files
    columns: dict[str, str] = field(default_factory=dict)  # what all parts have
    statistics: Statistics = field(default_factory=dict)
    has_own_ids: bool = False  # rows of some part came with ids

    def add(self, part: Mapping[str, Any], files: Iterable[FileEntry]) -> None:
        """Add what a part has of the split; one without rows changes nothing."""
        if not part["rows"]:
            return
        self.columns = dict(part["columns"])
        self.rows += part["rows"]
        self.files += files
        self.lengths += part["lengths"]
        self.statistics = merge([self.statistics, part["statistics"]])
        self.has_own_ids |= part["own_ids"]


def check_columns(split: str, first: str, expected: Mapping[str, str], source: str, found: Mapping[str, str]) -> None:
    """Compare the columns of a source with those of the first one, both as name -> type.

    Raises DataError if they differ; the error names the column, both sources and the name that was probably meant.
    """
    for name in {**expected, **found}:
        if expected.get(name) == found.get(name):
            continue
        there, here = (types.get(name) or "no such column" for types in (expected, found))
        others = sorted(expected.keys() - found.keys()) if name not in expected or name not in found else []
        meant = [(ours, near) for ours in sorted(found.keys() - expected.keys()) if (near := nearest(ours, others))]
        hint = f'Did you mean "{meant[0][1]}" by the column "{meant[0][0]}" of {source}? ' if meant else ""
        what = f"The sources of split '{split}' differ in column '{name}': {there} in {first}, {here} in {source}."
        remedy = f"{hint}Give every source the same columns and types: float(x), or an array with its dtype."
        raise DataError(what, field="prepare_shard", value=source, remedy=remedy)


IDS_AT_ONCE = 4_000_000  # 32 MB
_SHOWN = 3


def count_repeated_ids(store: Store, files: Mapping[str, Iterable[str]], rows: int) -> dict[str, int]:
    """Check that no id is in two splits; return, by split, how many ids are there more than once.

    Ids are compared a bucket of remainders at a time, so memory does not grow with their number: the files' columns of
    ids are read once for a bucket. `files`: split -> paths of its Arrow files; `rows`: of all splits together. Raises
    DataError for an id in two splits: what the model is measured on was trained on.
    """
    buckets = -(-rows // IDS_AT_ONCE)
    paths, repeated = {split: list(some) for split, some in files.items()}, dict.fromkeys(files, 0)
    for bucket in range(buckets):
        unique: dict[str, npt.NDArray[np.int64]] = {}
        for split, some in paths.items():
            ids = np.concatenate([_read_ids(store, path, buckets, bucket) for path in some] or [np.empty(0, np.int64)])
            unique[split] = np.unique(ids)
            repeated[split] += len(ids) - len(unique[split])
        for split, other in itertools.combinations(unique, 2):
            if len(shared := np.intersect1d(unique[split], unique[other], assume_unique=True)):
                shown = ", ".join(map(str, shared[:_SHOWN].tolist()))
                what = f"Rows with the same row_id are in the splits '{split}' and '{other}' (such as {shown})."
                remedy = "Give each row to one split, for example by a digest of its id."
                raise DataError(what, field="prepare_shard", value=shown, remedy=remedy)
    return repeated


def _read_ids(store: Store, path: str, buckets: int, bucket: int) -> npt.NDArray[np.int64]:
    """The ids of a file that are in a bucket; of texts their digests."""
    with store.open_read(path) as stream:
        schema = pa.ipc.open_file(stream).schema
        only = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(ROW_ID)])
        stream.seek(0)
        column = pa.ipc.open_file(stream, options=only).get_batch(0).column(0)
        if pa.types.is_integer(column.type):
            ids: npt.NDArray[np.int64] = column.to_numpy()
        else:
            digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in column.to_pylist())
            ids = np.frombuffer(b"".join(digests), np.int64)
        chosen: npt.NDArray[np.int64] = ids[ids % buckets == bucket]
        return chosen


# -- statistics that may show a mistake -------------------------------------------------------------------------------

_COMPARED = ("label", "labels", "class", "target")  # columns whose values are compared between splits
MOST = 10  # warnings that are given
_CLASSES = 5  # that one warning names
_ROWS = 5.0  # that a split would have of a class if its rows were drawn like the others': fewer may be chance
_APART = 0.2  # share of rows that have another label, beyond what chance makes
_INTEGERS = ("int", "uint")


def describe_unusual(
    statistics: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Mapping[str, str]], info: Mapping[str, Any]
) -> list[str]:
    """Sentences about what may be a mistake in the data, at most `MOST` and one that counts the others.

    Statistics and types are by split and column; `info` is what the recipe notes: its `max_length` is the number of
    tokens that the model reads of a row.
    """
    texts = [*_list_long_rows(statistics, columns, info.get("max_length"))]
    for column in _COMPARED:
        counts = {
            name: split[column]["counts"] for name, split in statistics.items() if "counts" in split.get(column, {})
        }
        texts += _compare_labels(column, counts)
    left = len(texts) - MOST
    return texts if left <= 0 else [*texts[:MOST], f"{left:,} more warnings of this kind are left out."]


def _list_long_rows(
    statistics: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Mapping[str, str]], most: object
) -> Iterator[str]:
    if not isinstance(most, int) or isinstance(most, bool):
        return
    for split, found in statistics.items():
        for name, stats in found.items():
            # Of integers only: texts are counted in characters, and lists of other numbers are no tokens.
            is_tokens = columns.get(split, {}).get(name, "").startswith(_INTEGERS)
            if is_tokens and stats.get("longest", 0) > most:
                yield (
                    f"The longest row of split '{split}' has {stats['longest']:,} values in column '{name}', and the "
                    f"recipe's max_length is {most:,}."
                )


def _compare_labels(column: str, counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Compare the splits with `train`, or with the largest one where none has that name."""
    first = "train" if "train" in counts else max(counts, key=lambda name: sum(counts[name].values()), default=None)
    if first is None:
        return
    most = sum(counts[first].values())
    shares = {value: rows / most for value, rows in counts[first].items()}
    if unknown := {value for own in counts.values() for value in own} - shares.keys():
        yield f"Split '{first}' has no row whose '{column}' is {_name_some(unknown)}, and another split has."
    for name, own in counts.items():
        rows = sum(own.values())
        absent = {value: share for value, share in shares.items() if value not in own and share * rows >= _ROWS}
        if absent:
            yield (
                f"Split '{name}' has no row whose '{column}' is {_name_some(absent)}, and "
                f"{_percent(sum(absent.values()))} of the rows of '{first}' have."
            )
            continue
        apart = {value: own.get(value, 0) / rows - shares.get(value, 0.0) for value in {**shares, **own}}
        chance = 0.8 * math.sqrt(len(apart) / min(rows, most))  # twice what is to be expected of equal splits
        if sum(map(abs, apart.values())) / 2 > _APART + chance:
            value = max(apart, key=lambda label: (abs(apart[label]), label))
            yield (
                f"Labels are distributed differently in split '{name}': '{column}' is {value} in "
                f"{_percent(own.get(value, 0) / rows)} of its rows, and in {_percent(shares.get(value, 0.0))} of "
                f"those of '{first}'."
            )


def _name_some(found: Iterable[str]) -> str:
    values = sorted(found)
    more = len(values) - _CLASSES
    if more > 0:
        return f"{', '.join(values[:_CLASSES])} or one of {more:,} more"
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
