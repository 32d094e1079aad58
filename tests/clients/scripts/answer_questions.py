"""Question answering with a Trainer of its own, written for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
from answer_trainer import QuestionAnsweringTrainer
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from tests.clients.scripts import shared


def find_span(offsets: Any, sequences: Any, start: int, stop: int, cls: int) -> tuple[int, int]:
    """The first and last token of characters [start, stop) of the context; (cls, cls) where they are cut off."""
    context = [place for place, sequence in enumerate(sequences) if sequence == 1]
    inside = [place for place in context if offsets[place][0] >= start and offsets[place][1] <= stop]
    whole = inside and offsets[inside[0]][0] == start and offsets[inside[-1]][1] == stop
    return (inside[0], inside[-1]) if whole else (cls, cls)


def compute_metrics(p: EvalPrediction) -> dict[str, float]:
    """Share of questions whose answer is exactly right."""
    right = [found["text"] in expected["texts"] for found, expected in zip(p.predictions, p.label_ids, strict=True)]
    return {"exact_match": 100.0 * float(np.mean(right))}


def answers_of(examples: Any, features: Any, predictions: Any) -> EvalPrediction:
    """The best span of every question, over all pieces of its context."""
    starts, ends = predictions
    assert len(starts) == len(features), f"Got {len(starts)} predictions and {len(features)} features."
    best: dict[str, tuple[float, str]] = {}
    contexts = {example["id"]: example["context"] for example in examples}
    for feature, start, end in zip(features, starts, ends, strict=True):
        first, last = int(np.argmax(start)), int(np.argmax(end))
        offsets, key = feature["offset_mapping"], feature["example_id"]
        valid = offsets[first] is not None and offsets[last] is not None and first <= last
        text = contexts[key][offsets[first][0] : offsets[last][1]] if valid else ""
        score = float(start[first] + end[last])
        best[key] = max(best.get(key, (-np.inf, "")), (score, text))
    found = [{"id": example["id"], "text": best[example["id"]][1]} for example in examples]
    expected = [{"id": example["id"], "texts": example["answers"]["text"]} for example in examples]
    return EvalPrediction(predictions=found, label_ids=expected)


class Features:
    """Turns questions and contexts into token features, several of one question where its context is long."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length

    def _tokenize(self, examples: Any) -> Any:
        options = {"return_overflowing_tokens": True, "return_offsets_mapping": True, "stride": 2}
        return self.tokenizer(
            examples["question"], examples["context"], truncation="only_second", max_length=self.max_length, **options
        )

    def train(self, examples: Any) -> Any:
        """Features with the place of the answer."""
        found = self._tokenize(examples)
        mapping, offsets = found.pop("overflow_to_sample_mapping"), found.pop("offset_mapping")
        spans = []
        for index, tokens in enumerate(found["input_ids"]):
            answer = examples["answers"][mapping[index]]
            start = answer["answer_start"][0]
            cls = tokens.index(self.tokenizer.cls_token_id)
            stop = start + len(answer["text"][0])
            spans.append(find_span(offsets[index], found.sequence_ids(index), start, stop, cls))
        found["start_positions"], found["end_positions"] = map(list, zip(*spans, strict=True))
        return found

    def measure(self, examples: Any) -> Any:
        """Features with the question's id and the places of the context's tokens."""
        found = self._tokenize(examples)
        mapping = found.pop("overflow_to_sample_mapping")
        found["example_id"] = [examples["id"][sample] for sample in mapping]
        for index, offsets in enumerate(found["offset_mapping"]):
            kinds = found.sequence_ids(index)
            found["offset_mapping"][index] = [o if kinds[place] == 1 else None for place, o in enumerate(offsets)]
        return found


def main() -> None:
    model_args, data_args, training_args = shared.parse(TrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path)
    features, columns = Features(tokenizer, data_args.max_length), raw["train"].column_names
    training = shared.prepare(raw["train"], training_args, features.train, remove_columns=columns)
    measured = shared.prepare(raw["validation"], training_args, features.measure, remove_columns=columns)
    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=training if training_args.do_train else None,
        eval_dataset=measured if training_args.do_eval else None,
        eval_examples=raw["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=answers_of,
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, training)
    if training_args.do_eval:
        shared.report(trainer, "eval", trainer.evaluate(), measured)
    if training_args.do_predict:
        predicted = shared.prepare(raw["test"], training_args, features.measure, remove_columns=columns)
        results = trainer.predict(predicted, raw["test"])
        shared.report(trainer, "predict", results.metrics, predicted)
    shared.finish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="question-answering")


if __name__ == "__main__":
    main()
