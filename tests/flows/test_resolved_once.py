"""Before the first optimizer step, the orchestrating process works out arguments, launches and closures once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import run_pipeline
from flows.spec.spec import load_spec
from tasks.stage import closure, progress
from tasks.stage.resolver import Resolver
from tests.support.toy import project
from trainer_lib.arguments import TrainingArguments
from trainer_lib.launch import config


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def counting(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(TrainingArguments, "__post_init__", "arguments")
    counting(config, "check_installed", "launch checks")
    counting(closure._Walk, "visit", "closures")
    return found


@pytest.mark.usefixtures("prefect_server")
def test_arguments_launches_and_closures_are_worked_out_once(tmp_path: Path, counts: Counter[str]) -> None:
    spec = load_spec(project(tmp_path / "project"), (), Resolver())
    before_the_first_step: dict[str, int] = {}

    def stop_when_training_starts(event: dict[str, Any]) -> None:
        if event["stage"] == "train" and event["event"] == "start":
            before_the_first_step.update(counts)
            raise KeyboardInterrupt

    with progress.subscribe(stop_when_training_starts), pytest.raises(KeyboardInterrupt):
        run_pipeline(spec)
    # Launches: prepare's and train's. Evaluate and predict ask for the same arguments and the same launch as train.
    assert before_the_first_step == {"arguments": 1, "launch checks": 2, "closures": 1}


def test_a_spec_of_your_own_is_resolved_anew_by_every_run(tmp_path: Path, counts: Counter[str]) -> None:
    path = project(tmp_path / "project")
    spec = load_spec(path)
    before = dict(counts)
    assert spec.resolver is not spec.resolver
    spec.check()
    assert counts["closures"] == before["closures"] + 1, "its recipe may have been edited since"
