"""A sweep whose slots Prefect shows: a flow with a task for each trial, and limits that trials take their turn in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.spec.spec import load_spec
from flows.sweeps.sweeping import run_sweep
from tests.support.sweeps import SLOW_RECIPE, sweep_project
from trainer_lib.errors import ConfigError

SPACE = "sweep.space={train.args.learning_rate: [0.1, 0.2], train.args.weight_decay: [0.0, 0.1]}"
WORDS = (SPACE, "sweep.sampler=grid", "sweep.trials=", "sweep.parallel=2", "sweep.runner=prefect")


@pytest.mark.timeout(300)
def test_each_trial_is_a_task_and_takes_its_turn_in_a_limit(
    tmp_path: Path, prefect_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    # A rate that is no number of steps fails in training alone: of four trials one is to fail.
    recipe = SLOW_RECIPE.replace(
        "def build_model(options, data):",
        "def build_model(options, data):\n    if options.get('width') == 13:\n        raise ValueError('unlucky')",
    )
    space = "sweep.space={train.model.width: [1, 2, 13]}"
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="one-training", limit=1))
    events: list[Any] = []
    spec = load_spec(sweep_project(tmp_path, recipe=recipe), (*WORDS, space, "sweep.limits=one-training"))
    result = run_sweep(spec, listener=events.append)
    result.raise_for_error()

    at_work: list[int] = []
    for event in events:
        if event["event"] == "progress" and event["trial"] not in at_work:
            assert not at_work, "two trials shared a limit of one"
            at_work.append(event["trial"])
        elif event["event"] == "ended" and event["trial"] in at_work:
            at_work.remove(event["trial"])
    assert {"event": "waiting", "for": "one-training"}.items() <= next(
        event for event in events if event["event"] == "waiting"
    ).items()

    [run] = _sweeps(f"{spec.name}-sweep")
    assert (run.state.name, run.parameters["sweep"]["space"]) == ("Completed", {"train.model.width": [1, 2, 13]})
    tasks = _tasks(run)
    assert sorted(tasks) == ["trial-0", "trial-1", "trial-2"]
    for trial in result.trials:
        state = tasks[f"trial-{trial.number}"]
        if trial.state == "failed":
            assert (state.name, "unlucky" in state.message) == ("Failed", True)
        else:
            assert trial.objective is not None
            assert (state.name, state.message) == ("Completed", f"test_error {trial.objective[0]:.4g}")
    assert [trial.state for trial in result.trials].count("failed") == 1
    assert "Task run" not in capfd.readouterr().err, "Prefect's log is for its page"


def test_a_limit_that_prefect_does_not_know_is_refused(tmp_path: Path, prefect_server: str) -> None:
    spec = load_spec(sweep_project(tmp_path), (*WORDS, "sweep.limits=gpus"))
    with pytest.raises(ConfigError, match=r"(?s)no global concurrency limit.*prefect gcl create gpus"):
        run_sweep(spec)
    assert not (tmp_path / "store" / "stages").exists()


def _sweeps(name: str) -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter

    flow = FlowFilter.model_validate({"name": {"any_": ["sweep"]}})
    named = FlowRunFilter.model_validate({"name": {"any_": [name]}})
    with get_client(sync_client=True) as client:
        return list(client.read_flow_runs(flow_filter=flow, flow_run_filter=named))


def _tasks(run: Any) -> dict[str, Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}))
    return {task.name: task.state for task in found}
