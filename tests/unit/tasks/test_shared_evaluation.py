"""Which evaluations are shared among workers, and what happens where a metric turns out to need all rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import evaluate
from tasks.configs import EvaluateConfig, LaunchSettings
from tasks.stage.context import StageContext
from trainer_lib.requests import EvaluateRequest, EvaluateResult, PreparedData
from trainer_lib.storage import Store

FUNCTION = "def compute_metrics(p):\n    return {}\n"
OBJECT = "from torchmetrics import MeanMetric\n\ncompute_metrics = MeanMetric()\n"
SUMS = "def metric_sums(p):\n    return {}\n\n\ndef metrics_from_sums(sums):\n    return {}\n"


def _run(folder: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, reason: str | None) -> tuple[list[Any], list[str]]:
    """The launches of an evaluation with two processes: (step, processes) of each, and the warnings."""
    (folder / "recipe.py").write_text(recipe)
    launches: list[Any] = []
    warnings: list[str] = []

    def shared(request: Any, settings: Any, *_: Any) -> tuple[EvaluateResult, ...]:
        launches.append((request.step, "shared"))
        return (EvaluateResult((), {}, needs_all_rows=reason),) * 2

    def alone(request: Any, settings: Any, *_: Any) -> EvaluateResult:
        launches.append((request.step, settings.processes))
        return EvaluateResult((), {})

    monkeypatch.setattr(evaluate, "launch_shared", shared)
    monkeypatch.setattr(evaluate, "launch_request", alone)
    monkeypatch.setattr(evaluate, "apart", lambda config: [config] * 2)
    store = Store.open(folder / "out")
    attempt: Any = SimpleNamespace(
        store=store, progress=SimpleNamespace(event=lambda event: warnings.append(event["message"]))
    )
    context = StageContext(name="shared", recipe=str(folder / "recipe.py"), storage=str(folder), root=str(folder))
    request = EvaluateRequest(
        output=store.url, data=PreparedData("", {}, {}, ()), model_url="", splits=(), args={"use_cpu": True}
    )
    evaluate._measure(EvaluateConfig(), request, LaunchSettings(processes=2), context, attempt)
    return launches, warnings


def test_sums_and_objects_are_shared_and_functions_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in (SUMS, OBJECT):
        assert _run(tmp_path, recipe, monkeypatch, None) == ([("ranges", "shared"), ("finish", 1)], [])
    assert _run(tmp_path, FUNCTION, monkeypatch, None) == ([("all", 2)], [])


def test_what_needs_all_rows_is_measured_by_one_group_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, warnings = _run(tmp_path, OBJECT, monkeypatch, "MulticlassAUROC keeps all rows (preds)")
    assert launches == [("ranges", "shared"), ("all", 2)]
    assert warnings == ["One group of processes evaluates all rows, because MulticlassAUROC keeps all rows (preds)."]
