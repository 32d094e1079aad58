"""prepare-data: source data to Arrow shards with schema, row counts and content digests."""

from __future__ import annotations

import json
from dataclasses import replace

from trainer_lib.base.records import to_record
from trainer_lib.locks.shared_parts import CLAIMS
from trainer_lib.protocol.requests import PrepareRequest, PrepareResult
from trainflow.tasks.configs import PrepareConfig
from trainflow.tasks.keys import sources
from trainflow.tasks.keys.keys import prepare_key
from trainflow.tasks.keys.stage_code import code_of
from trainflow.tasks.settings import check_runner
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import common_fields, launch_on_cluster, launch_request, launch_shared


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
            mixture=() if config.mixture is None else config.mixture.names,
        )
        result = _prepare(request, config, context, attempt)
        attempt.store.delete_tree(CLAIMS)
        facts = PrepareFacts(result.splits, result.info, result.warnings)
        record = to_record(facts)
        del record["warnings"]  # about the data, and no part of it
        # A file of its own, so that the content digest, and with it the keys of what follows, cover `info` too.
        described = attempt.store.write_bytes("data.json", json.dumps(record, sort_keys=True).encode())
        rows = {f"{name}_rows": split.rows for name, split in result.splits.items()}
        return StageOutput((*result.files, described), metrics=rows, facts=facts)

    # Last, although it is needed first: `work` only runs inside of `run_stage`.
    key = prepare_key(config, context)
    return run_stage(key, context, work, retries=config.retries)


def _prepare(
    request: PrepareRequest, config: PrepareConfig, context: StageContext, attempt: StageAttempt
) -> PrepareResult:
    """Have one worker do it all or, source by source, several workers of this machine or of a cluster."""
    is_sharded = code_of(config, context).defines("prepare_shard")
    if config.runner is not None:
        check_runner(config.runner, config.launch, is_sharded=is_sharded)
    elif not is_sharded or config.launch.processes == 1:
        return launch_request(request, config.launch, context, attempt)
    alone, parts = replace(config.launch, processes=1), replace(request, step="parts")
    launch_request(replace(request, step="list"), alone, context, attempt)
    if config.runner is None:
        launch_shared(parts, config.launch, context, attempt)
    else:
        launch_on_cluster(parts, config.runner, config.launch, context, attempt)
    return launch_request(replace(request, step="finish"), alone, context, attempt)
