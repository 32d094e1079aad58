"""The verb *prepare*: the recipe's rows become shards on the store.

Of a recipe with `prepare_shard`, sources become parts, by one worker or by several::

    list     list_sources() -> records/sources.json; what an earlier command finished is looked at, by size
    parts    the parts that no other worker takes; returns when all are finished
    finish   files of earlier commands are read, what all parts have in common is checked, and becomes the splits

One worker does all three; where there are several, each step is a launch of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.mixture import FIELD, count_sources
from trainer_lib.data.rows.row_sources import describe_hidden
from trainer_lib.data.rows.shards import write_split
from trainer_lib.data.rows.source_parts import (
    SourceParts,
    SplitOfParts,
    check_columns,
    count_repeated_ids,
    describe_unusual,
    write_rows,
)
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.protocol.recipe_functions import vanished_source
from trainer_lib.protocol.requests import STATISTICS, PreparedSplit, PrepareRequest, PrepareResult
from trainer_lib.recipes import PrepareOutput
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import MOST_FILES
from trainer_lib.worker.process.session import Pace, Work

SOURCES = "records/sources.json"
_LIMIT = 1 << 30


def run(work: Work[PrepareRequest]) -> PrepareResult | None:
    """Write every split, on rank 0. Raises DataError for an empty split, rows that do not fit each other, NaN."""
    # The rows come from one iterator, which one process reads.
    if work.rank != 0:
        return None
    if work.recipe.is_sharded:
        if work.request.mixture:
            what = "A recipe with prepare_shard() names its sources by itself."
            remedy = "Remove the mixture, or define prepare()."
            raise ConfigError(what, field=FIELD, remedy=remedy)
        return _run_parts(work)
    request = work.request
    store = Store.open(request.output, field="storage")
    out = PrepareOutput(store, request.sources, request.mixture)
    splits: dict[str, PreparedSplit] = {}
    files: list[FileEntry] = []
    for name, rows in work.recipe.prepare(request.recipe_options(), out).items():

        def report(count: int, split: str = name) -> None:
            work.events.emit("progress", step=count, message=f"{split}: {counted(count, 'row')}")

        if request.mixture:
            rows = count_sources(rows, request.mixture, name, out.info, request.limit)
        # The recipe's rows may come from a generator, which a check reads no further, but for the sources of a mixture.
        rows = itertools.islice(rows, None if request.mixture else request.limit)
        found, written = write_split(
            store, name, rows, shard_rows=request.shard_rows, allow_nan=request.allow_nan, on_shard=report
        )
        splits[name] = from_record(PreparedSplit, found, name=name)
        files += written
    files += out.files()
    out.warnings += describe_hidden(request.sources)
    for message in out.info.get("summary", ()):
        work.events.emit("begin", message=message)
    for message in out.warnings:
        work.events.emit("warning", message=message)
    return PrepareResult(tuple(files), splits, out.checked_info(), tuple(out.warnings))


def _run_parts(work: Work[PrepareRequest]) -> PrepareResult:
    """Carry out the step that the request names, or all of them."""
    step, store = work.request.step, Store.open(work.request.output, field="storage")
    if step in ("all", "list"):
        job = _Sources(work, store, _list(work, store))
        job.parts.forget_damaged(digests=False)  # `finish` reads the files
    else:
        job = _Sources(work, store, parse_json(store.read_bytes(SOURCES, limit=_LIMIT)))
    if step in ("all", "parts"):
        job.write_parts()
    return job.finish() if step in ("all", "finish") else PrepareResult((), {}, {})


def _list(work: Work[PrepareRequest], store: Store) -> dict[str, Any]:
    request = work.request
    out = PrepareOutput(store, request.sources)
    sources = work.recipe.list_sources(request.recipe_options(), out)
    if len(sources) > MOST_FILES:
        what = f"A recipe may list up to {MOST_FILES:,} sources, each a file of the prepared data at least."
        remedy = "Let one source stand for several files: prepare_shard() reads them one after the other."
        raise DataError(what, field="list_sources", value=len(sources), remedy=remedy)
    files = [dataclasses.asdict(entry) for entry in out.files()]
    listed = {"sources": sources, "info": out.checked_info(), "files": files, "command": uuid.uuid4().hex}
    store.write_bytes(SOURCES, json.dumps(listed).encode())
    return listed


_Firsts = dict[str, tuple[int, dict[str, str]]]  # by split, the first part that has rows of it, and its columns


class _Sources:
    """The sources that a recipe has listed, and the parts that become of them. Progress is reported twice a second."""

    def __init__(self, work: Work[PrepareRequest], store: Store, listed: dict[str, Any]) -> None:
        self._work, self._request, self._store, self._listed = work, work.request, store, listed
        self._sources: list[Any] = listed["sources"]
        self._pace, self._rows, self._rows_before = Pace(), 0, 0
        self.parts = SourceParts(store, self._settings, listed["command"])

    def _settings(self, part: int) -> dict[str, Any]:
        if part >= len(self._sources):  # of an earlier, longer list
            return {}
        request = self._request
        common = {"shard_rows": request.shard_rows, "allow_nan": request.allow_nan, "limit": request.limit}
        return {"source": self._sources[part], **common}

    def write_parts(self) -> None:
        """Write the parts that no other worker takes."""
        firsts, self._rows = _Firsts(), 0
        with SharedParts(self._store, self.parts, total=len(self._sources)) as shared:
            for part in shared:
                files, splits = self._write_part(part)
                if shared.is_ours(part):  # else another worker took it for lost, and writes the same
                    self._compare_columns(firsts, part, splits)
                    self.parts.write(part, files, splits)

    def _compare_columns(self, firsts: _Firsts, part: int, splits: dict[str, Any]) -> None:
        """Compare the columns of a part with those of the first one that has rows.

        Raises DataError if they differ. Either source may be mended, so neither part is finished any more.
        """
        shown = _shown(self._sources[part])
        for name, split in splits.items():
            if not split["rows"]:
                continue
            first, expected = firsts.setdefault(name, (part, split["columns"]))
            try:
                check_columns(name, _shown(self._sources[first]), expected, shown, split["columns"])
            except DataError:
                self.parts.forget(first)
                self.parts.forget(part)
                raise

    def _write_part(self, part: int) -> tuple[list[FileEntry], dict[str, Any]]:
        request, source = self._request, self._sources[part]
        shown, total = _shown(source), len(self._sources)
        files, splits = list[FileEntry](), dict[str, Any]()

        def report(rows: int) -> None:
            self._rows = self._rows_before + rows
            if self._pace.is_due():
                message = f"source {part + 1:,} of {total:,}, {counted(self._rows, 'row')}"
                place = {"step": part + 1, "max_steps": total, "rows": self._rows}
                self._work.events.emit("progress", **place, message=message)

        try:
            for split, rows in self._work.recipe.prepare_shard(source, request.recipe_options()).items():
                self._rows_before = self._rows
                splits[split], written = write_rows(
                    self._store,
                    part,
                    split,
                    itertools.islice(rows, request.limit),
                    source=shown,
                    shard_rows=request.shard_rows,
                    allow_nan=request.allow_nan,
                    on_rows=report,
                )
                files += written
        except TrainflowError as error:
            if (vanished := vanished_source(error, shown)) is not None:
                raise vanished from error
            if f"source '{shown}" not in error.message:
                error.message = f"{error.message} (source {shown})"
            raise
        return files, splits

    def finish(self) -> PrepareResult:
        """Make the splits of all parts, in the order of the sources."""
        work, sources, listed = self._work, self._sources, self._listed
        found, lost = self._put_together(verify=True)
        if lost:
            what = "A source is" if len(lost) == 1 else f"{len(lost):,} sources are"
            message = f"{what} prepared again: files were damaged after they had been written."
            work.events.emit("warning", message=message)
            self.write_parts()
            found, lost = self._put_together(verify=False)
        if lost:
            what = "A part is missing although it was finished."
            raise DataError(what, field=self._store.url, value=_shown(sources[lost[0]]))
        _check_empty(found)
        repeated = _check_ids(self._store, found)
        statistics = {name: split.statistics for name, split in found.items()}
        written = (json.dumps(statistics, indent=1, sort_keys=True) + "\n").encode()
        described = self._store.write_bytes(STATISTICS, written)
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
        if len(files) >= MOST_FILES:  # data.json comes with them
            raise DataError(
                f"Prepared data has up to {MOST_FILES:,} files, and its sources made {len(files):,}.",
                field="prepare_shard",
                value=f"{counted(len(sources), 'source')} with {counted(len(found), 'split')}",
                remedy="Let one source stand for several files or, where a source makes several files, raise "
                "prepare.shard_rows.",
            )
        unusual = describe_unusual(statistics, {name: split.columns for name, split in found.items()}, listed["info"])
        warnings = (*describe_hidden(self._request.sources), *repeated, *unusual)
        for message in warnings:
            work.events.emit("warning", message=message)
        return PrepareResult(files, splits, listed["info"], warnings)

    def _put_together(self, *, verify: bool) -> tuple[dict[str, SplitOfParts], list[int]]:
        """The splits, and the numbers of the parts that are missing or damaged: the splits are whole without any."""
        found, lost, firsts = dict[str, SplitOfParts](), list[int](), _Firsts()
        total, expected = len(self._sources), 0
        for number, part in self.parts.read_all(verify=verify):
            if self._pace.is_due():
                message = f"source {number + 1:,} of {total:,} is put together with the others"
                self._work.events.emit("progress", message=message)
            lost += range(expected, number if part is not None else number + 1)
            expected = number + 1
            if lost or part is None:
                continue
            self._compare_columns(firsts, number, part.notes["splits"])
            files = iter(part.files)
            for name, split in part.notes["splits"].items():
                own = itertools.islice(files, len(split["lengths"]))
                found.setdefault(name, SplitOfParts()).add(split, own)
        return found, [*lost, *range(expected, total)]


def _check_empty(found: dict[str, SplitOfParts]) -> None:
    """Refuse a split that no source has rows of, as `write_split` does."""
    empty = [name for name, split in found.items() if not split.rows]
    if len(empty) == len(found):
        remedy = "Check the filters in prepare_shard(), and what list_sources() returns."
        raise DataError("All sources together have no rows.", field="prepare_shard", remedy=remedy)
    if empty:
        what = f"The split '{empty[0]}' is empty in every source."
        remedy = "Check the filters in prepare_shard(); leave the split out if it is not needed."
        raise DataError(what, field="prepare_shard", value=empty[0], remedy=remedy)


def _check_ids(store: Store, found: dict[str, SplitOfParts]) -> list[str]:
    """Look for ids in two splits, where rows have ids of their own; a sentence for each split that has an id twice."""
    if not any(split.has_own_ids for split in found.values()):
        return []
    files = {name: [entry.path for entry in split.files] for name, split in found.items()}
    counts = count_repeated_ids(store, files, sum(split.rows for split in found.values()))
    return [
        f"{counted(count, 'row')} of split '{name}' have a row_id that another row of it has."
        for name, count in counts.items()
        if count
    ]


def _shown(source: Any) -> str:
    return source if isinstance(source, str) else json.dumps(source)
