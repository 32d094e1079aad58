"""prepare-data: source data to Arrow shards with schema, row counts and content digests."""

from __future__ import annotations

import json
from typing import Any

from tasks.configs import PrepareConfig
from tasks.stage.keys import prepare_key
from tasks.stage.runner import StageContext, StageOutput, run_stage
from tasks.stage.sources import memory
from tasks.stage.task import stage_task
from tasks.stage.worker import entries, run_verb


@stage_task("prepare-data")
def prepare_data(
    config: PrepareConfig,
    *,
    recipe: str,
    storage: str,
    root: str | None = None,
    force: bool = False,
    debug: bool = False,
) -> dict[str, Any]:
    """Prepare the splits, unless they are committed already.

    Args:
        recipe: path of the recipe's Python file; `config.recipe` comes before it.
        storage: the pipeline's storage root.
        root: where the recipe's imports start; None: found from the recipe.
        force: discard a committed result.

    Returns:
        The stage's manifest; its `meta` holds `splits` (name -> rows, shards, columns) and `info`.
    """

    def work(context: StageContext) -> StageOutput:
        result = run_verb(
            "prepare",
            context,
            config.launch,
            recipe=config.recipe or recipe,
            root=root,
            options=config.options,
            tracking=None,
            debug=debug,
            shard_rows=config.shard_rows,
            allow_nan=config.allow_nan,
        )
        facts = {"splits": result["splits"], "info": result["info"]}
        # A file of its own, so that the content digest, and with it the keys of what follows, cover `info` too.
        described = context.store.write_bytes("data.json", json.dumps(facts, sort_keys=True).encode())
        rows = {f"{name}_rows": int(split["rows"]) for name, split in result["splits"].items()}
        return StageOutput([*entries(result["files"]), described], metrics=rows, meta=facts)

    key = prepare_key(config, recipe, root, memory=memory(storage))
    return run_stage(key, storage, work, retries=config.retries, force=force)
