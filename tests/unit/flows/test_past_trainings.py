"""Which earlier training says how long a planned one will take: one that differs in nothing that takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.past_trainings import find_similar
from flows.plan import Plan
from flows.spec.spec import load_spec
from tasks.stage.facts import PrepareFacts, TrainFacts
from tests.support.recorded import commit_facts, record_run
from tests.support.toy import project
from trainer_lib.requests import PreparedSplit

STEPS, TRAINED_S, STAGE_S = 8, 4.0, 6.5
TWO = "train.launch={kind: torchrun, processes: 2, threads: 1}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def plan(path: Path, *overrides: str) -> Plan:
    return Plan.of(load_spec(path, overrides))


def train(path: Path, *overrides: str, **facts: Any) -> str:
    """Commit a training of these settings as if it had run, with a record of its run; return its key."""
    storage, data = plan(path).spec.storage, PrepareFacts({"train": PreparedSplit(64), "test": PreparedSplit(16)})
    commit_facts(storage, plan(path).key_of("prepare-data", {}), data)
    planned = plan(path, *overrides)
    prepared = planned.reasons["prepare-data"].manifest
    assert prepared is not None
    key = planned.key_of("train", {"prepare-data": prepared})
    known = TrainFacts(**{"global_step": STEPS, "global_samples": 64, "world_size": 1, **facts})
    commit_facts(storage, key, known, metrics={"train_runtime": TRAINED_S})
    outcome = {"train": {"status": "ran", "seconds": STAGE_S}}
    record_run(storage, "a" * 16, day=1, stages={"train": key.digest}, outcomes=outcome)
    return key.digest


def test_the_training_itself_says_how_long_a_step_and_the_rest_of_its_stage_took(path: Path) -> None:
    assert find_similar(plan(path)) is None, "nothing was trained"
    train(path)
    found = find_similar(plan(path))
    assert found is not None
    assert (found.seconds_per_step, found.overhead_s) == (TRAINED_S / STEPS, STAGE_S - TRAINED_S)
    assert found.described.startswith("this training, committed 20")


@pytest.mark.parametrize("setting", ["learning_rate=1e-2", "seed=7", "max_steps=80", "weight_decay=0.1"])
def test_a_training_that_differs_in_nothing_that_takes_time_is_as_good(path: Path, setting: str) -> None:
    train(path)
    found = find_similar(plan(path, f"train.args.{setting}"))
    assert found is not None
    assert found.seconds_per_step == TRAINED_S / STEPS
    assert found.described.startswith("a training that differs in nothing that takes time, committed 20")


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.args.global_batch_size=16",),
        ("train.args.learning_rate=1e-2", "train.args.global_batch_size=16"),
        (TWO,),  # the same key: the global batch is the same
        ("train.args.learning_rate=1e-2", TWO),
        ("train.args.optim=sgd",),
        ("prepare.options.rows=32",),
    ],
)
def test_a_training_that_takes_other_time_is_none(path: Path, overrides: tuple[str, ...]) -> None:
    train(path)
    assert find_similar(plan(path, *overrides)) is None


def test_two_processes_go_by_a_training_of_two(path: Path) -> None:
    train(path, world_size=2)
    assert find_similar(plan(path)) is None
    assert find_similar(plan(path, TWO)) is not None


def test_a_resumed_training_timed_only_its_last_part(path: Path) -> None:
    train(path, resumed_from=4)
    assert find_similar(plan(path)) is None
