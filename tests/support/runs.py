"""Runs of the toy pipeline inside the test's own process, and what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainflow.flows.records.results import PipelineResult
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.stages import all_stages

# Prefect, and with it trainflow.flows.pipeline, reads the environment when it is imported: only inside functions, after
# the sandbox of tests/conftest.py is in place.

IN_PROCESS = ("prepare.launch=in_process", "train.launch=in_process")
# Those that a spec has on without saying so: a further stage may be off by default.
ALL = {stage.name for stage in all_stages() if stage.is_enabled(PipelineSpec(name="all", recipe="recipe.py"))}


def spec_of(folder: Path, *overrides: str) -> PipelineSpec:
    return load_spec(folder / "pipeline.yaml", (*IN_PROCESS, *overrides))


def run(folder: Path, *overrides: str, **how: Any) -> PipelineResult:
    from trainflow.flows.pipeline import run_pipeline
    from trainflow.tasks.stage import manifest

    manifest._verified.clear()  # as in a new process
    return run_pipeline(spec_of(folder, *overrides), **how)


def succeeded(folder: Path, *overrides: str, **how: Any) -> PipelineResult:
    """The result of a run without an error."""
    (result := run(folder, *overrides, **how)).raise_for_error()
    return result


def ran(result: PipelineResult) -> set[str]:
    return {outcome.stage for outcome in result.stages if outcome.status == "ran"}


def reason(result: PipelineResult, stage: str) -> str:
    outcome = result.outcome(stage)
    assert outcome is not None
    return outcome.reason


def broken(folder: Path, old: str, new: str) -> int:
    """Edit the recipe of a project, and return the line of what was edited."""
    recipe = folder / "recipe.py"
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def newest_flow_run() -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        [newest] = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    return newest


def newest_state() -> str:
    """Return the name of the state of the flow run that started last."""
    return str(newest_flow_run().state_name)


def artifacts_of(flow_run_id: Any) -> dict[str, Any]:
    """Return the artifacts that Prefect's server has of a flow run: key -> artifact."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {str(each.key): each for each in client.read_artifacts(artifact_filter=wanted)}


def only_folder(folder: Path) -> Path:
    [found] = [path for path in folder.iterdir() if path.is_dir()]
    return found


def publication_of(folder: Path) -> Path:
    """The published revision of a project that has run once."""
    return only_folder(only_folder(folder / "store" / "hub") / "revisions")


def run_of(folder: Path) -> Path:
    """The folder of the run of a project that has run once."""
    return only_folder(folder / "store" / "runs")
