"""Metrics, outputs that are not tensors, and pushes among two processes: gathered once, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib.errors import CodeError
from trainer_lib.hub.folder import FolderHub

ROWS = classification_rows(21)


def _streamed(folder: str) -> float:
    from torchmetrics.classification import MulticlassAccuracy  # seconds: not for every child of this file

    metric = MulticlassAccuracy(3, average="micro")
    one = trainer(folder, None, eval_dataset=ROWS, compute_metrics=metric, batch_eval_metrics=True)
    one.evaluate()
    return one.evaluate()["eval_MulticlassAccuracy"]


def test_torchmetrics_objects_see_every_sample_once_and_do_not_wait_for_other_ranks(tmp_path: Path) -> None:
    alone = trainer(
        tmp_path,
        None,
        eval_dataset=ROWS,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    ).evaluate()["eval_accuracy"]
    assert run_distributed(_streamed, 2, str(tmp_path)) == [pytest.approx(alone)] * 2


def _broken(p: Any, compute_result: bool) -> dict[str, float]:
    raise KeyError("a mistake in the metric")


def _fails(folder: str) -> str:
    one = trainer(folder, None, eval_dataset=ROWS, compute_metrics=_broken, batch_eval_metrics=True)
    try:
        one.evaluate()
    except CodeError as error:
        return str(error)
    return "nothing"


def test_what_a_streamed_metric_raises_is_raised_on_every_rank(tmp_path: Path) -> None:
    assert all("a mistake in the metric" in said for said in run_distributed(_fails, 2, str(tmp_path)))


class Wordy(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(x, labels)
        return {**outputs, "words": [f"{float(row[0]):.3f}" for row in x]}


def _gathered(folder: str) -> Any:
    found: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        found.append(p.predictions[1])
        return {"n": len(p.predictions[1])}

    given: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": note, "eval_use_gather_object": True}
    one = trainer(folder, None, model=Wordy(), per_device_eval_batch_size=4, **given)
    return one.evaluate()["eval_n"], found


def test_outputs_that_are_no_tensors_come_from_all_ranks_in_the_order_of_the_data(tmp_path: Path) -> None:
    first, second = run_distributed(_gathered, 2, str(tmp_path))
    assert first == (21, [[f"{float(row['x'][0]):.3f}" for row in ROWS]])
    assert second == (21, [])


def _pushed(folder: str) -> tuple[Any, Any, bool]:
    given: dict[str, Any] = {"push_to_hub": True, "hub_model_id": f"{folder}/hub", "hub_strategy": "checkpoint"}
    one = trainer(f"{folder}/out", ROWS, save_strategy="steps", save_steps=1, max_steps=2, **given)
    one.train()
    url = one.push_to_hub("Once more", tags="mine")
    future = one.push_to_hub("And more", blocking=False)
    one._trainflow.publisher.queue.wait(unless=lambda: False)
    return url, one._trainflow.comm.rank, future is None


def test_one_rank_pushes_and_every_rank_gets_the_url(tmp_path: Path) -> None:
    first, second = run_distributed(_pushed, 2, str(tmp_path))
    assert first[0] == second[0] and str(tmp_path) in first[0]
    assert (first[2], second[2]) == (False, True)
    oldest = FolderHub(str(tmp_path / "hub")).revisions()[-1]
    assert "last-checkpoint/rng/rank-00001.json" in {entry.path for entry in oldest.commit.files}
