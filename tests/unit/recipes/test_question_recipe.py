"""The recipe question-answering: answers of files, long contexts in windows, answers of rows, and what it refuses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import code_questions
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipes.answer_scores import find_nearest_sentence, find_usual_answers, measure_answers, score_answer
from trainer_lib.recipes.text_tensors import decode_texts, encode_texts

BATCHES: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 3e-3}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CONTEXT = "  Ada wrote the first program. Bob read it in 1843, twice."


def prepare(where: Path, content: str, /, *, file: str = "questions.jsonl", **options: Any) -> Prepared:
    return prepare_file("question-answering", where / file, content, options)


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepare(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


def json_lines(*answers: Any, context: Any = CONTEXT, question: Any = "Who wrote it?", more: str = "") -> str:
    rows = [{"question": question, "context": context, "answers": each} for each in answers]
    return "".join(json.dumps(row) + "\n" for row in rows) + more


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    where = tmp_path_factory.mktemp("prepared")
    rows = [json.loads(line) for line in code_questions().splitlines()]
    text = "".join(json.dumps(row) + "\n" for row in rows if len(row["context"]) < 300)
    options: dict[str, Any] = {"max_length": 64, "stride": 16, "vocabulary": 800}
    return prepare(where, text, split={"test": 0.3, "validation": 0}, **options)


def test_answers_of_every_form_are_the_same_rows(tmp_path: Path) -> None:
    start = CONTEXT.index("Ada")
    squad = {"text": ["Ada", "Ada wrote"], "answer_start": [start, start]}
    pairs = [{"text": "Ada", "answer_start": start}, {"text": "Ada wrote", "answer_start": start}]
    found = []
    for form in (squad, pairs, ["Ada", "Ada wrote"]):
        _, splits, data = prepare(tmp_path, json_lines(*[form] * 8, [], "1843"), split={"validation": 0, "seed": 1})
        found.append(splits)
        assert data.info["label"] == "answers"
        assert data.info["has_unanswerable"] == any(row["labels"] == [""] for row in splits["train"])
    assert str(found[0]) == str(found[1]) == str(found[2]), "with arrays, which have no single truth"
    rows = [row for each in found[0].values() for row in each]
    assert {tuple(row["answer_span"]) for row in rows} == {
        (start, start + 2),
        (-1, -1),
        (CONTEXT.index("1843"), CONTEXT.index("1843") + 3),
    }
    assert all(row["context"] == CONTEXT for row in rows), "the spaces before it count"
    table = f'question,context,answers\n"Who?","{CONTEXT}",Ada\n' + f'"When?","{CONTEXT}",1843\n' * 9
    _, splits, _ = prepare(tmp_path, table, file="questions.csv")
    assert {tuple(row["labels"]) for each in splits.values() for row in each} == {("Ada",), ("1843",)}


def test_each_window_has_the_answer_as_a_whole_or_not_at_all(prepared: Prepared) -> None:
    recipe, splits, data = prepared
    collate = recipe.collate_with(data)
    assert collate is not None
    rows = [row for row in splits["train"] if row["answer_span"][0] >= 0][:20]
    context = "def f(x): pass\n" * 20 + "def last(first_one): return 1"
    at = context.index("first_one")
    long = {**rows[0], "context": context, "labels": ["first_one"], "answer_span": np.array([at, at + 8])}
    batch = collate([long, *rows])
    assert batch["contexts"].shape[0] == 21, "the rows are counted by the first tensor"
    assert batch["input_ids"].shape[1] <= 64
    assert (batch["owners"] == 0).sum() == 4
    seen = set()
    for window, owner in enumerate(batch["owners"].tolist()):
        start, end = int(batch["start_positions"][window]), int(batch["end_positions"][window])
        if start == batch["nowhere"][window]:
            continue
        row = ([long, *rows])[owner]
        first, last = int(batch["characters"][window, start, 0]), int(batch["characters"][window, end, 1])
        assert row["labels"][0] in row["context"][first:last]
        assert len(row["context"][first:last]) <= len(row["labels"][0]) + 20
        seen.add(owner)
    assert seen == set(range(21)), "each row has a window with its answer"
    again = pickle.loads(pickle.dumps(collate))([long, *rows])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_a_model_that_begins_at_random_beats_the_usual_answers_and_takes_new_rows(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = trainer_of(
        recipe, data, recipe.build_model({"config": TINY}, data), tmp_path, splits["train"], 60, **BATCHES
    )
    trainer.train()
    measured = trainer.evaluate(eval_dataset=splits["test"])
    # The usual answers, by hand.
    usual, most = find_usual_answers((row["question"], row["labels"][0]) for row in splits["train"])
    exact = [score_answer(usual.get(row["question"], most), row["labels"])[0] for row in splits["test"]]
    assert measured["eval_usual_exact_match"] == pytest.approx(np.mean(exact))
    assert measured["eval_f1_over_usual"] == pytest.approx(measured["eval_f1"] - measured["eval_usual_f1"])
    new = [
        {"question": "Which parameter comes first?", "context": "def add(self, item):\n    pass\n" * 9},
        {"question": "Which parameter comes first?", "context": " "},
    ]
    output = trainer.predict(new)
    assert output.label_ids is None
    found = recipe.prediction_columns(output.predictions, data)
    assert [type(each) for each in found["prediction"]] == [str, str]
    assert found["prediction"][1] == ""
    assert all(0 <= each <= 1 for each in found["confidence"])
    with pytest.raises(TrainflowError, match="the question 'why why"):
        trainer.predict([{"question": "why " * 90, "context": "a b c"}])


def test_the_best_answer_is_found_over_all_windows(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    collate = recipe.collate_with(data)
    assert collate is not None
    rows = [row for row in splits["train"] if row["answer_span"][0] >= 0][:10]
    batch = collate(rows)
    # A model that is sure of the right positions.
    perfect = [torch.nn.functional.one_hot(batch[name], batch["input_ids"].shape[1]).float() * 20
               for name in ("start_positions", "end_positions")]  # fmt: skip
    trainer: Any = recipe.trainer_class(Trainer)
    kept = {name: batch[name] for name in trainer.kept}
    is_nowhere = batch["start_positions"] == batch["nowhere"]
    for each in perfect:
        each[is_nowhere] = 0  # says nothing of windows without the answer
    (texts, _), (answers, scores) = trainer.predict_rows(trainer, tuple(perfect), None, kept)
    assert decode_texts(answers) == [row["labels"][0] for row in rows]
    assert scores[:, 1].mean() > 0.9
    assert all(row["labels"][0] in text for row, text in zip(rows, decode_texts(texts), strict=True))
    # One that is sure that there is none.
    none = torch.nn.functional.one_hot(batch["nowhere"], batch["input_ids"].shape[1]).float() * 20
    (texts, _), _ = trainer.predict_rows(trainer, (none, none), None, kept)
    assert set(decode_texts(texts)) == {""}
    kept["limits"][:, 1] = 0  # trained without such questions
    (texts, _), _ = trainer.predict_rows(trainer, (none, none), None, kept)
    assert "" not in decode_texts(texts)


def test_answers_are_compared_as_squad_compares_them() -> None:
    assert score_answer("The Ada!", ["ada", "Bob"]) == (1, 1)
    assert score_answer("Ada and Bob", ["Ada", "Bob"]) == (0, 0.5)
    assert score_answer("", [""]) == (1, 1)
    assert score_answer("Ada", [""]) == score_answer("", ["Ada"]) == (0, 0)
    assert score_answer("()", ["()"]) == (1, 1)
    assert score_answer("()", ["[]"]) == (0, 0)
    assert find_nearest_sentence("Who read it?", CONTEXT) == "Bob read it in 1843, twice."
    assert find_usual_answers([("a", "x"), ("a", "y"), ("a", "y"), ("b", "x"), ("b", "x")]) == (
        {"a": "y", "b": "x"},
        "x",
    )
    scores = np.array([[1, 1, 0, 0.5, 0.25, 1], [0, 0, 1, 1, 0, 0]])
    measured = measure_answers(scores)
    assert (measured["f1"], measured["answerable_f1"], measured["unanswerable_f1"]) == (0.5, 1, 0)
    assert measured["f1_over_usual"] == -0.25
    assert "answerable_f1" not in measure_answers(scores[:1]), "there is nothing to tell apart"


def test_texts_go_through_tensors_unchanged() -> None:
    texts = ["", "añ😀\0b", "\ud800"]
    assert decode_texts(encode_texts(texts)) == texts
    assert encode_texts([""]).shape == (1, 1)


def test_rows_that_spoil_the_training_are_refused(tmp_path: Path) -> None:
    good = ["Ada"] * 9
    assert (
        "row 9 (line 10): the answer 'Eve' is not in the context" in refused(tmp_path, json_lines(*good, "Eve")).message
    )
    start = refused(tmp_path, json_lines(*good, {"text": ["Ada"], "answer_start": [0]}))
    assert "the answer 'Ada' is not at character 0 of the context" in start.message
    lengths = refused(tmp_path, json_lines(*good, {"text": ["Ada"], "answer_start": [0, 1]}))
    assert "row 9 (line 10), column 'answers': there are 1 texts and 2 starts" in lengths.message
    assert "there is no 'text'" in refused(tmp_path, json_lines(*good, {"texts": ["Ada"]})).message
    assert "an answer is empty" in refused(tmp_path, json_lines(*good, [" "])).message
    assert "a dict is not an answer" in refused(tmp_path, json_lines(*good, {"text": [{}]})).message
    assert (
        "is not the number of a character" in refused(tmp_path, json_lines({"text": "Ada", "answer_start": -1})).message
    )
    assert "no training row has an answer" in refused(tmp_path, json_lines(*[[]] * 9)).message.lower()
    assert "column 'context': there is no value" in refused(tmp_path, json_lines(*good, context="  ")).message
    assert "a int is not a text" in refused(tmp_path, json_lines(*good, context=1)).message
    assert "column 'question': there is no value" in refused(tmp_path, json_lines(*good, question="")).message
    assert "not classes to cut by" in refused(tmp_path, json_lines(*good), split={"by": "stratified"}).message
    assert refused(tmp_path, json_lines(*good), context="contxt").remedy == 'Did you mean "context"?'
    assert refused(tmp_path, json_lines(*good), answers="answer").remedy == 'Did you mean "answers"?'
    assert refused(tmp_path, json_lines(*good), max_lenght=3).remedy == 'Did you mean "max_length"?'
    long = refused(tmp_path, json_lines(*good, question="why " * 40), max_length=64, stride=32)
    assert "row 0 (line 1): the question 'why why" in long.message
    cut = refused(tmp_path, json_lines(*good, more='{"question": "a'))
    assert "line 10" in cut.message
