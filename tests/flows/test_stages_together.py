"""evaluate and predict run one after the other, or together where each names GPUs of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.plan import Plan, StagePlan
from flows.stages import find_stage
from tasks.stage import progress
from tests.support.runs import ran, run, spec_of
from tests.support.toy import RECIPE
from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import CodeError
from trainer_lib.launch import LaunchConfig

# Both have something to do, in processes of their own.
BOTH = (
    "evaluate.launch=process",
    "predict.launch=process",
    "evaluate.splits=[train, test]",
    "predict.rows_per_file=3",
    "publish.enabled=false",
)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU for each."""
    monkeypatch.setattr(StagePlan, "has_devices_apart_from", lambda self, other: True)


def spans(events: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Stage -> positions of its first and its last event among all events."""
    found: dict[str, tuple[int, int]] = {}
    for number, event in enumerate(events):
        found[event["stage"]] = (found.get(event["stage"], (number, 0))[0], number)
    return found


def planned(launch: LaunchConfig | None, *, use_cpu: bool = False) -> StagePlan:
    stage = find_stage("evaluate")
    assert stage is not None
    return StagePlan(stage, None, TrainingArguments(use_cpu=use_cpu), launch)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({"devices": (0,)}, {"devices": (1,)}, True),
        ({"devices": (0, 1)}, {"devices": (1, 2)}, False),
        ({"devices": (0,)}, {}, False),
        ({}, {}, False),
        ({"devices": ("GPU-a",)}, {"devices": ("GPU-b",)}, True),
        ({"devices": (0,)}, {"devices": ("GPU-b",)}, False),
        ({"devices": (0,)}, {"devices": (1,), "device_order": "PCI_BUS_ID"}, False),
        ({"devices": (0,), "kind": "in_process"}, {"devices": (1,)}, False),
    ],
)
def test_stages_run_together_only_on_gpus_of_their_own(one: Any, other: Any, apart: bool) -> None:
    first, second = planned(LaunchConfig(**one)), planned(LaunchConfig(**other))
    assert first.has_devices_apart_from(second) is apart
    assert second.has_devices_apart_from(first) is apart


def test_stages_on_the_cpu_and_those_without_workers_run_one_after_the_other() -> None:
    gpu, other = planned(LaunchConfig(devices=(0,))), LaunchConfig(devices=(1,))
    assert not gpu.has_devices_apart_from(planned(other, use_cpu=True))
    assert not gpu.has_devices_apart_from(planned(None))


def test_on_shared_devices_they_run_one_after_the_other(folder: Path) -> None:
    assert ["evaluate"] in Plan.of(spec_of(folder)).groups()
    events: list[dict[str, Any]] = []
    with progress.subscribe(events.append):
        run(folder, "evaluate.splits=[train, test]", "predict.rows_per_file=3").raise_for_error()
    found = spans(events)
    assert found["evaluate"][1] < found["predict"][0]


@pytest.mark.usefixtures("together")
def test_with_devices_of_their_own_they_run_at_the_same_time(folder: Path) -> None:
    assert ["evaluate", "predict"] in Plan.of(spec_of(folder)).groups()
    events: list[dict[str, Any]] = []
    with progress.subscribe(events.append):
        result = run(folder, *BOTH, "tracking.enabled=true")
    result.raise_for_error()
    assert ran(result) == {"evaluate", "predict"}
    assert [outcome.stage for outcome in result.stages][2:4] == ["evaluate", "predict"]
    assert all(outcome.seconds > 0 for outcome in result.stages[2:4])
    found = spans(events)
    assert found["predict"][0] < found["evaluate"][1] and found["evaluate"][0] < found["predict"][1]

    tracked = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id or "").data
    assert {"trainflow.evaluate", "trainflow.predict"} <= set(tracked.tags)
    assert {"train-split/error", "test/error"} <= set(tracked.metrics)


@pytest.mark.usefixtures("together")
def test_one_that_fails_leaves_the_other_its_result(folder: Path) -> None:
    own = folder / "metrics.py"
    own.write_text(RECIPE.replace('return {"error"', 'return {"error": 1 / 0, "e"'))
    result = run(folder, *BOTH, f"evaluate.recipe={own}")
    assert isinstance(result.error, CodeError)
    outcomes = {outcome.stage: outcome for outcome in result.stages}
    assert (outcomes["evaluate"].status, outcomes["predict"].status) == ("failed", "ran")
    assert (outcomes["push-to-hub"].status, outcomes["push-to-hub"].reason) == ("skipped", "evaluate failed")


@pytest.mark.usefixtures("together")
def test_ctrl_c_stops_the_workers_of_both(folder: Path) -> None:
    slow = folder / "slow.py"
    slow.write_text(RECIPE.replace("y = self.linear(", "import time; time.sleep(2); y = self.linear("))
    started: set[str] = set()

    def interrupt_when_both_work(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            started.add(event["stage"])
            if started == {"evaluate", "predict"}:
                os.kill(os.getpid(), signal.SIGINT)

    recipes = (f"evaluate.recipe={slow}", f"predict.recipe={slow}")
    with progress.subscribe(interrupt_when_both_work), pytest.raises(KeyboardInterrupt):
        run(folder, *BOTH, *recipes)
    # The leak police fails this test for a worker that is still there.
    assert ran(run(folder, *BOTH)) == {"evaluate", "predict"}
