"""Sweeps from Python and in the lists of runs: trials of one parent in MLflow, early ends, what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

import trainflow
from tests.support.command import trainflow as command
from tests.support.sweeps import SLOW_RECIPE, sweep_project
from trainer_lib.errors import ConfigError

EVALUATED = ("train.eval_split=test", "train.args.eval_strategy=steps", "train.args.eval_steps=1")


def test_a_sweep_with_early_ends_is_one_parent_with_its_trials(tmp_path: Path, prefect_server: str) -> None:
    path = sweep_project(tmp_path, recipe=SLOW_RECIPE, tracked=True)
    pruned = ("sweep.pruner=asha", "train.args.max_steps=24", "sweep.sampler=grid", "sweep.trials=")
    space = "sweep.space={train.args.learning_rate: [1.0, 1.0e-4, 2.0e-4]}"
    spec = trainflow.Spec.load(path, *EVALUATED, *pruned, space)
    sweep = spec.sweep(progress=False)

    table = sweep.trials
    assert list(table["state"]) == ["complete", "pruned", "pruned"]
    assert list(table["train.args.learning_rate"]) == [1.0, 1e-4, 2e-4]
    assert (table["steps"][1:] < 24).all()
    assert sweep.best == [0]
    assert sweep.run().metrics["value"]["test_error"] == table["test_error"][0]
    assert trainflow.Spec.load(sweep.spec_file()).why()["hit"][["prepare-data", "train", "evaluate"]].all()
    page = sweep.report()
    assert "Best trial: 0" in page
    assert "eval_error by evaluation" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing is loaded from anywhere"
    assert "sandbox" in sweep._repr_html_()

    client = MlflowClient(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    [experiment] = [each for each in client.search_experiments() if each.name == "toy"]
    runs = client.search_runs([experiment.experiment_id])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 3
    assert parent.info.run_id == sweep.result.mlflow_run_id
    assert parent.data.tags["trainflow.sweep.best_trial"] == "0"
    ended = {run.data.tags["trainflow.trial"]: run.data.tags.get("trainflow.pruned") for run in children}
    assert ended["0"] is None
    assert "better than eval_error" in str(ended["1"])
    assert sweep.run().mlflow_run_id in [run.info.run_id for run in children]

    listed = command("runs", "--storage", tmp_path / "store")
    assert "and 2 more: trainflow runs --sweep sweep" in listed.out
    trials = json.loads(command("runs", "--storage", tmp_path / "store", "--sweep", "sweep", "--json").out)["runs"]
    assert sorted((each["trial"], each["state"]) for each in trials) == [
        ("0", "finished"),
        ("1", "pruned"),
        ("2", "pruned"),
    ]


def test_a_metric_that_does_not_come_out_ends_the_sweep_after_one_trial(tmp_path: Path, prefect_server: str) -> None:
    spec = trainflow.Spec.load(sweep_project(tmp_path), "sweep.objective=train_los")
    with pytest.raises(ConfigError, match="Did you mean 'train_loss'"):
        spec.sweep(progress=False)
    # Nothing has come of it, so the corrected spec takes the study over, and the training is there already.
    corrected = trainflow.Spec.load(tmp_path / "pipeline.yaml", "sweep.objective=train_loss", "sweep.trials=1")
    assert list(corrected.sweep(progress=False).trials["state"]) == ["complete"]
    assert len(list((tmp_path / "store" / "stages" / "train").iterdir())) == 1
