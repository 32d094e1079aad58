"""The step *rehearse* of evaluate in one process: what it refuses, and what it leaves to the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.errors import ConfigError
from trainer_lib.metric_names import read_metrics
from trainer_lib.requests import EvaluateResult, PreparedData

WITHOUT = tiny.RECIPE.partition("def compute_metrics")[0]
OBJECT = f"{WITHOUT}\nfrom torchmetrics.classification import MulticlassAccuracy as M\n\ncompute_metrics = M(2)\n"
BY_BATCH = tiny.RECIPE.replace("def compute_metrics(p)", "def compute_metrics(p, compute_result=True)")
SETTINGS: dict[str, Any] = {"metrics": read_metrics(["mae"]), "slices": ("label",), "confidence": 0.9, "resamples": 100}


def rehearse(folder: Path, data: PreparedData, recipe: str = tiny.RECIPE, **fields: Any) -> EvaluateResult:
    given = {
        "data": data,
        "model_url": "",
        "splits": ("test",),
        "step": "rehearse",
        "args": {"use_cpu": True},
        **fields,
    }
    found = tiny.run(request(folder, recipe, "evaluate", output=str(folder / "out"), **given), kind="in_process")
    assert isinstance(found, EvaluateResult)
    assert not (folder / "out").exists()
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", ["an object", "by batch"])
def test_what_needs_all_rows(tmp_path: Path, prepared_data: PreparedData, name: str, how: str) -> None:
    recipe, by_batch = (OBJECT, False) if how == "an object" else (tiny.RECIPE, True)
    with pytest.raises(ConfigError, match="needs all rows") as caught:
        args = {"use_cpu": True, "batch_eval_metrics": by_batch}
        rehearse(tmp_path, prepared_data, recipe, args=args, **{name: SETTINGS[name]})
    assert caught.value.field == f"evaluate.{name}"
    assert ("batch_eval_metrics=false" in str(caught.value.remedy)) is by_batch


def test_slices_of_nothing_that_is_measured(tmp_path: Path, prepared_data: PreparedData) -> None:
    with pytest.raises(ConfigError, match="nothing to measure on slices") as caught:
        rehearse(tmp_path, prepared_data, WITHOUT, slices=("label",))
    assert caught.value.field == "evaluate.slices"
    rehearse(tmp_path, prepared_data, WITHOUT, slices=("label",), metrics=read_metrics(["accuracy"]))


def test_the_outputs_decide_which_metrics_suit_them(tmp_path: Path, prepared_data: PreparedData) -> None:
    assert rehearse(
        tmp_path, prepared_data, metrics=read_metrics(["f1_macro", "roc_auc"]), slices=("label",)
    ) == EvaluateResult((), {})
    with pytest.raises(ConfigError, match="not for outputs"):
        rehearse(tmp_path, prepared_data, metrics=read_metrics(["f1_macro", "rmse"]))
    guesses = f"{tiny.RECIPE}\n\ndef preprocess_logits_for_metrics(logits, labels):\n    return logits.argmax(-1)\n"
    with pytest.raises(ConfigError, match=r"not for outputs \[25\] and labels \[25\]"):
        rehearse(tmp_path, prepared_data, guesses, metrics=read_metrics(["accuracy"]))


def test_a_name_that_no_evaluation_will_have_is_refused_and_one_that_it_may_have_is_not(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    for name in ("test_accurasy", "train_accuracy", "test_accuracy_low"):
        with pytest.raises(ConfigError, match=r"has no metric .*test_accuracy") as caught:
            rehearse(tmp_path, prepared_data, named={"evaluate.require.x": "test_loss", "register.metric": name})
        assert (caught.value.field, caught.value.value) == ("register.metric", name)
    guesses = "\n\ndef preprocess_logits_for_metrics(logits, labels):\n    return logits.argmax(-1)\n"
    guesses += "\n\ndef compute_metrics(p):\n    return {'accuracy': float((p.predictions == p.label_ids).mean())}\n"
    changing = tiny.RECIPE.replace("return {", 'return {f"of_{len(p.label_ids)}": 1.0, ')
    for recipe, name, more in (
        (tiny.RECIPE, "test_accuracy_low", {"confidence": 0.9, "resamples": 100}),
        (tiny.RECIPE, "test_accuracy/label/0", {"slices": ("label",)}),
        (tiny.RECIPE, "overall_weights", {}),
        (tiny.RECIPE + guesses, "test_accuracy", {}),  # outputs that no metric by name could measure
        (changing, "test_of_1000", {}),
        (BY_BATCH, "test_accuracy", {"args": {"use_cpu": True, "batch_eval_metrics": True}}),
    ):
        rehearse(tmp_path, prepared_data, recipe, named={"register.metric": name}, **more)


def test_a_sharded_model_is_not_built_by_one_process(tmp_path: Path, prepared_data: PreparedData) -> None:
    args = {"use_cpu": True, "fsdp": "full_shard"}
    rehearse(tmp_path, prepared_data, metrics=read_metrics(["rmse"]), args=args)
    with pytest.raises(ConfigError, match="more than 50 different values"):
        rehearse(
            tmp_path, prepared_data, metrics=read_metrics(["rmse"]), slices=("row_id",), splits=("train",), args=args
        )


@pytest.mark.parametrize("how", ["an object", "by batch"])
def test_a_metric_that_chooses_the_weights_needs_all_rows(
    tmp_path: Path, prepared_data: PreparedData, how: str
) -> None:
    recipe, more = (OBJECT, {}) if how == "an object" else (BY_BATCH, {"batch_eval_metrics": True})
    chosen = {"eval_strategy": "epoch", "metric_for_best_model": "f1_macro", **more}
    asked = request(
        tmp_path,
        recipe,
        "train",
        output=str(tmp_path / "out"),
        data=prepared_data,
        args={**tiny.ARGS, **chosen},
        eval_split="test",
        metrics=read_metrics(["f1_macro"]),
    )
    with pytest.raises(ConfigError, match="batch by batch") as caught:
        tiny.run(asked, kind="in_process")
    assert (caught.value.field, caught.value.value) == ("metric_for_best_model", "f1_macro")
    assert not (tmp_path / "out" / "checkpoints").exists()
