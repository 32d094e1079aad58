"""`trainflow follow` beside a real training: stopped, killed and started again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tests.support.command import running
from tests.support.mlflow_store import fresh_store, points
from tests.support.toy import RECIPE, project

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
from flows.plan import Plan
from flows.spec.spec import load_spec
from tasks.prepare_data import prepare_data
from tasks.stage.keys import train_key
from tasks.tracking import open_run
from tasks.train import train
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
