"""The verb *prepare* for a recipe with `prepare_shard`: each source becomes a part, by one worker or by several.

    list     list_sources() -> records/sources.json; what an earlier run finished is looked at
    parts    the parts that no other worker takes; returns when all are finished
    finish   what all parts have in common is checked, and becomes the splits

One worker does all three; where there are several, each step is a launch of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from typing import Any

from trainer_lib.data.row_id_check import count_repeated_ids
from trainer_lib.data.source_parts import SourceParts, check_same_columns, write_rows
from trainer_lib.data.statistics import merge
from trainer_lib.errors import DataError, TrainflowError
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.recipes import PrepareOutput
from trainer_lib.requests import PreparedSplit, PrepareRequest, PrepareResult
from trainer_lib.storage import FileEntry, Store
from trainer_lib.worker.events import QUIET_S
from trainer_lib.worker.session import Work

SOURCES = "records/sources.json"
STATISTICS = "statistics.json"
_LIMIT = 1 << 30


def run(work: Work[PrepareRequest]) -> PrepareResult:
    """Carry out the step that the request names, or all of them.

    Raises:
        DataError: no sources, an empty split, rows or columns that do not fit each other, an id in two splits.
    """
    step, store = work.request.step, Store.open(work.request.output, field="storage")
    if step in ("all", "list"):
        listed = _list(work, store)
        _parts_of(work, store, listed["sources"]).forget_damaged(len(listed["sources"]))
    else:
        listed = json.loads(store.read_bytes(SOURCES, limit=_LIMIT))
    parts = _parts_of(work, store, listed["sources"])
    if step in ("all", "parts"):
        _write_parts(work, store, listed["sources"], parts)
    return _finish(work, store, listed, parts) if step in ("all", "finish") else PrepareResult((), {}, {})


def _list(work: Work[PrepareRequest], store: Store) -> dict[str, Any]:
    request = work.request
    out = PrepareOutput(store, request.sources)
    sources = work.recipe.list_sources(request.recipe_options(), out)
    files = [dataclasses.asdict(entry) for entry in out.files()]
    listed = {"sources": sources, "info": out.checked_info(), "files": files}
    store.write_bytes(SOURCES, json.dumps(listed).encode())
    return listed


def _parts_of(work: Work[PrepareRequest], store: Store, sources: list[Any]) -> SourceParts:
    request = work.request
    common = {"shard_rows": request.shard_rows, "allow_nan": request.allow_nan, "limit": request.limit}
    return SourceParts(store, lambda part: {"source": sources[part], **common})


def _write_parts(work: Work[PrepareRequest], store: Store, sources: list[Any], parts: SourceParts) -> None:
    report = _Report(work, len(sources))
    with SharedParts(store, parts, total=len(sources)) as shared:
        for part in shared:
            splits = _write_part(work, store, part, sources[part], report)
            if shared.is_ours(part):  # else another worker took it for lost, and writes the same
                parts.write(part, splits)


def _write_part(work: Work[PrepareRequest], store: Store, part: int, source: Any, report: _Report) -> dict[str, Any]:
    request = work.request
    shown = _shown(source)
    splits = {}
    try:
        for split, rows in work.recipe.prepare_shard(source, request.recipe_options()).items():
            report.begin(part)
            written = write_rows(
                store,
                part,
                split,
                itertools.islice(rows, request.limit),
                source=shown,
                shard_rows=request.shard_rows,
                allow_nan=request.allow_nan,
                on_rows=report.rows,
            )
            if written is not None:
                splits[split] = written
    except TrainflowError as error:
        if f"source '{shown}" not in error.message:
            error.message = f"{error.message} (source {shown})"
        raise
    return splits


class _Report:
    """Progress of one worker, twice a second at the most."""

    def __init__(self, work: Work[PrepareRequest], total: int) -> None:
        self._events = work.events
        self._total = total
        self._part = self._before = self._now = 0
        self._reported = 0.0

    def begin(self, part: int) -> None:
        """Begin with a split of a part."""
        self._before, self._now, self._part = self._before + self._now, 0, part

    def rows(self, count: int) -> None:
        """Note the rows of this split so far."""
        self._now, now = count, time.monotonic()
        if now - self._reported >= QUIET_S:
            self._reported = now
            rows = self._before + count
            message = f"source {self._part + 1:,} of {self._total:,}, {rows:,} rows"
            self._events.emit("progress", step=self._part + 1, max_steps=self._total, rows=rows, message=message)


def _finish(work: Work[PrepareRequest], store: Store, listed: dict[str, Any], parts: SourceParts) -> PrepareResult:
    """Make the splits of all parts, in the order of the sources."""
    names: dict[str, None] = {}
    records = []
    for part, source in enumerate(listed["sources"]):
        record = parts.read(part)
        if record is None:
            raise DataError("A part is missing although it was finished.", field=store.url, value=_shown(source))
        records.append((_shown(source), record))
        names.update(dict.fromkeys(record))
    if not names:
        raise DataError(
            "All sources together have no rows.",
            field="prepare_shard",
            remedy="Check the filters in prepare_shard(), and what list_sources() returns.",
        )
    found = {name: [(source, record[name]) for source, record in records if name in record] for name in names}
    _check_ids(work, store, found)
    statistics = {name: merge(part["statistics"] for _, part in each) for name, each in found.items()}
    described = store.write_bytes(STATISTICS, (json.dumps(statistics, indent=1, sort_keys=True) + "\n").encode())
    splits = {
        name: PreparedSplit(
            rows=sum(part["rows"] for _, part in each),
            shards=tuple(entry["path"] for _, part in each for entry in part["files"]),
            columns=check_same_columns(name, [(source, part["columns"]) for source, part in each]),
            lengths=tuple(length for _, part in each for length in part["lengths"]),
        )
        for name, each in found.items()
    }
    data = [FileEntry(**entry) for each in found.values() for _, part in each for entry in part["files"]]
    files = (*data, *(FileEntry(**entry) for entry in listed["files"]), described)
    return PrepareResult(files, splits, listed["info"])


def _check_ids(work: Work[PrepareRequest], store: Store, found: dict[str, list[tuple[str, dict[str, Any]]]]) -> None:
    """Look for ids in two splits, where rows have ids of their own: ours are different by their making."""
    if not any(part["own_ids"] for each in found.values() for _, part in each):
        return
    files = {name: [entry["path"] for _, part in each for entry in part["files"]] for name, each in found.items()}
    rows = sum(part["rows"] for each in found.values() for _, part in each)
    for name, count in count_repeated_ids(store, files, rows).items():
        if count:
            message = f"{count:,} rows of split '{name}' have a row_id that another row of it has."
            work.events.emit("warning", message=message)


def _shown(source: Any) -> str:
    return source if isinstance(source, str) else json.dumps(source)
