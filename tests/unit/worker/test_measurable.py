"""What the stage evaluate measures: what a rehearsal refuses, and the numbers of Trainer.evaluate on the same rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.utils.data import Subset

from tests.support import tiny
from tests.support.launched import request
from tests.support.repository import ROOT
from tests.support.tiny import run
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.records import to_record
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.metrics import NamedMetrics
from trainer_lib.protocol import requests
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, load
from trainer_lib.worker import evaluate as worker_evaluate

WITHOUT = tiny.RECIPE.partition("def compute_metrics")[0]
OBJECT = f"{WITHOUT}\nfrom torchmetrics.classification import MulticlassAccuracy as M\n\ncompute_metrics = M(2)\n"
BY_BATCH = tiny.RECIPE.replace("def compute_metrics(p)", "def compute_metrics(p, compute_result=True)")
SETTINGS: dict[str, Any] = {"metrics": read_metrics(["mae"]), "slices": ("label",), "confidence": 0.9, "resamples": 100}


SHARDED = {"use_cpu": True, "fsdp": "full_shard"}
GUESSES = "\n\ndef preprocess_logits_for_metrics(logits, labels):\n    return logits.argmax(-1)\n"


def rehearse(
    folder: Path, data: requests.PreparedData, recipe: str = tiny.RECIPE, **fields: Any
) -> requests.EvaluateResult:
    given = {"data": data, "model_url": "", "splits": ("test",), "is_rehearsal": True, "args": {"use_cpu": True}}
    asked = request(folder, recipe, "evaluate", output=str(folder / "out"), **given | fields)
    found = tiny.run(asked, kind="in_process")
    assert isinstance(found, requests.EvaluateResult)
    assert not (folder / "out").exists()
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", ["an object", "by batch"])
def test_what_needs_all_rows(tmp_path: Path, prepared_data: requests.PreparedData, name: str, how: str) -> None:
    recipe, by_batch = (OBJECT, False) if how == "an object" else (tiny.RECIPE, True)
    with pytest.raises(ConfigError, match="needs all rows") as caught:
        args = {"use_cpu": True, "batch_eval_metrics": by_batch}
        rehearse(tmp_path, prepared_data, recipe, args=args, **{name: SETTINGS[name]})
    assert caught.value.field == f"evaluate.{name}"
    assert ("batch_eval_metrics=false" in str(caught.value.remedy)) is by_batch


@pytest.mark.parametrize(
    ("recipe", "fields", "refused"),
    [
        (WITHOUT, {"slices": ("label",)}, "nothing to measure on slices"),
        (WITHOUT, {"slices": ("label",), "metrics": ["accuracy"]}, None),
        # The outputs decide which metrics suit them.
        (tiny.RECIPE, {"metrics": ["f1_macro", "roc_auc"], "slices": ("label",)}, None),
        (tiny.RECIPE, {"metrics": ["f1_macro", "rmse"]}, "not for outputs"),
        (tiny.RECIPE + GUESSES, {"metrics": ["accuracy"]}, r"not for outputs \[25\] and labels \[25\]"),
        # A sharded model is not built by one process.
        (tiny.RECIPE, {"metrics": ["rmse"], "args": SHARDED}, None),
        (tiny.RECIPE, {"args": SHARDED, "slices": ("row_id",), "splits": ("train",)}, "more than 50 different values"),
    ],
)
def test_metrics_and_slices_that_do_not_suit_the_outputs_are_refused(
    tmp_path: Path, prepared_data: requests.PreparedData, recipe: str, fields: dict[str, Any], refused: str | None
) -> None:
    given = {**fields, "metrics": read_metrics(fields.get("metrics", []))}
    if refused is None:
        assert rehearse(tmp_path, prepared_data, recipe, **given) == requests.EvaluateResult((), {})
        return
    with pytest.raises(ConfigError, match=refused) as caught:
        rehearse(tmp_path, prepared_data, recipe, **given)
    if recipe is WITHOUT:
        assert caught.value.field == "evaluate.slices"


def test_a_name_that_no_evaluation_will_have_is_refused_and_one_that_it_may_have_is_not(
    tmp_path: Path, prepared_data: requests.PreparedData
) -> None:
    for name in ("test_accurasy", "train_accuracy", "test_accuracy_low"):
        with pytest.raises(ConfigError, match=r"has no metric .*test_accuracy") as caught:
            rehearse(tmp_path, prepared_data, named={"evaluate.require.x": "test_loss", "register.metric": name})
        assert (caught.value.field, caught.value.value) == ("register.metric", name)
    with pytest.raises(ConfigError, match=r"has no metric eval_accurasy.*eval_accuracy") as caught:
        rehearse(tmp_path, prepared_data, named={"train.args.metric_for_best_model": "eval_accurasy"})
    assert caught.value.field == "train.args.metric_for_best_model"
    counted = "\n\ndef compute_metrics(p):\n    return {'accuracy': float((p.predictions == p.label_ids).mean())}\n"
    changing = tiny.RECIPE.replace("return {", 'return {f"of_{len(p.label_ids)}": 1.0, ')
    for recipe, name, more in (
        (tiny.RECIPE, "test_accuracy_low", {"confidence": 0.9, "resamples": 100}),
        (tiny.RECIPE, "test_accuracy/label/0", {"slices": ("label",)}),
        (tiny.RECIPE, "overall_weights", {}),
        (tiny.RECIPE, "eval_accuracy", {}),
        (f"{tiny.RECIPE}\n\ndef callbacks(options):\n    return []\n", "eval_what_they_add", {}),
        (tiny.RECIPE + GUESSES + counted, "test_accuracy", {}),  # outputs that no metric by name could measure
        (changing, "test_of_1000", {}),
        (BY_BATCH, "test_accuracy", {"args": {"use_cpu": True, "batch_eval_metrics": True}}),
    ):
        rehearse(tmp_path, prepared_data, recipe, named={"register.metric": name}, **more)


@pytest.mark.parametrize("how", ["an object", "by batch"])
def test_a_metric_that_chooses_the_weights_needs_all_rows(
    tmp_path: Path, prepared_data: requests.PreparedData, how: str
) -> None:
    recipe, more = (OBJECT, {}) if how == "an object" else (BY_BATCH, {"batch_eval_metrics": True})
    chosen = {"eval_strategy": "epoch", "metric_for_best_model": "f1_macro", **more}
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "out"), **chosen)
    Path(asked.recipe.path).write_text(recipe)
    asked = replace(asked, eval_split="test", metrics=read_metrics(["f1_macro"]))
    with pytest.raises(ConfigError, match="batch by batch") as caught:
        tiny.run(asked, kind="in_process")
    assert (caught.value.field, caught.value.value) == ("metric_for_best_model", "f1_macro")
    assert not (tmp_path / "out" / "checkpoints").exists()


ARGS = {"max_steps": 12, "seed": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
BESIDE = ("runtime", "samples_per_second", "steps_per_second", "epoch")  # what is not in metrics.json
RECIPES = {
    "tabular-classification": ("wine", "cultivar", ["f1_macro", "sklearn.metrics:cohen_kappa_score"]),
    "tabular-regression": ("diabetes", "progression", ["r2", "torchmetrics:MeanAbsoluteError"]),
}


@dataclass
class Trained:
    """A recipe by name whose model was trained a little."""

    name: str
    folder: Path
    file: requests.RecipeFile
    data: requests.PreparedData
    metrics: list[str]

    def evaluate(self, **fields: Any) -> dict[str, dict[str, float]]:
        """What the stage writes into metrics.json."""
        output = self.folder / f"evaluated-{len(list(self.folder.iterdir()))}"
        asked = requests.EvaluateRequest(
            output=str(output), recipe=self.file, data=self.data, args=ARGS, model_url=f"{self.folder}/train/model",
            metrics=read_metrics(self.metrics), **{"splits": ("test",), "importance_seconds": 0.0, **fields},
        )  # fmt: skip
        run(asked, kind="in_process")
        found: dict[str, dict[str, float]] = json.loads((output / "metrics.json").read_text())
        return found

    def trainer(self, **args: Any) -> Trainer:
        """A Trainer as a user makes it of the recipe's functions and the exported weights."""
        recipe, data = load(self.file.path, self.file.root), DataInfo(to_record(self.data))
        model = recipe.build_model({}, data)
        model.load_state_dict(load_file(self.folder / "train" / "model" / "model.safetensors"))
        return Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(self.folder / "own"), remove_unused_columns=False, disable_tqdm=True, **{**ARGS, **args}
            ),
            data_collator=recipe.collate_with(data),
            compute_metrics=NamedMetrics(recipe.compute_metrics_with(data), read_metrics(self.metrics)),
        )

    def split(self) -> ArrowSplit:
        return ArrowSplit(to_record(self.data), "test")


@pytest.fixture(scope="module", params=list(RECIPES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, (table, label, metrics) = tmp_path_factory.mktemp("same"), RECIPES[request.param]
    file = requests.RecipeFile(str(recipe_file(request.param)), str(folder))
    source = folder / "rows.csv"
    # With a column of three values, by which rows are sliced.
    head, *rows = (ROOT / "examples" / "tabular" / f"{table}.csv").read_text().splitlines()
    source.write_text("\n".join([f"site,{head}", *(f"{'abc'[number % 3]},{row}" for number, row in enumerate(rows))]))
    options = {"label": label, "split": {"validation": 0.2, "test": 0.4, "seed": 0}}
    asked = requests.PrepareRequest(output=str(folder / "data"), recipe=file, options=options, sources=(str(source),))
    data = tiny.prepare(asked)
    run(requests.TrainRequest(output=str(folder / "train"), recipe=file, data=data, args=ARGS), kind="in_process")
    return Trained(request.param, folder, file, data, metrics)


def test_columns_have_importance_as_the_table_had_them(trained: Trained) -> None:
    def outcomes(seconds: float) -> tuple[Any, Any]:
        metrics = trained.evaluate(importance_seconds=seconds)
        folder = max(trained.folder.glob("evaluated-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        return metrics, json.loads((folder / "outcomes" / "test.json").read_text())

    metrics, shown = outcomes(60.0)
    found = shown["importance"]
    assert (found["rows"], found["left_out"]) == (len(trained.split()), 0)
    assert found["metric"] == read_metrics(trained.metrics)[0].result
    names, losses, low, high = zip(*found["columns"], strict=True)
    assert sorted(names) == sorted(name for name in trained.split().column_names if name != "labels")
    assert list(losses) == sorted(losses, reverse=True)
    assert losses[0] > 0.01 and all(a <= b <= c for a, b, c in zip(low, losses, high, strict=True))
    # The site says nothing: an interval that holds 0.
    site = dict(zip(names, zip(low, high, strict=True), strict=True))["site"]
    assert site[0] <= 0 <= site[1]
    without, shown = outcomes(0)
    assert "importance" not in shown
    assert metrics == without


def measured(trainer: Trainer, rows: Any) -> dict[str, float]:
    found = trainer.evaluate(eval_dataset=rows)
    names = {name: name.removeprefix("eval_") for name in found}
    return {names[name]: value for name, value in found.items() if names[name] not in BESIDE}


def test_the_metrics_of_a_split_are_those_of_the_trainer(trained: Trained) -> None:
    stage = trained.evaluate()["test"]
    assert not [name for name in stage if "/" in name], "slices come where they are asked for"
    own = measured(trained.trainer(), trained.split())
    assert set(own) >= {"loss", *(each.result for each in read_metrics(trained.metrics))}
    assert own == stage, "digit by digit"
    # Batches of another size give other roundings of the loss and nothing else.
    other = measured(trained.trainer(per_device_eval_batch_size=50), trained.split())
    assert other == pytest.approx(stage, rel=1e-5)


def test_the_metrics_of_a_slice_are_those_of_its_rows(trained: Trained) -> None:
    stage = trained.evaluate(slices=("site",))["test"]
    split, trainer = trained.split(), trained.trainer()
    sites = [split[row]["site"] for row in range(len(split))]
    assert set(sites) == set("abc")
    assert list(split.column_values("site")) == sites
    for site in "abc":
        rows: Any = Subset(split, [row for row, value in enumerate(sites) if value == site])  # type: ignore[arg-type]
        own = measured(trainer, rows)
        own.pop("loss")  # it is the model's, and no metric of compute_metrics
        sliced = {name.removesuffix(f"/site/{site}"): each for name, each in stage.items() if name.endswith(f"/{site}")}
        assert sliced.pop("rows") == len(rows)
        assert sliced == pytest.approx(own, rel=1e-6)
    assert {name: value for name, value in stage.items() if "/" not in name} == measured(trainer, split)


def test_slices_have_intervals_where_confidence_is_set(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"slices": ("site",), "confidence": 0.9, "resamples": 25}
    digested: list[str] = []
    real = worker_evaluate.digest_rows

    def digest(data: requests.PreparedData, split: str) -> str:
        digested.append(split)
        return real(data, split)

    monkeypatch.setattr(worker_evaluate, "digest_rows", digest)
    stage = trained.evaluate(**more)["test"]
    assert digested == ["test"], "the digest of a split's rows is computed once"
    name = read_metrics(trained.metrics)[1].result
    for site in "abc":
        low, value, high = (stage[f"{each}/site/{site}"] for each in (f"{name}_low", name, f"{name}_high"))
        assert low < value < high
    # Fewer rows know less: each slice has a third of them.
    assert stage[f"{name}_high/site/a"] - stage[f"{name}_low/site/a"] > stage[f"{name}_high"] - stage[f"{name}_low"]
    assert f"rows_low/site/{site}" not in stage
    assert trained.evaluate(**more)["test"] == stage, "drawn by the rows, and by nothing else"
