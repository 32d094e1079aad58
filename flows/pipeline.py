"""The pipeline: prepare -> train -> evaluate -> predict -> publish.

    data ──> model ──> metrics
      │        ├─────> predictions
      └────────┴─────> hub

Each arrow is a manifest: small JSON with URLs, digests and metrics. A stage whose content key is committed and intact
is not run again; whatever died, the same call continues. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.exceptions import CancelledRun
from prefect.states import Cancelled

from flows.results import PipelineResult
from flows.run_record import Run, collect_result
from flows.spec.spec import PipelineSpec
from tasks.evaluate import evaluate
from tasks.predict import predict
from tasks.prepare_data import prepare_data
from tasks.push_to_hub import push_to_hub
from tasks.stage.progress import quiet_failures
from tasks.train import train
from trainer_lib.errors import Interrupted, TrainflowError


@flow(name="pipeline", flow_run_name="{spec.name}", persist_result=False, validate_parameters=True)
def pipeline(
    spec: PipelineSpec,
    only: str | None = None,
    start: str | None = None,
    force: list[str] | None = None,
    debug: bool = False,
) -> Any:
    """Prepare data, train, evaluate, predict and publish, each unless its result is committed already.

    Args:
        spec: the whole pipeline; every field says what it does and its unit.
        only: run this one stage; those before it must be committed.
        start: begin with this stage; those before it must be committed.
        force: stages whose committed result is discarded first.
        debug: keep the workers' run files, and show tracebacks.

    Returns:
        `PipelineResult.to_dict()`; a cancelled run ends in the state Cancelled.
    """
    try:
        with Run(spec, only=only, start=start, force=force or (), debug=debug) as run:
            data = run.stage(prepare_data, spec.prepare)
            run.check_splits(data)
            model = run.stage(train, spec.train, data=data)
            metrics = run.stage(evaluate, spec.evaluate_config(), data=data, model=model)
            run.stage(predict, spec.predict_config(), data=data, model=model)
            run.stage(push_to_hub, spec.publish, data=data, model=model, evaluation=metrics)
    except Interrupted as error:
        return Cancelled(message=error.message)
    return run.result.to_dict()


def run_pipeline(
    spec: PipelineSpec,
    *,
    only: str | None = None,
    start: str | None = None,
    force: Sequence[str] = (),
    debug: bool = False,
) -> PipelineResult:
    """Run the flow in this process and tell how it went. Prefect needs an API: see `flows.server.api.prefect_api`.

    A typed failure is not raised but held in `PipelineResult.error`, beside the stages that did complete;
    `raise_for_error` raises it. Ctrl-C and SIGTERM pass through, after the workers were stopped and MLflow was told.

    Raises:
        ConfigError: `only`, `start` or `force` name no stage.
    """
    with collect_result(spec) as collected, quiet_failures(not debug):
        try:
            pipeline(spec, only=only, start=start, force=list(force), debug=debug)
        except TrainflowError as error:
            collected.result.error = error
        except CancelledRun as error:
            collected.result.error = collected.result.error or Interrupted(str(error))
    return collected.result
