"""Scripts with the Trainer of transformers for each task, after the scripts that transformers ships.

Model, rows and tokenizer are those of a `Job`; features, collators, metrics and what follows a prediction are the
script's own. Each function trains, and returns its metric on the test.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks._recipe_jobs import Job
from benchmarks.recipes import measure_accuracy, tokenize
from trainer_lib.recipes.question_answering import score_answer
from trainer_lib.recipes.sequence_to_sequence import score_text
from trainer_lib.recipes.tables.image_files import mean_and_spread
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer

_BEST = 20  # starts and ends that run_qa tries
_LONGEST_ANSWER = 30  # tokens, by default there and here
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def classify_texts(job: Job) -> float:
    """As run_classification: accuracy."""
    return _classify(job, transformers.DataCollatorWithPadding, is_words=False)


def tag_words(job: Job) -> float:
    """As run_ner: accuracy over words."""
    return _classify(job, transformers.DataCollatorForTokenClassification, is_words=True)


def _classify(job: Job, collator: Any, *, is_words: bool) -> float:
    tokenizer, length = kept_tokenizer(job.data), job.data.info["max_length"]
    rows: dict[str, Any] = {
        split: [tokenize(row, tokenizer, is_words=is_words, length=length) for row in job.splits[split]]
        for split in ("train", "test")
    }
    trainer = _trainer(job, collator(tokenizer), rows["train"], compute_metrics=measure_accuracy)
    return float(trainer.evaluate(eval_dataset=rows["test"])["eval_accuracy"])


def classify_images(job: Job) -> float:
    """As run_image_classification, with the network of the recipe: accuracy."""
    means, spreads = (torch.tensor(each).view(1, -1, 1, 1) for each in mean_and_spread(job.data.info["counts"]))

    def collate(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.stack([row["pixels"] for row in rows])).permute(0, 3, 1, 2) / 255
        return {"pixel_values": (pixels - means) / spreads, "labels": torch.tensor([row["labels"] for row in rows])}

    trainer = _trainer(job, collate, job.splits["train"], compute_metrics=measure_accuracy)
    return float(trainer.evaluate(eval_dataset=job.splits["test"])["eval_accuracy"])


def answer_questions(job: Job) -> float:
    """As run_qa: the F1 of SQuAD over the answers."""
    tokenizer = kept_tokenizer(job.data)
    train = _windows(job, tokenizer, job.splits["train"])
    for window in train:
        row = job.splits["train"][window.pop("row")]
        window["start_positions"], window["end_positions"] = _positions(window, row, tokenizer)
        del window["characters"]
    trainer = _trainer(job, transformers.DataCollatorWithPadding(tokenizer), train)
    test = _windows(job, tokenizer, job.splits["test"])
    inputs: Any = [{name: window[name] for name in _INPUTS if name in window} for window in test]
    starts, ends = trainer.predict(inputs).predictions
    of_row = defaultdict(list)
    for number, window in enumerate(test):
        of_row[window["row"]].append((window, starts[number], ends[number]))
    scores = []
    for number, row in enumerate(job.splits["test"]):
        answer = _best_answer(of_row[number], row[job.data.info["context"]], tokenizer)
        scores.append(score_answer(answer, row["labels"])[1])
    return float(np.mean(scores))


def _windows(job: Job, tokenizer: Any, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """The windows of all rows: what the model takes, their `row`, and the `characters` of each token of a context."""
    info = job.data.info
    made = tokenizer(
        [row[info["question"]] for row in rows],
        [row[info["context"]] for row in rows],
        truncation="only_second",
        max_length=info["max_length"],
        stride=info["stride"],
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found = []
    for number, row in enumerate(made["overflow_to_sample_mapping"]):
        pairs = zip(made["offset_mapping"][number], made.sequence_ids(number), strict=True)
        characters = [pair if part == 1 else None for pair, part in pairs]
        inputs = {name: made[name][number] for name in _INPUTS if name in made}
        found.append({**inputs, "row": row, "characters": characters})
    return found


def _positions(window: dict[str, Any], row: dict[str, Any], tokenizer: Any) -> tuple[int, int]:
    """The first and the last token of the answer; the first token twice where the window does not have it."""
    nowhere = window["input_ids"].index(tokenizer.cls_token_id)
    first, last = (int(each) for each in row["answer_span"])
    inside = [(place, pair) for place, pair in enumerate(window["characters"]) if pair is not None]
    if first < 0 or not inside or inside[0][1][0] > first or inside[-1][1][1] <= last:
        return nowhere, nowhere
    return (
        max(place for place, (begin, _) in inside if begin <= first),
        min(place for place, (_, behind) in inside if behind > last),
    )


def _best_answer(windows: Sequence[tuple[dict[str, Any], Any, Any]], context: str, tokenizer: Any) -> str:
    """The text of the best span of a row's windows, empty where no answer scores higher."""
    none, found = np.inf, [(-np.inf, "")]
    for window, starts, ends in windows:
        nowhere = window["input_ids"].index(tokenizer.cls_token_id)
        none = min(none, starts[nowhere] + ends[nowhere])
        characters = window["characters"]
        known = len(characters)
        for start in np.argsort(-starts[:known])[:_BEST]:
            for end in np.argsort(-ends[:known])[:_BEST]:
                if characters[start] and characters[end] and start <= end < start + _LONGEST_ANSWER:
                    text = context[characters[start][0] : characters[end][1]]
                    found.append((starts[start] + ends[end], text))
    score, answer = max(found)
    return "" if none > score else answer


def write_texts(job: Job) -> float:
    """As run_translation: chrF of generated texts."""
    tokenizer, info = kept_tokenizer(job.data), job.data.info
    end = tokenizer.eos_token_id

    def features(row: dict[str, Any]) -> dict[str, Any]:
        read = tokenizer(row[info["text"]], max_length=info["max_length"], truncation=True)
        written = tokenizer(text_target=row["labels"], max_length=info["target_length"] - 1, truncation=True)
        mask = read["attention_mask"]
        return {"input_ids": read["input_ids"], "attention_mask": mask, "labels": [*written["input_ids"], end]}

    model = job.build()
    rows: Any = {split: [features(row) for row in job.splits[split]] for split in ("train", "test")}
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(**job.settings(), predict_with_generate=True),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=rows["train"],
    )
    trainer.train()
    tokens = np.asarray(trainer.predict(rows["test"]).predictions)
    tokens = np.where(tokens >= 0, tokens, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return float(
        np.mean([score_text(text, row["labels"])[2] for text, row in zip(texts, job.splits["test"], strict=True)])
    )


def continue_texts(job: Job) -> float:
    """As run_clm: all texts in one line, cut into blocks; nats per token of the test's rows, each alone."""
    length = job.data.info["length"]
    line = np.concatenate([row["input_ids"] for row in job.splits["train"]])
    blocks = [line[start : start + length].tolist() for start in range(0, len(line) - length + 1, length)]
    rows = [{"input_ids": block, "labels": list(block)} for block in blocks]
    model = _trainer(job, transformers.default_data_collator, rows).model
    model.eval()
    nats, targets = 0.0, 0
    with torch.no_grad():
        for row in job.splits["test"]:
            tokens = torch.tensor(np.asarray(row["input_ids"], np.int64))[None]
            if tokens.shape[1] > 1:
                nats += float(model(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
                targets += tokens.shape[1] - 1
    return nats / targets


def prefer_answers(job: Job) -> float:
    """As DPOTrainer of trl, which asks the reference each step: how often the chosen answer has the higher reward."""
    tokenizer, info = kept_tokenizer(job.data), job.data.info
    model, beta = job.build(), job.model["beta"]
    reference = copy.deepcopy(model).eval().requires_grad_(False)

    def collate(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        texts, starts = [], []
        for name in ("chosen", "rejected"):
            for row in rows:
                prompt = tokenizer(row[info["prompt"]])["input_ids"]
                answer = tokenizer(row[info[name]], add_special_tokens=False)["input_ids"]
                texts.append({"input_ids": [*prompt, *answer, tokenizer.eos_token_id][: info["max_length"]]})
                starts.append(len(prompt))
        batch = tokenizer.pad(texts, padding_side="right", return_tensors="pt")
        places = torch.arange(batch["input_ids"].shape[1])
        answers = (places >= torch.tensor(starts)[:, None]) & batch["attention_mask"].bool()
        return {**batch, "answers": answers}

    def log_probabilities(of: Any, inputs: Any) -> torch.Tensor:
        logits = of(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        each = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
        found: torch.Tensor = (each * inputs["answers"][:, 1:]).sum(1)
        return found

    def margins(of: Any, inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            known = log_probabilities(reference, inputs)
        chosen, rejected = (log_probabilities(of, inputs) - known).chunk(2)
        return torch.mul(chosen - rejected, beta)

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return -torch.nn.functional.logsigmoid(margins(model, inputs)).mean()

    arguments = transformers.TrainingArguments(**job.settings())
    Trainer(model=model, args=arguments, data_collator=collate, train_dataset=job.splits["train"]).train()
    model.eval()
    rows = job.splits["test"]
    with torch.no_grad():
        found = torch.cat([margins(model, collate(rows[start : start + 32])) for start in range(0, len(rows), 32)])
    return float((found > 0).double().mean())


def _trainer(job: Job, collate: Any, rows: Any, **more: Any) -> Any:
    """A Trainer that has trained."""
    trainer = transformers.Trainer(
        model=job.build(),
        args=transformers.TrainingArguments(**job.settings()),
        data_collator=collate,
        train_dataset=rows,
        **more,
    )
    trainer.train()
    return trainer
