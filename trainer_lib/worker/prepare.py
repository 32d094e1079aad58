"""The verb *prepare*: the recipe's rows become shards on the store."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer_lib.data.shards import SplitWriter
from trainer_lib.recipes import PrepareOutput
from trainer_lib.storage import FileEntry, Store
from trainer_lib.worker.session import Work


def run(work: Work) -> dict[str, Any]:
    """Write every split. Returns files, splits, info as the request's protocol says.

    Raises:
        DataError: an empty split, rows that do not fit each other, NaN.
    """
    if work.rank != 0:
        return {}
    request = work.request
    store = Store.open(request["output"], field="storage")
    out = PrepareOutput(store)
    splits: dict[str, Any] = {}
    files: list[FileEntry] = []
    for name, rows in work.recipe.prepare(request["options"], out).items():

        def report(count: int, split: str = name) -> None:
            work.events.emit("progress", step=count, message=f"{split}: {count:,} rows")

        writer = SplitWriter(
            store,
            name,
            shard_rows=int(request.get("shard_rows", 10_000)),
            allow_nan=bool(request.get("allow_nan", False)),
            on_shard=report,
        )
        splits[name] = writer.write(rows)
        files += writer.files
    files += out.files()
    return {"files": [dataclasses.asdict(entry) for entry in files], "splits": splits, "info": out.checked_info()}
