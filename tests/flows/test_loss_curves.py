"""The training loss is drawn whatever `logging_steps` is, and also of a training that fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows import run_images, run_record
from flows.results import PipelineResult
from tests.support.runs import broken, ran, run
from tests.support.toy import project

LOSS = re.compile(r"<h3>Loss</h3>.*?</svg>", re.DOTALL)
FAILS = (
    'return {"loss": ((y - labels) ** 2).mean()',
    'self.calls = getattr(self, "calls", 0) + 1\n            if self.calls > 6:\n'
    '                raise ValueError("the seventh step")\n            return {"loss": ((y - labels) ** 2).mean()',
)


@pytest.fixture
def folder(tmp_path: Path, prefect_server: str) -> Path:
    project(tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """The pictures that each run drew for Prefect."""
    drawn: list[dict[str, bytes]] = []
    draw = run_images.draw_pictures

    def keep(*args: Any, **how: Any) -> dict[str, bytes]:
        drawn.append(draw(*args, **how))
        return drawn[-1]

    monkeypatch.setattr(run_record, "draw_pictures", keep)
    return drawn


def page(result: PipelineResult) -> str:
    return Path(result.report_url or "").read_text()


def test_a_training_that_logs_nothing_has_a_curve_of_every_step(folder: Path, pictures: list[dict[str, bytes]]) -> None:
    result = run(folder, "train.args.logging_steps=1000", "predict.enabled=false", "publish.enabled=false")
    assert result.ok
    trained = result.outcome("train")
    assert trained is not None
    assert trained.manifest is not None
    losses = json.loads((Path(trained.manifest["url"]) / "losses.json").read_text())
    assert [entry["step"] for entry in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(LOSS.findall(page(result))) == 1
    assert pictures[-1]["loss"].startswith(b"\x89PNG")


@pytest.mark.parametrize("logging_steps", [1, 1000])
def test_a_training_that_fails_has_the_curve_until_then(
    folder: Path, pictures: list[dict[str, bytes]], logging_steps: int
) -> None:
    # Logged at every step, or known to the checkpoint of step 4 alone.
    broken(folder, *FAILS)
    result = run(folder, f"train.args.logging_steps={logging_steps}")
    assert "the seventh step" in str(result.error)
    assert ran(result) == {"prepare-data"}
    assert len(LOSS.findall(page(result))) == 1
    assert pictures[-1]["loss"].startswith(b"\x89PNG")


def test_a_training_that_never_took_a_step_has_no_curve(folder: Path, pictures: list[dict[str, bytes]]) -> None:
    broken(folder, "y = self.linear(x.float())", "raise ValueError('wrong shape')")
    result = run(folder)
    assert result.error is not None
    assert LOSS.findall(page(result)) == []
    assert pictures[-1] == {}
