"""Recipes by name in the test's own process: rows prepared from a small file, and a Trainer that trains on them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.resuming import prove
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store

Prepared = tuple[Recipe, dict[str, list[Any]], DataInfo]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Sizes that weights of 4 bits allow."""
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_load = functools.cache(load)


@dataclass(frozen=True)
class RecipeCase:
    """A recipe by name, the file that its tests write for it, and the options that most of them have."""

    name: str
    file: str = "data.csv"
    options: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, where: Path, content: str, /, **options: Any) -> Prepared:
        """What the recipe prepares of a file with this content below `where`."""
        (where / self.file).write_text(content)
        return prepare_sources(self.name, [str(where / self.file)], {**self.options, **options}, where)

    def refused(self, where: Path, content: str, /, **options: Any) -> TrainflowError:
        return refusal(lambda: self.prepare(where, content, **options))


def jsonl(*rows: Any) -> str:
    """A file with a row a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def refusal(call: Callable[[], object]) -> TrainflowError:
    """The error about bad input that a call raises; it says what to do."""
    with pytest.raises(TrainflowError) as caught:
        call()
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


def prepare_sources(
    name: str, sources: Sequence[str], options: Mapping[str, Any], folder: Path, mixture: Sequence[str] = ()
) -> Prepared:
    """The recipe `name`, the rows of each split that it prepares from sources, and what it notes about the data."""
    recipe = _load(recipe_file(name), "no project")
    out = PrepareOutput(Store.open(folder / "out"), sources, mixture)
    splits = {split: [dict(row) for row in rows] for split, rows in recipe.prepare(options, out).items()}
    rows = {split: {"rows": len(each)} for split, each in splits.items()}
    data = {"url": str(folder / "out"), "info": out.checked_info(), "splits": rows}
    return recipe, splits, DataInfo(data | {"files": list(map(vars, out.files()))})


def collate_of(prepared: Prepared) -> Callable[..., Any]:
    """The recipe's function that makes a batch of rows."""
    collate = prepared[0].collate_with(prepared[2])
    assert collate is not None
    return collate


def trainer_of(
    recipe: Recipe,
    data: DataInfo,
    model: Any,
    folder: Path,
    rows: Sequence[Any],
    steps: int,
    *,
    base: type[Trainer] = Trainer,
    held_out: Sequence[Any] | None = None,
    callbacks: Sequence[Any] = (),
    **args: Any,
) -> Any:
    """A Trainer of the recipe for so many steps on the CPU, which reports nothing, and saves nothing unless asked."""
    settings = {"save_strategy": "no", "remove_unused_columns": False, "report_to": "none", "disable_tqdm": True}
    return recipe.trainer_class(base)(
        model=model,
        args=TrainingArguments(output_dir=str(folder), max_steps=steps, use_cpu=True, **{**settings, **args}),
        data_collator=recipe.collate_with(data),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=list(callbacks),
        compute_metrics=recipe.compute_metrics_with(data),
        compute_loss_func=recipe.compute_loss_func,
        preprocess_logits_for_metrics=recipe.preprocess_logits_for_metrics,
    )


def trained(prepared: Prepared, folder: Path, model: Mapping[str, Any], steps: int, **args: Any) -> Any:
    """A Trainer of the recipe after so many steps with a model of these options, whose weights a seed gives."""
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = trainer_of(recipe, data, recipe.build_model(model, data), folder, splits["train"], steps, **args)
    trainer.train()
    return trainer


def prove_resume(
    prepared: Prepared, folder: Path, model: Mapping[str, Any], *, rows: int | None = None, steps: int = 3, **args: Any
) -> None:
    """Assert that a training that is stopped at the fifth of 8 steps and resumed ends like one that was not."""
    recipe, splits, data = prepared

    def make(where: Path, *callbacks: Any) -> Any:
        torch.manual_seed(0)
        given: dict[str, Any] = {"save_strategy": "steps", "save_steps": steps, "callbacks": callbacks, **args}
        return trainer_of(recipe, data, recipe.build_model(model, data), where, splits["train"][:rows], 8, **given)

    prove(make, folder, 5)


def save_model(prepared: Prepared, model: Any, folder: Path) -> Path:
    """A folder with a model and its tokenizer, as `save_pretrained` writes them."""
    model.save_pretrained(folder)
    for name in prepared[2].info["tokenizer"]:
        (folder / Path(name).name).write_bytes(prepared[2].read_file(name))
    return folder


def save_base(prepared: Prepared, folder: Path, seed: int = 0, **config: Any) -> Path:
    """A folder with a language model at random and its tokenizer."""
    torch.manual_seed(seed)
    return save_model(prepared, prepared[0].build_model({"config": {**WIDE, **config}}, prepared[2]), folder)
