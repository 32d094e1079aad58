"""Launchers name their settings as train's; what a stage raises names its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.configs import LaunchSettings
from tasks.stage import worker
from tasks.stage.context import StageContext
from tasks.stage.resolver import Resolver
from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.requests import PrepareRequest

CONTEXT = StageContext(name="names", recipe="recipe.py", storage="memory://names")


def test_a_failure_while_a_stage_runs_names_that_stages_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> None:
        raise InfrastructureError(
            "There was no progress.", field="train.launch.timeout_s", remedy="Raise train.launch.timeout_s."
        )

    monkeypatch.setattr(worker, "launch", hang)
    attempt: Any = SimpleNamespace(
        progress=SimpleNamespace(line=lambda line: None, event=lambda event: None, is_cancelled=lambda: False),
        is_lost=lambda: False,
    )
    settings = LaunchSettings(kind="process", processes=1)
    with pytest.raises(InfrastructureError) as caught:
        worker.launch_request(PrepareRequest(output="memory://names"), settings, CONTEXT, attempt)
    assert (caught.value.field, caught.value.remedy) == ("prepare.launch.timeout_s", "Raise prepare.launch.timeout_s.")


def test_a_launch_that_cannot_work_here_names_its_section() -> None:
    settings = LaunchSettings(kind="process", processes=2)
    with pytest.raises(ConfigError) as caught:
        Resolver().launch(settings, use_cpu=True, section="evaluate")
    assert str(caught.value.field).startswith("evaluate.launch.")


def test_an_error_about_another_field_stays_as_it_is() -> None:
    with pytest.raises(ConfigError) as caught:
        Resolver().arguments({"seed": -1}, prefix="evaluate.args")
    assert caught.value.field == "evaluate.args.seed"
