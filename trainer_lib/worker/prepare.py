"""The verb *prepare*: the recipe's rows become shards on the store."""

from __future__ import annotations

from itertools import islice

from trainer_lib.base.records import from_record
from trainer_lib.base.suggestions import counted
from trainer_lib.data.row_sources import describe_hidden
from trainer_lib.data.shards import SplitWriter
from trainer_lib.protocol.requests import PreparedSplit, PrepareRequest, PrepareResult
from trainer_lib.recipes import PrepareOutput
from trainer_lib.storage import FileEntry, Store
from trainer_lib.worker import prepare_parts
from trainer_lib.worker.session import Work


def run(work: Work[PrepareRequest]) -> PrepareResult | None:
    """Write every split, on rank 0.

    Raises:
        DataError: an empty split, rows that do not fit each other, NaN.
    """
    # The rows come from one iterator, which one process reads.
    if work.rank != 0:
        return None
    if work.recipe.is_sharded:
        return prepare_parts.run(work)
    request = work.request
    store = Store.open(request.output, field="storage")
    out = PrepareOutput(store, request.sources)
    splits: dict[str, PreparedSplit] = {}
    files: list[FileEntry] = []
    for name, rows in work.recipe.prepare(request.recipe_options(), out).items():

        def report(count: int, split: str = name) -> None:
            work.events.emit("progress", step=count, message=f"{split}: {counted(count, 'row')}")

        writer = SplitWriter(
            store,
            name,
            shard_rows=request.shard_rows,
            allow_nan=request.allow_nan,
            on_shard=report,
        )
        # The recipe's rows may come from a generator, which a check reads no further.
        splits[name] = from_record(PreparedSplit, writer.write(islice(rows, request.limit)), name=name)
        files += writer.files
    files += out.files()
    out.warnings += describe_hidden(request.sources)
    for message in out.warnings:
        work.events.emit("warning", message=message)
    return PrepareResult(tuple(files), splits, out.checked_info(), tuple(out.warnings))
