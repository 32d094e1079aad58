"""Training on conversations next to TRL's SFTTrainer, which trains by the Trainer of transformers.

    python -m benchmarks.conversations --size full --save

Both train the same small Llama, from the same random weights, on the same tokens with the same of them trained: answers
about functions of the standard library, as supervised-fine-tuning prepares them. What comes before training (tokens,
packing) does not count. Ours and theirs alternate in this process, on one thread, after one epoch of each that does not
count. Nothing is saved or logged.

padded: 16 conversations of a batch in their order, filled up to the longest.
grouped: the same, conversations of similar lengths together.
packed: rows of 512 tokens that conversations share, four to a batch.

Reported for each: tokens a second, those of padding not counted, as median and quartiles; `ratio`: ours to theirs, pair
by pair, in wall and processor seconds; and the loss of the first batch on both sides, which must agree.

Wanted: a ratio of at least 1.0. Without TRL it says so, and measures nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks._recipe_jobs import trainer_settings
from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import read_sample

SIZES = {"smallest": (48, 1, ("padded", "packed")), "full": (80, 3, ("padded", "packed", "grouped"))}
"""Conversations, counted epochs of each, and ways."""
MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
LENGTH, BATCH, PACKED_BATCH = 512, 16, 4
NO_TARGET = -100


class Rows(NamedTuple):
    """Conversations as tokens, and the recipe that has prepared them."""

    recipe: Recipe
    data: DataInfo
    rows: list[dict[str, Any]]

    @property
    def tokens(self) -> int:
        """The tokens of an epoch."""
        return sum(len(row["input_ids"]) for row in self.rows)


def prepare(folder: Path, count: int, pack: list[str], *, length: int = LENGTH) -> Rows:
    """The rows of so many conversations, a row each or sharing rows."""
    lines = [json.loads(line) for line in read_sample("code_chats.jsonl").splitlines()[:count]]
    (folder / "chats.jsonl").write_text("".join(json.dumps({**line, "fold": "train"}) + "\n" for line in lines))
    recipe, store = load(recipe_file("supervised-fine-tuning"), folder), Store.open(folder / "-".join(["out", *pack]))
    out = PrepareOutput(store, [str(folder / "chats.jsonl")])
    options = {"vocabulary": 4096, "length": length, "overlong": "cut", "pack": pack}
    rows = recipe.prepare({**options, "split": {"by": "column", "column": "fold"}}, out)["train"]
    made = [dict(row) for row in rows]
    files = [vars(entry) for entry in out.files()]
    known = {"url": store.url, "info": out.checked_info(), "splits": {"train": {"rows": len(made)}}, "files": files}
    return Rows(recipe, DataInfo(known), made)


def ours(way: str, all_rows: Mapping[bool, Rows], folder: str) -> Any:
    """The recipe's Trainer."""
    recipe, data, rows = all_rows[way == "packed"]
    torch.manual_seed(0)
    return recipe.trainer_class(Trainer)(
        model=recipe.build_model({"config": MODEL}, data),
        args=TrainingArguments(**settings(way, folder)),
        data_collator=recipe.collate_with(data),
        train_dataset=rows,
    )


def theirs(way: str, all_rows: Mapping[bool, Rows], folder: str) -> Any:
    """TRL's Trainer, which packs by itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    recipe, data, rows = all_rows[False]
    table = [
        {"input_ids": row["input_ids"], "labels": np.where(row["trained"], row["input_ids"], NO_TARGET)} for row in rows
    ]
    given: dict[str, Any] = {"packing": way == "packed", "bf16": False, "max_length": LENGTH}
    torch.manual_seed(0)
    return SFTTrainer(
        model=recipe.build_model({"config": MODEL}, data),
        args=SFTConfig(**settings(way, folder), **given),
        train_dataset=Dataset.from_list(table),
        processing_class=kept_tokenizer(data),
    )


def settings(way: str, folder: str) -> dict[str, Any]:
    """Arguments of an epoch, for either Trainer."""
    plain = trainer_settings(folder, steps=-1, seed=0, batch=PACKED_BATCH if way == "packed" else BATCH, rate=1e-3)
    order = "group_by_length" if way == "grouped" else "sequential"
    return {**plain, "num_train_epochs": 1, "train_sampling_strategy": order}


def epoch(make: Any, way: str, rows: Mapping[bool, Rows]) -> tuple[float, float]:
    """Train an epoch; wall and processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(way, rows, folder)
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        return time.perf_counter() - wall, time.process_time() - cpu


def first_loss(make: Any, way: str, rows: Mapping[bool, Rows]) -> float:
    """The loss of the first batch before training."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(way, rows, folder)
        batch = next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            return float(trainer.compute_loss(trainer.model, batch))


def measure(way: str, rows: Mapping[bool, Rows], runs: int) -> dict[str, Any]:
    """Alternate both on one preparation."""
    taken: dict[str, list[tuple[float, float]]] = {"trainflow": [], "trl": []}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        losses = [first_loss(make, way, rows) for make in (ours, theirs)]
        if way == "padded" and abs(losses[0] - losses[1]) > 1e-6:
            raise ValueError(f"They train on different things: {losses}")
        for run in range(-1, runs):
            both = {"trainflow": epoch(ours, way, rows), "trl": epoch(theirs, way, rows)}
            if run >= 0:
                for name, seconds in both.items():
                    taken[name].append(seconds)
    pairs = list(zip(taken["trainflow"], taken["trl"], strict=True))
    return {
        "tokens_per_second": {
            name: spread([rows[False].tokens / wall for wall, _ in each]) for name, each in taken.items()
        },
        "ratio": spread([other[0] / one[0] for one, other in pairs]),
        "ratio_of_processor_seconds": spread([other[1] / one[1] for one, other in pairs]),
        "first_loss": dict(zip(taken, losses, strict=True)),
    }


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed, so there is nothing to compare with: pip install --no-deps trl")
        return
    count, runs, ways = SIZES[chosen.size]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = {shares: prepare(Path(folder), count, ["train"] * shares) for shares in (False, True)}
        result = {way: measure(way, rows, runs) for way in ways}
    facts = {"trl": importlib.metadata.version("trl"), "conversations": count, "tokens": rows[False].tokens}
    publish("conversations", chosen.size, {**facts, "ways": result}, chosen.save)


if __name__ == "__main__":
    main()
