"""Recipes by name in the test's own process: rows prepared from a small file, and a Trainer that trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store

Prepared = tuple[Recipe, dict[str, list[Any]], DataInfo]


def prepare_file(name: str, file: Path, content: str, options: dict[str, Any]) -> Prepared:
    """The recipe `name`, the rows of each split that it prepares from a file, and what it notes about the data."""
    file.write_text(content)
    return prepare_sources(name, [str(file)], options, file.parent)


def prepare_sources(name: str, sources: Sequence[str], options: dict[str, Any], folder: Path) -> Prepared:
    """The recipe `name`, the rows of each split that it prepares from sources, and what it notes about the data."""
    recipe = load(recipe_file(name), folder)
    out = PrepareOutput(Store.open(folder / "out"), sources)
    splits = {split: [dict(row) for row in rows] for split, rows in recipe.prepare(options, out).items()}
    files = [vars(entry) for entry in out.files()]
    rows = {split: {"rows": len(each)} for split, each in splits.items()}
    data = {"url": str(folder / "out"), "info": out.checked_info(), "splits": rows, "files": files}
    return recipe, splits, DataInfo(data)


def trainer_of(
    recipe: Recipe,
    data: DataInfo,
    model: Any,
    folder: Path,
    rows: Sequence[Any],
    steps: int,
    *,
    base: type[Trainer] = Trainer,
    **args: Any,
) -> Any:
    """A Trainer of the recipe for so many steps on the CPU, which saves and reports nothing."""
    return recipe.trainer_class(base)(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            **args,
        ),
        data_collator=recipe.collate_with(data),
        train_dataset=rows,
        compute_metrics=recipe.compute_metrics_with(data),
    )
