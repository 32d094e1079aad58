"""Results of the recipes, next to baselines without a model and to scripts by hand on the same rows and seeds.

    python -m benchmarks.recipe_results --size full --save
    python -m benchmarks.recipe_results --size full --only embeddings

The recipe has the project that `trainflow init` writes, unchanged. The script has the same rows, tokenizer, model,
starting weights, optimizer steps, batch and learning rate; the rest is its own. For texts and images it is what people
write with the Trainer of transformers, after the scripts that transformers ships; for tables and series scikit-learn
(which has no seed); for embeddings a loop in torch.

Reported for each recipe: its metric on the held-out rows by seed, that of the script, that of what needs no model, and
the interval of the recipe's at seed 0, by a bootstrap over these rows.

Wanted: the script's mean within the seeds' noise of the recipe's, or worse.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import _plain_scripts, _transformers_scripts
from benchmarks._recipe_jobs import CONFIDENCE, Job, prepare_job, run_recipe
from benchmarks._result import arguments, publish

SIZES: dict[str, tuple[int | None, int | None, int]] = {"smallest": (3, 16, 1), "full": (None, None, 3)}
"""Optimizer steps, rows of the test (None: those of the project), and seeds."""
TASKS: dict[str, tuple[str, str, str, Callable[[Job], float]]] = {
    "text-classification": ("accuracy", "majority_accuracy", "transformers", _transformers_scripts.classify_texts),
    "token-classification": ("accuracy", "usual_accuracy", "transformers", _transformers_scripts.tag_words),
    "question-answering": ("f1", "usual_f1", "transformers", _transformers_scripts.answer_questions),
    "sequence-to-sequence": ("chrf", "lead_chrf", "transformers", _transformers_scripts.write_texts),
    "causal-language-modeling": ("nats_per_token", "", "transformers", _transformers_scripts.continue_texts),
    "preference-optimization": ("accuracy", "length_accuracy", "transformers", _transformers_scripts.prefer_answers),
    "image-classification": ("accuracy", "majority_accuracy", "transformers", _transformers_scripts.classify_images),
    "embeddings": ("mrr", "overlap_mrr", "torch", _plain_scripts.embed),
    "tabular-classification": ("accuracy", "majority_accuracy", "scikit-learn", _plain_scripts.classify_table),
    "tabular-regression": ("rmse", "mean_rmse", "scikit-learn", _plain_scripts.estimate_table),
    "time-series-forecasting": ("mase", "seasonal_mase", "scikit-learn", _plain_scripts.forecast),
}
"""Recipe -> its metric, that of what needs no model, what the script is written with, and the script."""


def measure(name: str, steps: int | None, rows: int | None, seeds: int) -> dict[str, Any]:
    """Train the recipe and the script with each seed, on one preparation."""
    metric, trivial, library, script = TASKS[name]
    results: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        job = prepare_job(name, Path(folder), steps=steps, rows=rows)
        found: dict[str, float] = {}
        for seed in range(seeds):
            own = run_recipe(replace(job, seed=seed))
            found = found or own
            results.append({"seed": seed, "recipe": own[metric], "script": script(replace(job, seed=seed))})
            print(name, results[-1], file=sys.stderr, flush=True)
    # The unigram model has no metric of its own unit.
    without = found[trivial] if trivial else found[metric] + found["nats_below_unigram"]
    mean = {each: statistics.mean(result[each] for result in results) for each in ("recipe", "script")}
    return {
        "metric": metric,
        "rows": len(job.splits["test"]),
        "without_a_model": without,
        "interval": [found.get(f"{metric}_low"), found.get(f"{metric}_high")],
        "script_is_written_with": library,
        "mean": mean,
        "results": results,
    }


def main() -> None:
    """Measure the recipes, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES), list(TASKS))
    steps, rows, seeds = SIZES[chosen.size]
    torch.set_num_threads(1)
    names = [chosen.only] if chosen.only else list(TASKS)
    recipes = {name: measure(name, steps, rows, seeds) for name in names}
    publish("recipe_results", chosen.size, {"confidence": CONFIDENCE, "seeds": seeds, "recipes": recipes}, chosen.save)


if __name__ == "__main__":
    main()
