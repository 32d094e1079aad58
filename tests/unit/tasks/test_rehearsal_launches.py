"""The workers of an estimate and a probe are forked from the process that those of a run are forked from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import full_plan
from flows.forecast import Found
from flows.plan import Plan
from flows.spec.spec import load_spec
from tasks.stage import rehearsal
from tasks.stage.facts import PrepareFacts
from tests.support.recorded import commit_facts
from tests.support.toy import project
from trainer_lib.launch import LaunchConfig, warm
from trainer_lib.launch.conditions import read_conditions
from trainer_lib.launch.variables import worker_environment
from trainer_lib.requests import PreparedSplit

ONE = LaunchConfig(kind="process", processes=1)


@pytest.mark.parametrize(
    "own",
    [
        ONE,
        LaunchConfig(kind="process", processes=1, threads=1),
        LaunchConfig(kind="torchrun", processes=2),
        LaunchConfig(kind="torchrun", processes=2, threads=3),
        LaunchConfig(kind="torchrun", processes=2, env={"OMP_NUM_THREADS": "5"}),
    ],
)
def test_one_worker_and_all_of_them_have_one_parent(own: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone = worker_environment(rehearsal._alone(own), {})
    assert read_conditions(alone) == read_conditions(worker_environment(own, {}))


@pytest.mark.parametrize(
    "own", [LaunchConfig(kind="in_process", processes=1), LaunchConfig(engine="slurm", processes="auto")]
)
def test_where_nothing_is_forked_no_threads_are_counted(own: LaunchConfig) -> None:
    assert rehearsal._alone(own).threads is None


@pytest.mark.parametrize(("probe", "asked"), [(True, ["announced", "asked"]), (False, ["asked"])])
def test_a_plan_with_a_probe_announces_its_launches_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: bool, asked: list[str]
) -> None:
    done: list[str] = []
    launches: list[dict[str, LaunchConfig]] = []

    def expect(given: dict[str, LaunchConfig]) -> None:
        done.append("announced")
        launches.append(given)

    def ask(*_: Any, **__: Any) -> Found:
        done.append("asked")
        return Found()

    monkeypatch.setattr(warm, "expect", expect)
    monkeypatch.setattr(full_plan, "_ask", ask)
    spec = load_spec(project(tmp_path / "project"))
    facts = PrepareFacts({"train": PreparedSplit(64), "test": PreparedSplit(16)})
    commit_facts(spec.storage, Plan.of(spec).key_of("prepare-data", {}), facts)
    full_plan.plan_in_full(Plan.of(spec), probe=probe)
    assert done == asked
    # Two launches: for one, no parent would be worth its start.
    assert [sorted(each) for each in launches] == [["estimate", "probe"]] * probe
