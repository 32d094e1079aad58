"""The cost of packing in prepare, and its gain in training.

    python -m benchmarks.packing --size full --save

prepare: the files of the standard library are tokenized by a byte-level tokenizer that is learned from them, on one
thread: the tokenizer alone on batches of 64 files, and with packing, alternating. Reported: seconds (median and
quartiles), their ratio, and the share of the rows' positions that hold a token, for several lengths of a row.

train: texts with log-normal lengths (median 60 tokens, sigma 0.8, cut at 512) train a small Llama for one epoch, in a
random order and grouped by length, padded to the longest of 16, in a random order with the 16 end to end in one row
("flat"), and packed into rows of 512. The rows of a packed batch are so many that it has as many real tokens as a
padded one. Reported: real tokens a second (median and quartiles), the ratio to the random order, and the loss per token
on held-out texts, unpacked.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read when the tokenizer is first used

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._result import arguments, publish, spread
from trainer_lib import DataCollatorWithFlattening, Trainer, TrainingArguments, set_seed
from trainer_lib.recipes.texts.documents import read_documents
from trainer_lib.recipes.texts.packed_batches import collate_documents, collate_packed
from trainer_lib.recipes.texts.packing import Document, new_counts, pack_documents
from trainer_lib.recipes.texts.tokenizing import learn_byte_tokenizer, tokenize_documents

LENGTHS = (256, 1024, 4096)
ROW, BATCH, VOCABULARY = 512, 16, 1_000
SIZES = {"smallest": (100, 1, 64), "full": (100_000, 5, 4_000)}  # files of the library, runs, texts

Row = dict[str, Any]


def prepare(files: int, runs: int) -> dict[str, Any]:
    """Tokenize and pack the standard library's source."""
    found = read_documents(["stdlib:"], rename={}, separator=None, field="sources")
    texts = [document for document, _ in zip(found, range(files), strict=False)]
    tokenizer = learn_byte_tokenizer((document.text for document in texts), vocabulary=4096)
    used, taken = {}, {"tokenizer": [], "packed": []}  # type: dict[str, Any], dict[str, list[float]]
    for length in LENGTHS:
        counts = new_counts()
        documents = tokenize_documents(texts, tokenizer)
        rows = sum(1 for _ in pack_documents(documents, length=length, overlong="split", packed=True, counts=counts))
        used[str(length)] = counts["tokens_out"] / (rows * length)
    for _ in range(runs):
        taken["tokenizer"].append(_seconds(lambda: _tokenize(tokenizer, texts)))
        taken["packed"].append(_seconds(lambda: _pack(tokenizer, texts)))
    ratio = [alone / whole for alone, whole in zip(taken["tokenizer"], taken["packed"], strict=True)]
    return {
        "files": len(texts),
        "tokens": counts["tokens_in"],
        "positions_used": used,
        "seconds": {name: spread(values) for name, values in taken.items()},
        "speed_of_the_tokenizers": spread(ratio),
    }


def _tokenize(tokenizer: Any, texts: list[Any]) -> None:
    for start in range(0, len(texts), 64):
        some = [each.text for each in texts[start : start + 64]]
        tokenizer(some, return_attention_mask=False, return_token_type_ids=False, verbose=False)


def _pack(tokenizer: Any, texts: list[Any]) -> None:
    documents = tokenize_documents(texts, tokenizer)
    for _ in pack_documents(documents, length=1024, overlong="split", packed=True, counts=new_counts()):
        pass


def _seconds(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Rows(Dataset[Row]):
    """Rows in memory."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def texts_of(count: int, seed: int) -> list[np.ndarray]:
    """Texts of tokens, each of which says with a probability of 0.8 which one follows."""
    random = np.random.default_rng(seed)
    texts = []
    for length in np.clip(random.lognormal(np.log(60), 0.8, count), 4, ROW).astype(int):
        steps = np.where(random.random(length) < 0.8, 7, random.integers(1, VOCABULARY, length))
        texts.append(1 + np.cumsum(steps) % (VOCABULARY - 1))
    return texts


def rows_of(texts: list[np.ndarray], *, packed: bool) -> list[Row]:
    """Texts as rows, packed or not."""
    documents = (Document(str(number), text) for number, text in enumerate(texts))
    return list(pack_documents(documents, length=ROW, overlong="refuse", packed=packed, counts=new_counts()))


def epoch(way: str, texts: list[np.ndarray], held_out: list[np.ndarray]) -> tuple[float, float]:
    """Return (real tokens a second, loss per token on held-out texts) of one epoch."""
    packed = way == "packed"
    rows = rows_of(texts, packed=packed)
    tokens = sum(map(len, texts))
    batch = max(1, round(BATCH * len(rows) / len(texts))) if packed else BATCH
    set_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **shape))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=BATCH,
            train_sampling_strategy=way if way == "group_by_length" else "random",
            learning_rate=3e-3,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model=model, args=args, train_dataset=Rows(rows))
        padded = partial(collate_documents, pad=0)
        collators: dict[str, Any] = {
            "packed": partial(collate_packed, pad=0, isolate="positions"),
            "flat": cast(Any, DataCollatorWithFlattening)(),
        }
        trainer.data_collator = collators.get(way, padded)
        seconds = trainer.train().metrics["train_runtime"]
        trainer.data_collator = padded
        loss = trainer.evaluate(eval_dataset=Rows(rows_of(held_out, packed=False)))["eval_loss"]
    return tokens / seconds, loss


def train(count: int, runs: int) -> dict[str, Any]:
    """Train alternating epochs."""
    texts, held_out = texts_of(count, 0), texts_of(max(32, count // 10), 1)
    ways = ("random", "group_by_length", "flat", "packed")
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(runs):
        for way in ways:
            taken[way].append(epoch(way, texts, held_out))
    return {
        way: {
            "tokens_per_second": spread([speed for speed, _ in values]),
            "to_random": spread([a[0] / b[0] for a, b in zip(values, taken["random"], strict=True)]),
            "held_out_loss": spread([loss for _, loss in values]),
        }
        for way, values in taken.items()
    }


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    files, runs, texts = SIZES[chosen.size]
    torch.set_num_threads(1)
    result = {"prepare": prepare(files, runs), "train": train(texts, runs)}
    publish("packing", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
