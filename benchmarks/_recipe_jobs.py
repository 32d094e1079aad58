"""The project that `trainflow init` writes for a recipe, as rows and settings for a training in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import templates, write_project

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Job:
    """One training: the rows that the recipe has prepared, and the settings of its spec.

    Attributes:
        splits: split -> rows.
        model: the spec's `train.model`.
        rate: its learning rate.
        batch: rows of a batch.
    """

    name: str
    recipe: Recipe
    splits: Mapping[str, list[dict[str, Any]]]
    data: DataInfo
    model: Mapping[str, Any]
    rate: float
    batch: int
    steps: int
    seed: int
    folder: Path

    def build(self) -> Any:
        """A new model, from the weights that the seed draws."""
        torch.manual_seed(self.seed)
        return self.recipe.build_model(self.model, self.data)

    def settings(self) -> dict[str, Any]:
        """The arguments of a Trainer, of this library or of transformers."""
        plain = trainer_settings(
            str(self.folder / "run"), steps=self.steps, seed=self.seed, batch=self.batch, rate=self.rate
        )
        return {**plain, "per_device_eval_batch_size": 32}


def trainer_settings(folder: str, *, steps: int, seed: int, batch: int, rate: float) -> dict[str, Any]:
    """The arguments of a Trainer that saves, logs and evaluates nothing by itself."""
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def prepare_job(name: str, folder: Path, *, steps: int | None, rows: int | None) -> Job:
    """Write the project of a recipe, and prepare its rows.

    Args:
        steps: optimizer steps; None: those of the spec.
        rows: the most rows of the test; None: all of them.
    """
    project = folder / "project"
    write_project(project, name)
    spec = parse_yaml((project / "pipeline.yaml").read_text())
    recipe = load(recipe_file(name), project)
    out = PrepareOutput(Store.open(folder / "out"), [str(project / templates()[name]["data"])])
    splits = {
        split: [dict(row) for row in each] for split, each in recipe.prepare(spec["prepare"]["options"], out).items()
    }
    splits["test"] = splits["test"][:rows]
    counts = {split: {"rows": len(each)} for split, each in splits.items()}
    files = [vars(entry) for entry in out.files()]
    data = DataInfo({"url": str(folder / "out"), "info": out.checked_info(), "splits": counts, "files": files})
    args, model = spec["train"]["args"], spec["train"]["model"]
    rate, batch = float(args["learning_rate"]), args["global_batch_size"]
    return Job(name, recipe, splits, data, model, rate, batch, steps or args["max_steps"], 0, folder)


def run_recipe(job: Job) -> dict[str, float]:
    """Train the recipe with the settings of its spec; the metrics on the test, with their intervals."""
    recipe = job.recipe
    seed = "5eed" * 16  # resamples the same rows for every job
    remembered = Remembered(recipe.compute_metrics_with(job.data) or (lambda p: {}), seed)
    trainer: Any = recipe.trainer_class(Trainer)(
        model=job.build(),
        args=TrainingArguments(**job.settings()),
        data_collator=recipe.collate_with(job.data),
        train_dataset=job.splits["train"],
        compute_metrics=remembered,
        compute_loss_func=recipe.compute_loss_func,
        preprocess_logits_for_metrics=recipe.preprocess_logits_for_metrics,
    )
    trainer.train()
    found = trainer.evaluate(eval_dataset=job.splits["test"])
    metrics = {name.removeprefix("eval_"): float(value) for name, value in found.items()}
    return metrics | remembered.intervals(remembered.resampled(RESAMPLES), CONFIDENCE)
