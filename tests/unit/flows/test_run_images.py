"""Pictures and tables of what a model got right and wrong, as the MLflow run gets them."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from flows.run_images import log_outcomes
from flows.spec.spec import PipelineSpec
from tasks.sweep_settings import TRIAL
from trainer_lib.evaluation.outcomes import summarize_outcomes


class Run:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.tags: dict[str, str] = {}

    def log_file(self, content: Any, path: str) -> None:
        self.files[path] = content

    def set_tags(self, tags: dict[str, str]) -> None:
        self.tags |= tags


class Evaluation:
    """A manifest of evaluate, with the outcomes of the split test."""

    def __init__(self, outcomes: Any, metrics: dict[str, Any]) -> None:
        self._content, self.metrics = json.dumps(outcomes).encode(), metrics
        self.files = [type("Entry", (), {"path": "outcomes/test.json"})]

    def store(self) -> Any:
        return type("Store", (), {"read_bytes": lambda _, path, limit: self._content})()


def _logged(outcomes: Any, metrics: dict[str, Any], **tags: str) -> Run:
    run = Run()
    spec = PipelineSpec.model_validate(
        {"name": "toy", "recipe": "recipe.py", "storage": "s", "tracking": {"tags": tags}}
    )
    log_outcomes(spec, cast(Any, run), cast(Any, Evaluation(outcomes, metrics)), {"classes": ["no", "yes"]})
    return run


def test_classes_have_a_matrix_a_calibration_and_their_hardest_rows() -> None:
    labels = np.array([0, 1] * 20)
    scores = np.eye(2)[labels] * 3
    scores[7] = [4.0, 0.0]
    slices = {"test": {"accuracy": 0.9, "accuracy/sex/a": 1.0, "rows/sex/a": 30, "rows/sex/b": 10}}
    run = _logged(summarize_outcomes(scores, labels), slices)
    assert set(run.files) == {
        "plots/confusion-test.png",
        "plots/reliability-test.png",
        "samples/test.json",
        "samples/hardest-test.json",
        "samples/slices-test-sex.json",
    }
    for name in ("confusion", "reliability"):
        assert Image.open(io.BytesIO(run.files[f"plots/{name}-test.png"])).width > 300
    hardest = json.loads(run.files["samples/hardest-test.json"])
    assert hardest["columns"] == ["row_id", "label", "prediction", "nats"]
    assert hardest["data"][0][:3] == [7, "yes", "no"]
    sliced = json.loads(run.files["samples/slices-test-sex.json"])
    assert sliced == {"columns": ["sex", "rows", "accuracy"], "data": [["a", 30, 1.0], ["b", 10, None]]}
    tables = [each["path"] for each in json.loads(run.tags["mlflow.loggedArtifacts"])]
    assert tables == ["samples/test.json", "samples/hardest-test.json", "samples/slices-test-sex.json"]


def test_numbers_have_residuals_and_older_outcomes_are_still_drawn() -> None:
    truth = np.linspace(0, 1, 40, dtype=np.float32)
    found = summarize_outcomes(truth + 0.1, truth)
    assert found is not None
    run = _logged(found, {"test": {"rmse": 0.1}})
    assert set(run.files) == {"plots/residuals-test.png", "samples/test.json", "samples/hardest-test.json"}
    assert json.loads(run.files["samples/hardest-test.json"])["columns"][3] == "absolute_error"
    older = {name: value for name, value in found.items() if name != "hardest"}
    assert set(_logged(older, {}).files) == {"plots/residuals-test.png", "samples/test.json"}


@pytest.mark.parametrize("outcomes", [{"kind": "classes"}, {"kind": "numbers", "measured": "x"}])
def test_outcomes_that_cannot_be_drawn_are_not_worth_a_run(outcomes: Any) -> None:
    assert _logged(outcomes, {}).files == {}


def test_a_trial_of_a_sweep_has_tables_and_no_pictures() -> None:
    labels = np.array([0, 1] * 20)
    run = _logged(summarize_outcomes(np.eye(2)[labels] * 3, labels), {}, **{TRIAL: "3"})
    assert set(run.files) == {"samples/test.json", "samples/hardest-test.json"}
    values = np.linspace(0, 1, 20)
    run = _logged(summarize_outcomes(values + 0.01, values), {}, **{TRIAL: "3"})
    assert run.files
    assert not [path for path in run.files if path.startswith("plots/")]
