"""A week of a nightly pipeline by a fast clock: runs, failures, what `trainflow gc` frees, and what it must not touch.

    python -m benchmarks.week --size full --save

Each night the data is another, so every stage runs: prepare, train with two checkpoints, evaluate, predict; on Sundays
the model is published. One night a week the recipe raises in the middle of training, another night the run is stopped
there. In the morning the storage is cleaned up as `trainflow gc --keep N --delete` does it. Everything is real but
Prefect, and the clock: a night is as long as its work. The first run of the week is tagged.

Reported for each night: how the run ended, bytes below the storage before and after the removal, folders removed. After
each removal, every result that a kept run, the tag or a publication refers to is verified byte for byte.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks._result import arguments, publish
from trainer_lib.errors import Interrupted, TrainflowError
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import find_run, list_runs, tag_run
from trainflow.flows.records.results import PipelineResult, StageOutcome
from trainflow.flows.reports import run_record
from trainflow.flows.reports.run_record import RunRecord
from trainflow.flows.runs.garbage import find_garbage, find_publications, folders_of, remove_garbage
from trainflow.flows.spec.spec import PipelineSpec, parse_spec
from trainflow.tasks.stage.manifest import look_up_under

SIZES = {"smallest": (3, 1), "full": (7, 3)}  # nights, and how many runs stay
FIRST_NIGHT = datetime(2026, 11, 16, 3, tzinfo=UTC)  # a Monday
FAILS, STOPS = 1, 4  # nights, from 0
RECIPE = """
def prepare(options, out):
    import random
    draw = random.Random(options["night"])
    rows = [{"x": [draw.uniform(-1, 1) for _ in range(64)]} for _ in range(256)]
    rows = [{**row, "labels": sum(row["x"])} for row in rows]
    return {"train": rows, "test": rows[:64]}


def build_model(options, data):
    import torch

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
            self.steps = 0

        def forward(self, x, labels=None):
            self.steps += self.training
            if self.training and self.steps == int(options.get("fails_at") or -1):
                raise ValueError("a bad night")
            if self.training and self.steps == int(options.get("stops_at") or -1):
                raise KeyboardInterrupt
            y = self.layers(x.float()).squeeze(-1)
            return {"logits": y} if labels is None else {"loss": ((y - labels) ** 2).mean(), "logits": y}

    return Line()


def compute_metrics(p):
    return {"error": float(abs(p.predictions - p.label_ids).mean())}
"""


def spec_of(folder: Path, night: int) -> PipelineSpec:
    """The spec of one night."""
    fault = {FAILS: {"fails_at": 6}, STOPS: {"stops_at": 6}}.get(night, {})
    in_process = {"kind": "in_process"}
    return parse_spec(
        {
            "name": "nightly",
            "recipe": str(folder / "recipe.py"),
            "storage": str(folder / "store"),
            "prepare": {"options": {"night": night}, "launch": in_process},
            "train": {
                "launch": in_process,
                "model": fault,
                "args": {"max_steps": 8, "save_steps": 4, "logging_steps": 4, "global_batch_size": 32, "report_to": []},
            },
            "evaluate": {"splits": ["test"]},
            "predict": {"split": "test"},
            "publish": {"enabled": (FIRST_NIGHT + timedelta(days=night)).weekday() == 6},
            "tracking": {"enabled": False},
        }
    )


def run_night(spec: PipelineSpec) -> tuple[str, str]:
    """Run the stages as the flow does, without Prefect; how the run ended, and its id."""
    plan = Plan.of(spec)
    result = PipelineResult(spec.name, "", spec.storage)
    ended = "finished"
    try:
        with RunRecord(plan, result) as record:
            run_stages(plan, record, result)
    except (TrainflowError, KeyboardInterrupt) as error:
        is_stop = isinstance(error, Interrupted | KeyboardInterrupt)
        ended = "stopped" if is_stop else f"failed ({type(error).__name__})"
    return ended, plan.pipeline_key[:16]


def run_stages(plan: Plan, record: RunRecord, result: PipelineResult) -> None:
    """Run every stage that is switched on."""
    manifests: dict[str, Any] = {}
    for name, each in plan.stages.items():
        inputs = each.stage.choose_inputs(manifests)
        record.note_begin(name, plan.key_of(name, manifests).digest)
        try:
            manifest = each.stage.load_task().fn(each.config, replace(plan.context), **inputs)
        except BaseException as error:
            result.stages.append(StageOutcome(name, "failed", str(error)))
            raise
        manifests[name] = manifest
        result.stages.append(StageOutcome(name, "ran", manifest.reason, 0.0, manifest.to_dict()))
        record.note_stage(manifest)


def verify(storage: str) -> int:
    """Verify every result that a run or a publication refers to; how many there are.

    Raises:
        AssertionError: one is gone or damaged.
    """
    named = {(stage, key) for run in list_runs(storage) for stage, key in run.stages.items()}
    for stage, key in named:
        manifest, damage = look_up_under(storage, stage, key)
        assert manifest is not None, f"{stage} {key[:16]} is gone: {damage}"
    known = {folder for run in list_runs(storage) for folder in folders_of(run)}
    for each in find_publications(storage):
        assert each.folders <= known, f"{each.what} has lost its run"
    return len(named)


def disk_bytes(storage: str) -> int:
    """Bytes of all files below the storage."""
    return sum(info.size for info in Store.open(storage).list())


def run_week(folder: Path, nights: int, keep: int) -> list[dict[str, Any]]:
    """Run the nights and clean up after each; a row for each."""
    (folder / "pyproject.toml").write_text("[project]\nname = 'nightly'\n")
    (folder / "recipe.py").write_text(textwrap.dedent(RECIPE))
    storage, rows = str(folder / "store"), []
    for night in range(nights):
        moment = FIRST_NIGHT + timedelta(days=night)
        with mock.patch.object(run_record, "now", partial(moment.strftime, "%Y-%m-%dT%H:%M:%SZ")):
            ended, run_id = run_night(spec_of(folder, night))
        if night == 0:
            tag_run(storage, find_run(storage, run_id, field="RUN"), "monday")
        before = disk_bytes(storage)
        garbage = find_garbage(storage, keep=keep)
        removed = remove_garbage(storage, garbage)
        rows.append(
            {
                "night": f"{moment:%a %d}",
                "run": ended,
                "bytes_before": before,
                "bytes_after": disk_bytes(storage),
                "removed": len(removed),
                "runs_kept": len(list_runs(storage)),
                "results_verified": verify(storage),
            }
        )
    return rows


def main() -> None:
    """Run the week."""
    given = arguments(__doc__, tuple(SIZES))
    nights, keep = SIZES[given.size]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="trainflow-week-") as folder:
        rows = run_week(Path(folder), nights, keep)
    endings = [row["run"] for row in rows]
    summary = {
        "nights": len(rows),
        "finished": endings.count("finished"),
        "ended_otherwise": len(rows) - endings.count("finished"),
        "freed_bytes": sum(row["bytes_before"] - row["bytes_after"] for row in rows),
    }
    publish("week", given.size, {"keep": keep, "summary": summary, "days": rows}, given.save)


if __name__ == "__main__":
    main()
