"""`trainflow follow` beside a training, and a sweep: stopped, killed and started again, nothing is done twice."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.command import engine, running, trainflow
from tests.support.launched import wait_until
from tests.support.mlflow_store import fresh_store, points
from tests.support.sweeps import SLOW_RECIPE, attempts, checkpoints, sweep_project
from tests.support.toy import RECIPE, project
from trainer_lib.errors import Interrupted
from trainflow.flows.records.results import flat_metrics

SLOW = RECIPE.replace(
    "        def forward(self, x, labels=None):\n",
    "        def forward(self, x, labels=None):\n"
    "            import os, time\n"
    "            time.sleep(float(os.environ.get('STEP_S', '0')) if self.training else 0)\n",
)
# The error shrinks, so by this measure the first checkpoint stays the best, and only its mark keeps it from rotation.
SPEC = """
name: toy
recipe: recipe.py
storage: store
prepare:
  launch: {kind: process, processes: 1}
train:
  eval_split: test
  args:
    seed: 1
    max_steps: 12
    global_batch_size: 8
    learning_rate: 5e-2
    save_steps: 2
    save_total_limit: 2
    metric_for_best_model: error
    greater_is_better: true
  launch: {kind: process, processes: 1, threads: 1}
evaluate: {enabled: false}
predict: {enabled: false}
publish: {enabled: false}
"""
# What `trainflow run` does with these stages, without an engine: prepared data, a run's record and sign of life, train.
TRAINING = """
import json, sys
from dataclasses import asdict, replace
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.prepare_data import prepare_data
from trainflow.tasks.keys.keys import train_key
from trainflow.tasks.tracking.mlflow_run import open_run
from trainflow.tasks.train import train
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

spec = load_spec(sys.argv[1], sys.argv[2:])
plan, storage = Plan.of(spec), Store.open(spec.storage)
tracked = open_run(spec.tracking, storage, name="toy", pipeline_key="k" * 64, params={}, resume=False)
context = replace(plan.context, tracking=None if tracked is None else tracked.handle)
data = prepare_data.fn(spec.prepare, context)
record = {"name": "toy", "status": "RUNNING", "started": "2026-11-22T10:00:00Z"}
record["worked_in"] = {"train": train_key(spec.train, context, data).digest}
record["tracked_run"] = None if tracked is None else tracked.handle.token
run = storage.child("runs", "toy")
run.write_bytes("alive/1.json", json.dumps({"holder": asdict(Holder.this_process(30.0))}).encode())
run.write_bytes("run.json", json.dumps(record).encode())
train.fn(spec.train, context, data)
if tracked is not None:
    tracked.finish("FINISHED")
run.write_bytes("run.json", json.dumps({**record, "status": "FINISHED"}).encode())
"""
MEASURED = re.compile(r"^step (\d+): eval_error", re.MULTILINE)
EVERY = ("--every", "0.2")
PATIENCE_S = 120


def test_a_training_is_followed_through_a_stop_and_a_kill(tmp_path: Path) -> None:
    spec = project(tmp_path / "project", recipe=SLOW, spec=SPEC)
    uri = fresh_store(tmp_path / "project" / "store")
    (program := tmp_path / "training.py").write_text(TRAINING)
    with running(spec, log=tmp_path / "training.log", program=program, env={"STEP_S": "1.0"}) as training:
        with running("follow", spec, *EVERY, log=tmp_path / "0.log") as follower:
            follower.wait_for("is kept.", PATIENCE_S)
            assert follower.stop(signal.SIGTERM) == 19
            assert "Traceback" not in follower.output
            stopped = follower.output
        with running("follow", spec, *EVERY, log=tmp_path / "1.log") as follower:
            follower.wait_for("step 2: eval_error", PATIENCE_S)
            follower.process.kill()
            follower.process.wait(PATIENCE_S)
            killed = follower.output
        with running("follow", spec, *EVERY, log=tmp_path / "2.log") as follower:
            assert training.process.wait(PATIENCE_S) == 0, training.output
            assert follower.process.wait(PATIENCE_S) == 0, follower.output
            last = follower.output
    assert "The training is committed." in last
    # Each once, oldest first, whatever was killed in between; the last one is committed when training ends.
    steps = [int(step) for step in MEASURED.findall(stopped + killed + last)]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (2, 12)

    [stage] = (tmp_path / "project" / "store" / "stages" / "train").iterdir()
    records = [json.loads(path.read_text()) for path in (stage / "follow").glob("*.json")]
    errors = {record["step"]: record["metrics"]["eval_error"] for record in records}
    assert sorted(errors) == steps
    assert max(errors, key=lambda step: errors[step]) == 2
    # The training kept two, of which the best is one, and at most the one that was read just then.
    kept = {path.name for path in (stage / "checkpoints").iterdir()}
    assert kept >= {"checkpoint-2", "checkpoint-12"}
    assert len(kept) <= 3
    [token] = (tmp_path / "project" / "store" / "spool").glob("*/*.run")
    run_id = json.loads(token.read_text())["run_id"]
    assert points(uri, run_id, "eval/error") == sorted(errors.items())


@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    slots = ("sweep.parallel=2", "sweep.runner=processes")
    spec = sweep_project(tmp_path / "project", recipe=SLOW_RECIPE)
    storage = tmp_path / "project" / "store"
    with engine(tmp_path / "prefect") as env:
        for stop in (signal.SIGINT, signal.SIGKILL):
            there = checkpoints(storage)
            with running("sweep", spec, *slots, log=tmp_path / f"{stop}.log", env=env) as command:
                wait_until(lambda there=there: checkpoints(storage) > there, 120)  # type: ignore[misc]
                if stop == signal.SIGKILL:
                    command.process.kill()
                    continue
                assert command.stop(timeout=90) == Interrupted.exit_code, command.output
                assert "running work is saved first" in command.output
                assert "The same command continues: trainflow sweep" in command.output
                assert not any("" in ends for ends in attempts(storage).values()), "every attempt came to an end"
        done = trainflow("sweep", spec, *slots, "--json", env=env)
        assert done.code == 0, done.out + done.err
        result = json.loads(done.out)
        assert [trial["state"] for trial in result["trials"]] == ["complete"] * 4
        assert result["wanted"] == 4

        by_training = attempts(storage)
        assert len(by_training) == 4, "a killed trial goes on with its own values"
        assert all(ends.count("committed") == 1 and ends[-1] == "committed" for ends in by_training.values())
        interrupted = [ends for ends in by_training.values() if len(ends) > 1]
        assert interrupted, "a kill met a training"
        assert len(list((storage / "stages" / "prepare-data").iterdir())) == 1

        [best] = result["best"]
        assert min(trial["objective"] for trial in result["trials"]) == result["trials"][best]["objective"]
        again = trainflow("run", storage / "sweeps" / "toy-sweep" / "best.yaml", "--json", env=env)
        assert again.code == 0, again.err
        stages = {stage["stage"]: stage for stage in json.loads(again.out)["stages"]}
        assert [stages[name]["status"] for name in ("prepare-data", "train", "evaluate", "predict")] == [
            *["cached"] * 3,
            "ran",
        ]
        reached = flat_metrics(stages["evaluate"]["manifest"]["metrics"])["test_error"]
        assert [reached] == result["trials"][best]["objective"]
        unchanged = trainflow("sweep", spec, "--json", env=env)
        assert json.loads(unchanged.out)["trials"] == result["trials"], "nothing is left to do"
