"""The stage evaluate gives the numbers of `Trainer.evaluate` on the same rows: of a split, and of its slices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.utils.data import Subset

from tests.support.repository import ROOT
from tests.support.tiny import run
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.data.shards import ArrowSplit
from trainer_lib.evaluation.named_metrics import NamedMetrics
from trainer_lib.metric_names import read_metrics
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, load
from trainer_lib.records import to_record
from trainer_lib.requests import EvaluateRequest, PreparedData, PrepareRequest, RecipeFile, TrainRequest

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
    file: RecipeFile
    data: PreparedData
    metrics: list[str]

    def evaluate(self, **fields: Any) -> dict[str, dict[str, float]]:
        """What the stage writes into metrics.json."""
        output = self.folder / f"evaluated-{len(list(self.folder.iterdir()))}"
        asked = EvaluateRequest(
            output=str(output), recipe=self.file, data=self.data, args=ARGS, model_url=f"{self.folder}/train/model",
            metrics=read_metrics(self.metrics), **{"splits": ("test",), **fields},
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
    file = RecipeFile(str(recipe_file(request.param)), str(folder))
    source = folder / "rows.csv"
    # With a column of three values, by which rows are sliced.
    head, *rows = (ROOT / "examples" / "tabular" / f"{table}.csv").read_text().splitlines()
    source.write_text("\n".join([f"site,{head}", *(f"{'abc'[number % 3]},{row}" for number, row in enumerate(rows))]))
    options = {"label": label, "split": {"validation": 0.2, "test": 0.4, "seed": 0}}
    asked = PrepareRequest(output=str(folder / "data"), recipe=file, options=options, sources=(str(source),))
    made = run(asked, kind="in_process")
    data = PreparedData(asked.output, made.splits, made.info, made.files)
    run(TrainRequest(output=str(folder / "train"), recipe=file, data=data, args=ARGS), kind="in_process")
    return Trained(request.param, folder, file, data, metrics)


def measured(trainer: Trainer, rows: Any) -> dict[str, float]:
    found = trainer.evaluate(eval_dataset=rows)
    names = {name: name.removeprefix("eval_") for name in found}
    return {names[name]: value for name, value in found.items() if names[name] not in BESIDE}


def test_the_metrics_of_a_split_are_those_of_the_trainer(trained: Trained) -> None:
    stage = trained.evaluate()["test"]
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
    whole = {name: value for name, value in stage.items() if "/" not in name}
    assert whole == measured(trainer, split)


def test_slices_have_intervals_where_confidence_is_set(trained: Trained) -> None:
    more = {"slices": ("site",), "confidence": 0.9, "resamples": 50}
    stage = trained.evaluate(**more)["test"]
    name = read_metrics(trained.metrics)[1].result
    for site in "abc":
        low, value, high = (stage[f"{each}/site/{site}"] for each in (f"{name}_low", name, f"{name}_high"))
        assert low < value < high
    # Fewer rows know less: each slice has a third of them.
    assert stage[f"{name}_high/site/a"] - stage[f"{name}_low/site/a"] > stage[f"{name}_high"] - stage[f"{name}_low"]
    assert f"rows_low/site/{site}" not in stage
    assert trained.evaluate(**more)["test"] == stage, "drawn by the rows, and by nothing else"


def test_what_is_written_has_no_slices_unless_they_are_asked_for(trained: Trained) -> None:
    assert not [name for name in trained.evaluate()["test"] if "/" in name]
