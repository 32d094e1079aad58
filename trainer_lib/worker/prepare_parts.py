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

from trainer_lib.commit import MOST_FILES
from trainer_lib.data.row_id_check import count_repeated_ids
from trainer_lib.data.source_parts import SourceParts, SplitOfParts, write_rows
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
    if len(sources) > MOST_FILES:
        raise DataError(
            f"A recipe may list up to {MOST_FILES:,} sources, each a file of the prepared data at least.",
            field="list_sources",
            value=len(sources),
            remedy="Let one source stand for several files: prepare_shard() reads them one after the other.",
        )
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
    sources, found = listed["sources"], dict[str, SplitOfParts]()
    expected = 0
    for part, record in parts.read_all():
        if part != expected or record is None:
            break
        for name, split in record.items():
            found.setdefault(name, SplitOfParts(name)).add(_shown(sources[part]), split)
        expected += 1
    if expected < len(sources):
        what = "A part is missing although it was finished."
        raise DataError(what, field=store.url, value=_shown(sources[expected]))
    if not found:
        raise DataError(
            "All sources together have no rows.",
            field="prepare_shard",
            remedy="Check the filters in prepare_shard(), and what list_sources() returns.",
        )
    _check_ids(work, store, found)
    statistics = {name: split.statistics for name, split in found.items()}
    described = store.write_bytes(STATISTICS, (json.dumps(statistics, indent=1, sort_keys=True) + "\n").encode())
    splits = {
        name: PreparedSplit(
            rows=split.rows,
            shards=tuple(entry.path for entry in split.files),
            columns=split.columns,
            lengths=tuple(split.lengths),
        )
        for name, split in found.items()
    }
    data = [entry for split in found.values() for entry in split.files]
    files = (*data, *(FileEntry(**entry) for entry in listed["files"]), described)
    return PrepareResult(files, splits, listed["info"])


def _check_ids(work: Work[PrepareRequest], store: Store, found: dict[str, SplitOfParts]) -> None:
    """Look for ids in two splits, where rows have ids of their own: ours are different by their making."""
    if not any(split.has_own_ids for split in found.values()):
        return
    files = {name: [entry.path for entry in split.files] for name, split in found.items()}
    for name, count in count_repeated_ids(store, files, sum(split.rows for split in found.values())).items():
        if count:
            message = f"{count:,} rows of split '{name}' have a row_id that another row of it has."
            work.events.emit("warning", message=message)


def _shown(source: Any) -> str:
    return source if isinstance(source, str) else json.dumps(source)
