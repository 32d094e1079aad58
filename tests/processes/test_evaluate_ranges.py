"""Metrics that merge: one worker, several, and several of which one is killed give the same digits."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.launched import request, wait_until
from trainer_lib.errors import ConfigError
from trainer_lib.launch import LaunchConfig, launch, launch_workers
from trainer_lib.locks.lease import Holder
from trainer_lib.requests import PreparedData, RecipeFile

SUMS_ONLY = """
def metric_sums(p):
    time.sleep(float(os.environ.get("RANGE_S", "0")))
    right = p.predictions.argmax(-1) == p.label_ids
    scores = p.predictions.astype(np.float64)
    return {"right": right.sum(), "rows": len(right), "scores": scores.sum(0), "table": [[int(right.sum())], [1]]}


def metrics_from_sums(sums):
    assert sums["scores"].shape == (2,) and sums["table"].shape == (2, 1)
    ranges = int(sums["table"][1, 0])
    return {"accuracy": sums["right"] / sums["rows"], "score": float(sums["scores"][0]), "ranges": ranges}
"""
SUMS = tiny.RECIPE.replace(
    """
def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
""",
    SUMS_ONLY,
)
OWN = """
def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
"""
STATES = tiny.RECIPE.replace(
    OWN,
    """
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

compute_metrics = MetricCollection(
    {"accuracy": MulticlassAccuracy(num_classes=2, average="micro"), "f1": MulticlassF1Score(num_classes=2)}
)
""",
)
ALL_ROWS = tiny.RECIPE.replace(
    OWN,
    """
from torchmetrics.classification import MulticlassAUROC

compute_metrics = MulticlassAUROC(num_classes=2)
""",
)
ONE = LaunchConfig(kind="process", processes=1, threads=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder = tmp_path_factory.mktemp("trained")
    data = tiny.prepared(folder)
    tiny.run(tiny.train_request(folder, data, str(folder / "train")), processes=1)
    return folder, data


def asked(tmp_path: Path, trained: tuple[Path, PreparedData], recipe: str = SUMS, **more: Any) -> Any:
    folder, data = trained
    return request(
        tmp_path,
        recipe,
        "evaluate",
        data=data,
        model_url=f"{folder / 'train'}/model",
        splits=("test", "train"),
        args={"use_cpu": True, "per_device_eval_batch_size": 4},
        **{"rows_per_range": 6, **more},
    )


def run(one: Any, workers: int = 1, **env: str) -> dict[str, dict[str, float]]:
    drop: Any = {"on_line": print, "on_event": lambda event: None}
    if workers == 1:
        return dict(launch(one, ONE, env=env, **drop).metrics)
    launch_workers(replace(one, step="ranges"), [ONE] * workers, env=env, **drop)
    return dict(launch(replace(one, step="finish"), ONE, env=env, **drop).metrics)


def test_several_workers_and_one_give_the_same_digits(tmp_path: Path, trained: tuple[Path, PreparedData]) -> None:
    alone = run(asked(tmp_path, trained))
    assert {"loss", "accuracy", "score", "ranges"} == set(alone["test"])
    assert (alone["test"]["ranges"], alone["train"]["ranges"]) == (5, 15)  # 25 and 90 rows, 6 at a time
    assert alone["overall"]["weights"] > 0
    for folder in ("sums", "records"):
        shutil.rmtree(tmp_path / "out" / folder)
    assert run(asked(tmp_path, trained), 3) == alone
    # As a stage's own file of metrics, which has them in place of the recipe's.
    own = RecipeFile(str(tmp_path / "metrics.py"), str(tmp_path), str(tmp_path / "recipe.py"))
    (tmp_path / "metrics.py").write_text("import os\nimport time\n\nimport numpy as np\n\n\n" + SUMS_ONLY)
    assert run(replace(asked(tmp_path, trained, tiny.RECIPE), recipe=own, output=str(tmp_path / "own"))) == alone
    # The whole split at once differs by rounding only.
    whole = run(asked(tmp_path / "whole", trained, tiny.RECIPE))
    for split in ("test", "train"):
        assert whole[split]["accuracy"] == alone[split]["accuracy"]
        assert whole[split]["loss"] == pytest.approx(alone[split]["loss"], rel=1e-6)


def test_the_range_of_a_worker_that_is_killed_is_measured_by_another(
    tmp_path: Path, trained: tuple[Path, PreparedData]
) -> None:
    expected = run(asked(tmp_path / "alone", trained))
    one = asked(tmp_path, trained)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(one, 2, RANGE_S="0.3")))
    thread.start()
    claims = tmp_path / "out" / "sums" / "test" / "claims"
    wait_until(lambda: any(claims.glob("*/*/WRITING.json")), 60)
    holder = Holder.from_bytes(next(claims.glob("*/*/WRITING.json")).read_bytes())
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    thread.join(120)
    assert found == [expected]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("def metrics_from_sums", "def other"), "has only metric_sums"),
        (lambda text: text + "\ndef compute_metrics(p): ...\n", "defines both metric_sums.. and compute_metrics"),
        (lambda text: text.replace('"rows": len(right)', '"rows": "many"'), "'many' for 'rows'"),
        (lambda text: text.replace("scores.sum(0)", "scores"), "returned arrays of shapes"),
    ],
)
def test_sums_that_cannot_be_added_are_refused(
    change: Any, words: str, tmp_path: Path, trained: tuple[Path, PreparedData]
) -> None:
    with pytest.raises(ConfigError, match=words):
        launch(
            asked(tmp_path, trained, change(SUMS)),
            LaunchConfig(kind="in_process", processes=1),
            env={},
            on_line=print,
            on_event=lambda event: None,
        )


def test_metrics_of_torchmetrics_merge_by_their_states(tmp_path: Path, trained: tuple[Path, PreparedData]) -> None:
    alone = run(asked(tmp_path, trained, STATES))
    assert {"loss", "accuracy", "f1"} == set(alone["test"])
    for folder in ("sums", "records"):
        shutil.rmtree(tmp_path / "out" / folder)
    assert run(asked(tmp_path, trained, STATES), 3) == alone
    whole = run(asked(tmp_path / "whole", trained, tiny.RECIPE))
    for split in ("test", "train"):  # counts are exact; torchmetrics divides them in 32 bits
        assert alone[split]["accuracy"] == pytest.approx(whole[split]["accuracy"], rel=1e-6)


def test_a_metric_that_keeps_all_rows_says_so_and_is_measured_on_them(
    tmp_path: Path, trained: tuple[Path, PreparedData]
) -> None:
    one = asked(tmp_path, trained, ALL_ROWS)
    answer = launch(replace(one, step="ranges"), ONE, env={}, on_line=print, on_event=lambda event: None)
    assert "MulticlassAUROC keeps all rows" in answer.needs_all_rows
    assert not list((tmp_path / "out").glob("sums/*"))
    assert 0.5 < run(one)["test"]["MulticlassAUROC"] <= 1
