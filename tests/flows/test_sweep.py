"""Sweeps from Python, in the lists of runs and in Prefect: one parent, early ends, limits, what a mistake says."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

import trainflow
from tests.support import toy
from tests.support.command import command_words
from tests.support.command import trainflow as command
from tests.support.pages import blocks
from tests.support.prefect_server import wait_for
from tests.support.runs import IN_PROCESS
from tests.support.sweeps import SLOW_RECIPE, attempts, sweep_project
from trainer_lib.errors import ConfigError, GateError
from trainer_lib.launch.settings.gpu_selection import num_cores
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.sweeps.sweep_result import SweepResult
from trainflow.flows.sweeps.sweeping import run_as_flow, run_sweep

EVALUATED = ("train.eval_split=test", "train.args.eval_strategy=steps", "train.args.eval_steps=1")
SHIFTED_RECIPE = toy.RECIPE.replace("y = self.linear(x)", "y = self.linear(x) + self.shift").replace(
    "self.linear = torch.nn.Linear(1, 1)",
    'self.linear, self.shift = torch.nn.Linear(1, 1), options["shift"]\n'
    "            torch.nn.init.zeros_(self.linear.weight)",
)
SHIFTED_RECIPE += "\n\ndef sizes(p):\n    return float(abs(p.predictions).mean())\n"
SHIFTED_RECIPE = SHIFTED_RECIPE.replace("p.label_ids).mean())}", 'p.label_ids).mean()), "size": sizes(p)}')


def test_a_sweep_with_early_ends_is_one_parent_with_its_trials(tmp_path: Path, prefect_server: str) -> None:
    path = sweep_project(tmp_path, recipe=SLOW_RECIPE, tracked=True)
    pruned = ("sweep.pruner=asha", "train.args.max_steps=24", "sweep.sampler=grid", "sweep.trials=")
    space = "sweep.space={train.args.learning_rate: [1.0, 1.0e-4, 2.0e-4]}"
    required = ("register.name=toy-line", "register.metric=test_error", "evaluate.require={test_error: '< 1'}")
    spec = trainflow.Spec.load(path, *EVALUATED, *pruned, space, *required)
    sweep = spec.sweep(progress=False)

    trials = sweep.trials
    assert [trial.state for trial in trials] == ["complete", "pruned", "pruned"]
    assert [trial.values["train.args.learning_rate"] for trial in trials] == [1.0, 1e-4, 2e-4]
    assert all(trial.notes["steps"] < 24 for trial in trials[1:])
    assert sweep.best == [0]
    best = trainflow.Run(trials[0].notes["run"], storage=sweep.storage)
    assert trials[0].objective == (best.metrics["value"]["test_error"],)
    assert trainflow.Spec.load(sweep.best_specs[0]).why()["hit"][["prepare-data", "train", "evaluate"]].all()
    page = Path(str(sweep.report_url)).read_text()
    assert "Best trial: 0" in page
    assert "eval_error by evaluation" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing is loaded from anywhere"

    client = MlflowClient(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    [experiment] = [each for each in client.search_experiments() if each.name == "toy"]
    runs = client.search_runs([experiment.experiment_id])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 3
    assert parent.info.run_id == sweep.mlflow_run_id
    assert parent.data.tags["trainflow.sweep.best_trial"] == "0"
    ended = {run.data.tags["trainflow.trial"]: run.data.tags.get("trainflow.pruned") for run in children}
    assert ended["0"] is None
    assert "better than eval_error" in str(ended["1"])
    assert best.mlflow_run_id in [run.info.run_id for run in children]

    _check_promotion(spec, sweep, client)
    recorded = json.loads(command("runs", "--storage", tmp_path / "store", "--sweep", "sweep", "--json").out)["runs"]
    assert {each["trial"]: each["state"] for each in recorded} == {"0": "finished", "1": "pruned", "2": "pruned"}
    assert len(recorded) == 3


def _check_promotion(spec: trainflow.Spec, sweep: SweepResult, client: MlflowClient) -> None:
    """The best spec passes the gate and is registered, which no trial is; one that requires more is held back."""
    assert client.search_registered_models() == []
    held = trainflow.Spec.load(sweep.best_specs[0], "evaluate.require={test_error: '< 0'}")
    with pytest.raises(GateError, match="must be < 0"):
        held.run(progress=False)
    assert client.search_registered_models() == []
    # As docs/python.md shows it.
    [shown] = [block.text for block in blocks("python.md") if ".sweep()" in block.text]
    exec(
        shown.replace('trainflow.Spec.load("pipeline.yaml")', "spec"),
        {"trainflow": trainflow, "spec": spec, "pandas": pandas},
    )
    best = trainflow.Run("last", storage=spec.storage)
    champion = client.get_model_version_by_alias("toy-line", "champion")
    assert champion.run_id == best.mlflow_run_id


@pytest.mark.timeout(600)
def test_of_several_objectives_those_trials_are_best_that_none_beats_in_everything(
    tmp_path: Path, prefect_server: str
) -> None:
    path = sweep_project(tmp_path, recipe=SHIFTED_RECIPE, tracked=True)
    # A line that learns fits better and says larger numbers; one that is shifted is worse in both.
    space = "sweep.space={train.args.learning_rate: [1.0e-4, 0.3], train.model.shift: [0, 9]}"
    several = ("sweep.objective=[test_error, test_size]", "sweep.direction=[minimize, minimize]")
    words = (space, *several, "sweep.sampler=grid", "sweep.trials=", "train.args.weight_decay=0")
    sweep = trainflow.Spec.load(path, *words).sweep(progress=False)
    errors, sizes = zip(*(trial.objective or () for trial in sweep.trials), strict=True)
    assert sweep.best == [0, 2]
    folder = tmp_path / "store" / "sweeps" / "toy-sweep"
    assert sorted(each.name for each in folder.glob("best*.yaml")) == ["best-0.yaml", "best-2.yaml"]
    assert errors[2] < errors[0]
    assert sizes[0] < sizes[2]
    page = Path(str(sweep.report_url)).read_text()
    assert page.count("Not beaten:") == 2
    pictures = [f"{what} {name}" for name in sweep.objective for what in ("History of", "Importance for", "Values and")]
    assert [title for title in ("Best compromises", *pictures) if f"<h3>{title}</h3>" not in page] == []
    client = MlflowClient(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    parent = client.get_run(str(sweep.mlflow_run_id))
    assert parent.data.tags["trainflow.sweep.best_trials"] == "0, 2"
    assert "trainflow.sweep.best_trial" not in parent.data.tags

    # None of them is promoted by itself; who chooses one runs its spec, and finds the training there.
    assert sorted(sweep.best_specs) == [0, 2]
    chosen = trainflow.Spec.load(sweep.best_specs[2])
    assert chosen.why()["hit"][["prepare-data", "train", "evaluate"]].all()
    assert chosen.run().metrics["value"]["test_error"] == errors[2]


def test_a_metric_that_does_not_come_out_ends_the_sweep_after_one_trial(tmp_path: Path, prefect_server: str) -> None:
    # What after_evaluate measures is known only when it runs.
    recipe = f"{toy.RECIPE}\n\ndef after_evaluate(model, data, options):\n    return {{'metrics': {{'slope': 2.0}}}}\n"
    spec = trainflow.Spec.load(sweep_project(tmp_path, recipe=recipe), "sweep.objective=overall_slop")
    with pytest.raises(ConfigError, match="Did you mean 'overall_slope'"):
        spec.sweep(progress=False)
    # Nothing has come of it, so the corrected spec takes the study over, and the training is there already.
    corrected = trainflow.Spec.load(tmp_path / "pipeline.yaml", "sweep.objective=train_loss", "sweep.trials=1")
    assert [trial.state for trial in corrected.sweep(progress=False).trials] == ["complete"]
    assert len(list((tmp_path / "store" / "stages" / "train").iterdir())) == 1


def test_slots_share_the_cores_and_one_that_dies_is_replaced(
    tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    recipe = toy.RECIPE.replace("def compute_metrics(p):", "def compute_metrics(p):\n    import torch").replace(
        "p.label_ids).mean())}", 'p.label_ids).mean()), "threads": torch.get_num_threads()}'
    )
    words = ("sweep.objective=test_threads", "sweep.trials=2", "sweep.parallel=2", "evaluate.launch=process")
    spec = trainflow.Spec.load(sweep_project(tmp_path, recipe=recipe), *words, *IN_PROCESS)
    events: list[Mapping[str, Any]] = []

    def kill_one(event: Mapping[str, Any]) -> None:
        events.append(event)
        if [each["event"] for each in events].count("began") == 1 and event["event"] == "began":
            children = psutil.Process().children()
            next(child for child in children if "trainflow.flows.sweeps.trial_slot" in command_words(child)).kill()

    result = run_sweep(spec.settings, listener=kill_one)
    result.raise_for_error()
    assert [each["message"] for each in events if each["event"] == "warning"] == [
        "A slot ended (code -9); another takes its place."
    ]
    assert [each.objective for each in result.trials] == [(max(1, num_cores() // 2),)] * 2
    assert all(ends.count("committed") == 1 for ends in attempts(tmp_path / "store").values())


# -- slots that Prefect shows ------------------------------------------------------------------------------------------

SPACE = "sweep.space={train.model.width: [1, 2, 13]}"
# The model of one of the widths cannot be built.
UNLUCKY_RECIPE = SLOW_RECIPE.replace(
    "def build_model(options, data):",
    "def build_model(options, data):\n    if options.get('width') == 13:\n        raise ValueError('unlucky')",
)
WORDS = (SPACE, "sweep.sampler=grid", "sweep.trials=", "sweep.parallel=2", "sweep.runner=prefect")


def _flow_run(spec: PipelineSpec) -> FlowRunFilter:
    assert spec.sweep is not None
    return FlowRunFilter.model_validate({"name": {"any_": [f"{spec.name}-{spec.sweep.name}"]}})


@pytest.mark.timeout(300)
def test_each_trial_is_a_task(tmp_path: Path, prefect_server: str, capfd: pytest.CaptureFixture[str]) -> None:
    spec = load_spec(sweep_project(tmp_path, recipe=UNLUCKY_RECIPE), (*WORDS, *IN_PROCESS))
    result = run_sweep(spec)
    result.raise_for_error()
    with get_client(sync_client=True) as client:
        [run] = client.read_flow_runs(flow_run_filter=_flow_run(spec))
        tasks = {each.name: each.state for each in client.read_task_runs(flow_run_filter=_flow_run(spec))}
    assert run.state is not None
    assert (run.state.name, run.parameters["sweep"]["space"]) == ("Completed", {"train.model.width": [1, 2, 13]})
    assert sorted(tasks) == ["trial-0", "trial-1", "trial-2"]
    for trial in result.trials:
        state: Any = tasks[f"trial-{trial.number}"]
        if trial.state == "failed":
            assert (state.name, "unlucky" in state.message) == ("Failed", True)
        else:
            assert trial.objective is not None
            assert (state.name, state.message) == ("Completed", f"test_error {trial.objective[0]:.4g}")
    assert [trial.state for trial in result.trials].count("failed") == 1
    assert "Task run" not in capfd.readouterr().err, "Prefect's log is for its page"


def test_a_trial_that_ends_before_its_task_runs_has_ended_for_the_server(tmp_path: Path, prefect_server: str) -> None:
    spec = load_spec(sweep_project(tmp_path), (SPACE, "sweep.name=lost", "sweep.parallel=1"))
    assert spec.sweep is not None

    def work(trials: Any) -> str:
        slots = [SimpleNamespace(number=number) for number in range(2)]
        for slot in slots:
            trials(slot, {"event": "began", "trial": slot.number, "values": {}})
        trials(slots[1], {"event": "lost"})  # one task at a time runs: this one waits for the first
        time.sleep(0.5)
        trials(slots[0], {"event": "lost"})
        return ""

    run_as_flow(spec, spec.sweep, work, debug=False)

    def states() -> list[str]:
        with get_client(sync_client=True) as client:
            return [task.state_name or "" for task in client.read_task_runs(flow_run_filter=_flow_run(spec))]

    wait_for("the ends of both tasks", lambda: states() == ["Crashed"] * 2)
