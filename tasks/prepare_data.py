"""prepare-data: source data to Arrow shards with schema, row counts and content digests."""

from __future__ import annotations

import json

from tasks.configs import PrepareConfig
from tasks.stage import sources
from tasks.stage.context import StageContext
from tasks.stage.facts import PrepareFacts
from tasks.stage.keys import prepare_key
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tasks.stage.task import stage_task
from tasks.stage.worker import common_fields, launch_request
from trainer_lib.records import to_record
from trainer_lib.requests import PrepareRequest


@stage_task("prepare-data")
def prepare_data(config: PrepareConfig, context: StageContext) -> StageManifest[PrepareFacts]:
    """Prepare the splits, unless they are committed already.

    Returns:
        The stage's manifest; its facts are the splits (rows, shards, columns) and the recipe's `info`.
    """

    def work(attempt: StageAttempt) -> StageOutput:
        request = PrepareRequest(
            **common_fields(config, context, attempt),
            shard_rows=config.shard_rows,
            allow_nan=config.allow_nan,
            limit=context.limit,
            sources=sources.resolve(config.sources),
        )
        result = launch_request(request, config.launch, context, attempt)
        facts = PrepareFacts(result.splits, result.info)
        # A file of its own, so that the content digest, and with it the keys of what follows, cover `info` too.
        described = attempt.store.write_bytes("data.json", json.dumps(to_record(facts), sort_keys=True).encode())
        rows = {f"{name}_rows": split.rows for name, split in result.splits.items()}
        return StageOutput((*result.files, described), metrics=rows, facts=facts)

    # Last, although it is needed first: `work` only runs inside of `run_stage`.
    key = prepare_key(config, context)
    return run_stage(key, context, work, retries=config.retries)
