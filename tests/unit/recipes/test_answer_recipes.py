"""The recipes sequence-to-sequence and question-answering: texts that are generated, and answers found in windows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.named_recipes import TINY, Prepared, RecipeCase, collate_of, trained, trainer_of
from trainer_lib import Trainer
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import PrepareOutput, load
from trainer_lib.recipes.question_answering import compute_metrics, find_nearest_sentence, score_answer
from trainer_lib.recipes.sequence_to_sequence import score_text
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.recipes.texts.row_trainer import decode_texts, encode_texts, find_usual
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import read_sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "learning_rate": 1e-2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
BART = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SEQUENCES = RecipeCase("sequence-to-sequence", options={"text": "name", "target": "parts"})
QUESTIONS = RecipeCase("question-answering", "questions.jsonl")
CONTEXT = "  Ada wrote the first program. Bob read it in 1843, twice."


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lines = "".join(read_sample("character_names.csv").splitlines(keepends=True)[:240])
    options: dict[str, Any] = {"vocabulary": 400, "target_length": 24, "split": {"test": 0.1, "validation": 0}}
    return SEQUENCES.prepare(tmp_path_factory.mktemp("names"), lines, **options)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = read_sample("code_questions.jsonl").splitlines(keepends=True)
    text = "".join(row for row in rows if len(json.loads(row)["context"]) < 300)
    options: dict[str, Any] = {"max_length": 64, "stride": 16, "vocabulary": 800}
    split = {"test": 0.3, "validation": 0}
    return QUESTIONS.prepare(tmp_path_factory.mktemp("questions"), text, split=split, **options)


# -- texts that are generated -----------------------------------------------------------------------------------------
def test_texts_are_generated_in_evaluation_and_for_new_rows(names: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = names
    trainer = trained(names, tmp_path, {"config": T5}, 30, **BATCHES)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert data.info["label"] == "parts"  # new rows may have it
    assert data.info["cut_texts"] == 0
    leads = [" ".join(row["name"].split()[: data.info["lead_words"]]) for row in splits["test"]]
    by_hand = np.array([score_text(lead, row["labels"]) for lead, row in zip(leads, splits["test"], strict=True)])
    assert measured["eval_lead_rouge_l"] == pytest.approx(by_hand[:, 1].mean())
    assert measured["eval_rouge_l_over_lead"] == pytest.approx(measured["eval_rouge_l"] - measured["eval_lead_rouge_l"])
    assert measured["eval_loss"] < 6
    # What is measured are the texts that predictions have.
    output = trainer.predict([{"name": row["name"]} for row in splits["test"]])
    assert output.label_ids is None
    assert output.predictions.shape[1] <= 1 + 24
    texts = recipe.prediction_columns(output.predictions, data)["prediction"]
    scores = [score_text(text, row["labels"])[1] for text, row in zip(texts, splits["test"], strict=True)]
    assert measured["eval_rouge_l"] == pytest.approx(np.mean(scores))
    assert any(texts)


def test_parts_of_objects_are_read_and_targets_that_are_cut_are_said(tmp_path: Path) -> None:
    rows = [{"translation": {"en": f"text {n}", "de": "wort " * n}} for n in range(1, 21)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = PrepareOutput(Store.open(tmp_path / "out"), [str(path)])
    options = {"text": "translation.en", "target": "translation.de", "vocabulary": 300, "target_length": 9}
    splits = load(recipe_file(SEQUENCES.name), tmp_path).prepare(options, out)
    found = {row["row_id"]: (row["translation.en"], row["labels"]) for each in splits.values() for row in each}
    assert found == {n: (f"text {n + 1}", ("wort " * (n + 1)).strip()) for n in range(20)}
    [warning] = out.warnings
    assert warning.startswith(f"{out.info['cut_targets']} of 20 texts to write (") and "target_length" in warning
    form = TableForm.of(out.info)
    assert form is not None and not form.drops("translation")
    for row in ({"translation": {"en": "x"}}, {"translation.en": "x", "id": 1}):
        assert form.read(row, "row 0") == {"translation.en": "x"}


def test_a_batch_ends_its_targets_and_keeps_their_texts(names: Prepared) -> None:
    (_, splits, data), collate = names, collate_of(names)
    rows = [{**splits["train"][0], "labels": "latin " * 40}, *splits["train"][1:4]]
    batch = collate(rows)
    assert batch["labels"].shape == (4, 24), "longer targets are cut"
    for row in batch["labels"]:
        tokens = row[row >= 0]
        assert tokens[-1] == data.info["eos_token_id"]
        assert (tokens == data.info["eos_token_id"]).sum() == 1
    assert "labels" not in collate([{"name": "a"}])
    again = pickle.loads(pickle.dumps(collate))(rows)
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_a_perfect_model_scores_one_on_all_rows_and_on_resamples(names: Prepared) -> None:
    recipe, splits, data = names
    compute = recipe.compute_metrics_with(data)
    assert compute is not None
    tokenizer, longest = kept_tokenizer(data), data.info["target_length"]
    rows = [row for row in splits["test"] if len(tokenizer(row["labels"])["input_ids"]) <= longest][:9]  # none is cut
    batch = {name: value.numpy() for name, value in collate_of(names)(rows).items()}
    given = EvalPrediction(batch["labels"], (batch["wanted"], batch["lead"]))
    measured = compute(given)
    assert measured["exact_match"] == measured["rouge_l"] == 1
    assert measured["chrf"] == pytest.approx(1)
    chosen = np.array([3] * 9)
    one = compute(EvalPrediction(*(tuple(part[chosen] for part in each) if isinstance(each, tuple) else each[chosen]
                                   for each in (given.predictions, given.label_ids))))  # fmt: skip
    lead = " ".join(rows[3]["name"].split()[: data.info["lead_words"]])
    assert one["lead_chrf"] == pytest.approx(score_text(lead, rows[3]["labels"])[2])
    empty = EvalPrediction(np.full((1, 2), -100), (encode_texts(["a"]).numpy(), encode_texts(["a"]).numpy()))
    assert compute(empty)["rouge_l_over_lead"] == -1


def test_models_come_from_configurations_and_folders_with_beams_or_adapters(names: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = names

    def trains(model: Any) -> None:
        trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 1, **BATCHES)
        trainer.train()
        assert 0 <= trainer.evaluate(eval_dataset=splits["test"][:4])["eval_chrf"] <= 1

    for config in (T5, {**BART, "d_model": 32}):
        first: Any = recipe.build_model({"config": config}, data)
        folder = tmp_path / first.config.model_type
        first.save_pretrained(folder)
        second: Any = recipe.build_model({"folder": folder, "beams": 2}, data)
        assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
        assert (second.generation_config.num_beams, second.generation_config.max_new_tokens) == (2, 24)
        trains(second)
    with pytest.raises(ConfigError, match="Adapters are for a model that has been trained"):
        recipe.build_model({"adapter": {"rank": 4}}, data)
    adapted: Any = recipe.build_model({"folder": tmp_path / "t5", "adapter": {"rank": 4}}, data)
    assert all("lora" in name for name, each in adapted.named_parameters() if each.requires_grad)
    trains(adapted)


def test_scores_are_those_of_the_papers() -> None:
    # LCS 3 of 4 and 5 words: F = 2 * 3 / (4 + 5).
    assert score_text("the cat sat down", "the cat has sat there")[1] == pytest.approx(6 / 9)
    assert score_text(" a b ", "a b") == pytest.approx((1, 1, 1))
    assert score_text("", "a") == (0, 0, 0)
    assert score_text("a", "A")[0] == 0


# -- answers in contexts ----------------------------------------------------------------------------------------------
def test_answers_of_every_form_are_the_same_rows(tmp_path: Path) -> None:
    context = f"Adam knew it. {CONTEXT}"  # a part of a word is no answer
    start = context.index("Ada wrote")
    squad = {"text": ["Ada", "Ada wrote"], "answer_start": [start, start]}
    pairs = [{"text": "Ada", "answer_start": start}, {"text": "Ada wrote", "answer_start": start}]
    found = []
    for form in (squad, pairs, ["Ada", "Ada wrote"]):
        answers = [*[form] * 8, [], "1843"]
        rows = [{"question": "Who wrote it?", "context": context, "answers": given} for given in answers]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        _, splits, data = QUESTIONS.prepare(tmp_path, text, split={"validation": 0, "seed": 1})
        found.append(splits)
        assert data.info["label"] == "answers"
        assert data.info["has_unanswerable"] == any(row["labels"] == [""] for row in splits["train"])
    assert str(found[0]) == str(found[1]) == str(found[2]), "with arrays, which have no single truth"
    made = [row for each in found[0].values() for row in each]
    year = context.index("1843")
    assert {tuple(row["answer_span"]) for row in made} == {(start, start + 2), (-1, -1), (year, year + 3)}
    assert all(row["context"] == context for row in made), "the spaces before it count"
    table = f'question,context,answers\n"Who?","{CONTEXT}",Ada\n' + f'"When?","{CONTEXT}",1843\n' * 9
    for cell in ("Ada", "{'text': ['Ada'], 'answer_start': [2]}", '{""text"": [""Ada""]}'):
        written = table.replace(",Ada\n", f',"{cell}"\n')
        _, splits, _ = replace(QUESTIONS, file="questions.csv").prepare(tmp_path, written)
        assert {tuple(row["labels"]) for each in splits.values() for row in each} == {("Ada",), ("1843",)}


@pytest.mark.parametrize("indent", [None, 1])
def test_questions_of_squad_are_read_as_its_files_nest_them_and_impossible_ones_have_no_answer(
    tmp_path: Path, indent: int | None
) -> None:
    asked = [
        {"id": f"q{n}", "question": f"{n}?", "is_impossible": n % 3 == 0, "plausible_answers": [],
         "answers": [{"text": "Ada", "answer_start": 2}]} for n in range(20)
    ]  # fmt: skip
    squad = {"version": "v2.0", "data": [{"title": "Ada", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]}
    content, case = json.dumps(squad, indent=indent), replace(QUESTIONS, file="train-v2.0.json")
    for ignore, answers in (([], {0: "", 1: "Ada"}), (["is_impossible"], {0: "Ada", 1: "Ada"})):
        _, splits, _ = case.prepare(tmp_path, content, id="id", ignore=ignore)
        found = {row["row_id"]: row["labels"] for each in splits.values() for row in each}
        assert found == {f"q{n}": [answers[min(n % 3, 1)]] for n in range(20)}
    refused = case.refused(tmp_path, '{"data": [{"paragraphs": [{"qas": 1}]}]}')
    assert "train-v2.0.json: the file begins as one of SQuAD, which cannot be read" in refused.message


def test_each_window_has_the_answer_as_a_whole_or_not_at_all(questions: Prepared) -> None:
    collate = collate_of(questions)
    rows = [row for row in questions[1]["train"] if row["answer_span"][0] >= 0][:20]
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
    questions: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = questions
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 3e-3}
    trainer = trained(questions, tmp_path, {"config": TINY}, 60, **settings)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    # The usual answers, by hand.
    usual, most = find_usual((row["question"], row["labels"][0]) for row in splits["train"])
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


def test_the_best_answer_is_found_over_all_windows(questions: Prepared) -> None:
    rows = [row for row in questions[1]["train"] if row["answer_span"][0] >= 0][:10]
    batch = collate_of(questions)(rows)
    # A model that is sure of the right positions.
    perfect = [torch.nn.functional.one_hot(batch[name], batch["input_ids"].shape[1]).float() * 20
               for name in ("start_positions", "end_positions")]  # fmt: skip
    trainer: Any = questions[0].trainer_class(Trainer)
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
    assert find_usual(zip("aaabb", "xyyxx", strict=True)) == ({"a": "y", "b": "x"}, "x")
    scores = np.array([[1, 1, 0, 0.5, 0.25, 1], [0, 0, 1, 1, 0, 0]])
    measured = compute_metrics(EvalPrediction(None, (None, scores)))
    assert (measured["f1"], measured["answerable_f1"], measured["unanswerable_f1"]) == (0.5, 1, 0)
    assert measured["f1_over_usual"] == -0.25
    assert "answerable_f1" not in compute_metrics(EvalPrediction(None, (None, scores[:1])))  # all have one


def test_texts_go_through_tensors_unchanged() -> None:
    texts = ["", "añ😀\0b", "\ud800"]
    assert decode_texts(encode_texts(texts)) == texts
    assert encode_texts([""]).shape == (1, 1)
