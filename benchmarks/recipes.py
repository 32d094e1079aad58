"""The training of a recipe by name beside that of a script by hand with the Trainer of transformers.

    python -m benchmarks.recipes --size full --save

Both train the same small BERT, from the same random weights, on the rows and with the tokenizer that the recipe has
prepared; the order of the rows is each library's own for the seed. The script tokenizes all rows before it begins, as
people do, and that does not count; the recipe tokenizes the rows of a batch when it makes the batch, and that does.
Runs alternate in this process, on one thread, after one run of each that does not count. Nothing is saved or logged.

Reported, for text-classification and token-classification:

- `seconds` of `Trainer.train()` as medians and quartiles, and processor seconds; `ratio`: the recipe's to the script's,
  pair by pair, and of the quietest runs, since other load on the machine only adds.
- `results`: accuracy on the held-out rows by seed, for the recipe, the script, and what needs no model.

Wanted: a ratio of at most 1.1.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks._recipe_jobs import trainer_settings
from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import read_sample

SIZES = {"smallest": (10, 1), "full": (200, 5)}  # optimizer steps a run, counted runs
MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH = 16
LENGTH = 64  # tokens of a row
IGNORED = -100
Prepared = tuple[Recipe, dict[str, list[dict[str, Any]]], DataInfo]
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text-classification": ("modules.csv", {"text": "line", "label": "module"}, "majority_accuracy"),
    "token-classification": ("code_lines.jsonl", {}, "usual_accuracy"),
}
"""Recipe -> its sample, the options of prepare, and the metric of what needs no model."""


def prepare(name: str, folder: Path) -> Prepared:
    """The rows of a recipe, as its prepare makes them."""
    file, options, _ = TASKS[name]
    (folder / file).write_text(read_sample(file))
    recipe = load(recipe_file(name), folder)
    out = PrepareOutput(Store.open(folder / "out"), [str(folder / file)])
    split = {"validation": 0, "test": 0.3}
    given = {**options, "vocabulary": 2000, "max_length": LENGTH, "split": split}
    splits = {each: [dict(row) for row in rows] for each, rows in recipe.prepare(given, out).items()}
    counts = {each: {"rows": len(rows)} for each, rows in splits.items()}
    files = [vars(entry) for entry in out.files()]
    data = {"url": str(folder / "out"), "info": out.checked_info(), "splits": counts, "files": files}
    return recipe, splits, DataInfo(data)


def by_recipe(name: str, prepared: Prepared, steps: int, seed: int) -> tuple[float, float, dict[str, float]]:
    """Train the recipe; wall and processor seconds, and its metrics."""
    recipe, splits, data = prepared
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        trainer: Any = recipe.trainer_class(Trainer)(
            model=recipe.build_model({"config": MODEL}, data),
            args=TrainingArguments(**_settings(folder, steps, seed)),
            data_collator=recipe.collate_with(data),
            train_dataset=splits["train"],
            compute_metrics=recipe.compute_metrics_with(data),
        )
        wall, cpu = _timed(trainer.train)
        found = trainer.evaluate(eval_dataset=splits["test"])
    metrics = {"accuracy": found["eval_accuracy"], "without_a_model": found[f"eval_{TASKS[name][2]}"]}
    return wall, cpu, metrics


def by_script(name: str, prepared: Prepared, steps: int, seed: int) -> tuple[float, float, dict[str, float]]:
    """Train as a script of transformers does; wall and processor seconds, and the accuracy."""
    recipe, splits, data = prepared
    tokenizer = kept_tokenizer(data)
    is_words = name == "token-classification"
    rows: dict[str, Any] = {
        split: [tokenize(row, tokenizer, is_words=is_words) for row in splits[split]] for split in splits
    }
    collator = transformers.DataCollatorForTokenClassification if is_words else transformers.DataCollatorWithPadding
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        trainer = transformers.Trainer(
            model=recipe.build_model({"config": MODEL}, data),
            args=transformers.TrainingArguments(**_settings(folder, steps, seed)),
            data_collator=collator(tokenizer),
            train_dataset=rows["train"],
            compute_metrics=measure_accuracy,
        )
        wall, cpu = _timed(trainer.train)
        accuracy = trainer.evaluate(eval_dataset=rows["test"])["eval_accuracy"]
    return wall, cpu, {"accuracy": float(accuracy)}


def tokenize(row: dict[str, Any], tokenizer: Any, *, is_words: bool, length: int = LENGTH) -> dict[str, Any]:
    """The features of a row, as the scripts of transformers make them: a text or the first token of each word."""
    if not is_words:
        return {**tokenizer(row["line"], truncation=True, max_length=length), "labels": row["labels"]}
    made = tokenizer(row["words"], is_split_into_words=True, truncation=True, max_length=length)
    words = made.word_ids()
    labels = [
        IGNORED if word is None or (place and words[place - 1] == word) else row["labels"][word]
        for place, word in enumerate(words)
    ]
    return {**made, "labels": labels}


def measure_accuracy(evaluation: Any) -> dict[str, float]:
    """The share of labels that are right, but for those that do not count."""
    guessed, labels = np.asarray(evaluation.predictions).argmax(axis=-1), np.asarray(evaluation.label_ids)
    return {"accuracy": float((guessed == labels)[labels != IGNORED].mean())}


def _timed(train: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    train()
    return time.perf_counter() - wall, time.process_time() - cpu


def _settings(folder: str, steps: int, seed: int) -> dict[str, Any]:
    return trainer_settings(folder, steps=steps, seed=seed, batch=BATCH, rate=1e-3)


def measure(name: str, steps: int, runs: int) -> dict[str, Any]:
    """Alternate the recipe and the script on one preparation."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        prepared = prepare(name, Path(folder))
        taken: dict[str, list[tuple[float, float]]] = {"recipe": [], "script": []}
        results: list[dict[str, Any]] = []
        for run in range(-1, runs):
            seed = max(run, 0)
            both = {"recipe": by_recipe(name, prepared, steps, seed), "script": by_script(name, prepared, steps, seed)}
            if run < 0:
                continue  # the first of each pays for what torch and the tokenizer set up
            for each, (wall, cpu, _) in both.items():
                taken[each].append((wall, cpu))
            results.append({"seed": seed, **{each: metrics for each, (_, _, metrics) in both.items()}})
    found: dict[str, Any] = {"results": results}
    for index, unit in enumerate(("seconds", "cpu_seconds")):
        values = {each: [pair[index] for pair in pairs] for each, pairs in taken.items()}
        found[unit] = {each: spread(times) for each, times in values.items()}
        ratios = [own / other for own, other in zip(values["recipe"], values["script"], strict=True)]
        found[f"ratio_{unit}"] = {**spread(ratios), "quietest": min(values["recipe"]) / min(values["script"])}
    return found


def main() -> None:
    """Measure both recipes, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    steps, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    results = {name: measure(name, steps, runs) for name in TASKS}
    worst = max(found["ratio_cpu_seconds"]["quietest"] for found in results.values())
    held_out = {
        name: {
            each: statistics.mean(result[each]["accuracy"] for result in found["results"])
            for each in ("recipe", "script")
        }
        for name, found in results.items()
    }
    outcome = {"steps": steps, "runs": runs, "recipes": results, "mean_accuracy": held_out, "worst_ratio": worst}
    publish("recipes", chosen.size, outcome, chosen.save)


if __name__ == "__main__":
    main()
