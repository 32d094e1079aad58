"""The recipes text-classification, token-classification and embeddings: batches, models, metrics by hand, new rows."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.named_recipes import TINY, Prepared, RecipeCase, collate_of, prepare_sources, trained, trainer_of
from tests.support.tiny import heard
from trainer_lib import EvalPrediction
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.protocol.requests import PrepareRequest, RecipeFile
from trainer_lib.recipes import DataInfo, embeddings, token_classification
from trainer_lib.recipes.shared.model_places import new_config
from trainer_lib.recipes.texts.row_trainer import find_usual
from trainer_lib.recipes.texts.tokenizing import learn_tokenizer
from trainflow.flows.new_project.starting import read_sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = RecipeCase("text-classification", options={"text": "line", "label": "module"})
TOKEN = RecipeCase("token-classification", "lines.jsonl")
EMBEDDINGS = RecipeCase("embeddings", options={"query": "entity", "positive": "character"})
MODULES = read_sample("modules.csv")
PAIRS: dict[str, Any] = {"per_device_train_batch_size": 32, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    where = tmp_path_factory.mktemp("texts")
    return TEXT.prepare(where, MODULES, max_length=32, vocabulary=1000, split={"test": 0.3})


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lines = "".join([row for row in read_sample("code_lines.jsonl").splitlines(True) if '"import"' not in row][:400])
    options: dict[str, Any] = {"max_length": 32, "vocabulary": 800, "split": {"test": 0.3, "validation": 0}}
    return TOKEN.prepare(tmp_path_factory.mktemp("words"), lines, **options)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    options: dict[str, Any] = {"vocabulary": 400, "max_length": 32, "split": {"test": 0.2, "validation": 0}}
    return EMBEDDINGS.prepare(tmp_path_factory.mktemp("names"), read_sample("entity_names.csv"), **options)


# -- classes of texts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("long", "pair"), [(1, False), (3, False), (3, True)])
def test_texts_that_are_cut_are_counted_and_over_one_percent_of_them_are_a_warning(
    tmp_path: Path, long: int, pair: bool
) -> None:
    # 100 rows; a short text has a word, with the tokens that begin and end it three.
    texts = ["word " * 20] * long + ["word"] * (100 - long)
    lines = [f"{text},{'b' if pair else ''},{'xy'[row % 2]}" for row, text in enumerate(texts)]
    (tmp_path / "lines.csv").write_text("\n".join(["line,other,module", *lines]))
    more = {"pair": "other"} if pair else {}
    asked = PrepareRequest(
        output=str(tmp_path / "out"),
        recipe=RecipeFile(str(recipe_file("text-classification")), str(tmp_path)),
        options={**TEXT.options, **more, "max_length": 6, "vocabulary": 50},
        sources=(str(tmp_path / "lines.csv"),),
    )
    result, events = heard(asked)
    shown = [event["message"] for event in events if event["event"] == "warning"]
    assert result.info["cut_texts"] == long
    assert shown == list(result.warnings)
    assert len(shown) == (long > 1)
    for warning in shown:
        assert warning.startswith("3 of 100 texts (3%) have more than 6 tokens, and are cut")
        assert "prepare.options.max_length" in warning


def test_a_model_that_begins_at_random_beats_the_most_frequent_class(texts: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = texts
    assert data.info["vocabulary"] == 1000
    trainer = trained(texts, tmp_path, {"config": TINY}, 120, per_device_train_batch_size=16, learning_rate=3e-3)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_majority_accuracy"] == pytest.approx(0.25, abs=0.01)
    assert measured["eval_accuracy_over_majority"] > 0.1, "twice the width of the interval of 360 rows"
    # A new row has a text and nothing else.
    new = [{"line": "parser.add_argument('--size', help=SUPPRESS)"}]
    assert set(collate_of(texts)(new)) >= {"input_ids", "attention_mask"}
    predicted = recipe.prediction_columns(trainer.predict(new).predictions, data)
    assert predicted["prediction"][0] in data.info["classes"]


def test_equal_texts_give_an_equal_vocabulary_in_which_only_our_tokens_are_special() -> None:
    texts = [line.rpartition(",")[0] for line in MODULES.splitlines()]
    first, again = (learn_tokenizer(texts, vocabulary=2000, max_length=64) for _ in range(2))
    assert first.get_vocab() == again.get_vocab()
    assert len(first) == 2000
    assert sorted(first.all_special_tokens) == ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    assert first.tokenize("return ##e") == ["return", "#", "#", "e"]
    assert first.decode(first("return self.path")["input_ids"], skip_special_tokens=True) == "return self . path"


def test_a_model_comes_from_a_folder_and_its_head_must_fit_the_labels(
    texts: Prepared, words: Prepared, tmp_path: Path
) -> None:
    for (recipe, _, data), classes in ((texts, 4), (words, 13)):
        first: Any = recipe.build_model({"config": TINY}, data)
        first.save_pretrained(tmp_path)
        second = recipe.build_model({"folder": tmp_path}, data)
        assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
        fewer = DataInfo({"url": data.url, "info": {**data.info, "classes": ["a", "b"]}, "splits": {}, "files": []})
        with pytest.raises(ConfigError, match=f"knows {classes} classes, and the data has 2") as caught:
            recipe.build_model({"folder": tmp_path}, fewer)
        assert "new_head=true" in str(caught.value.remedy)
        assert recipe.build_model({"folder": tmp_path, "new_head": True}, fewer).config.num_labels == 2
        with pytest.raises(ConfigError, match="cannot load this model"):
            recipe.build_model({"folder": tmp_path / "nowhere"}, data)
        with pytest.raises(ConfigError, match="Adapters are for a model that has been trained"):
            recipe.build_model({"adapter": {"rank": 4}}, data)
    adapted: Any = words[0].build_model({"folder": tmp_path, "adapter": {"rank": 4}}, words[2])
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert any("classifier" in name for name in trained)
    assert all("lora" in name or "classifier" in name for name in trained)


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({"<eos>": 0, "x": 1}, unk_token="x"))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=bare, eos_token="<eos>").save_pretrained(tmp_path / "bare")
    error = TEXT.refused(tmp_path, MODULES, folder=tmp_path / "bare")
    assert "no token to pad with" in error.message
    assert error.remedy == "Set prepare.options.pad_token=<eos>, a token that it has."
    _, _, data = TEXT.prepare(tmp_path, MODULES, folder=tmp_path / "bare", pad_token="<eos>")
    assert data.info["pad_token_id"] == 0
    wrong = TEXT.refused(tmp_path, MODULES, folder=tmp_path / "bare", pad_token="<pad>")
    assert "no token '<pad>'" in wrong.message


# -- settings of models and of trainings ------------------------------------------------------------------------------
MISSPELT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "configuration": ({"config": {"hidden_sise": 32}}, {}, 'config.hidden_sise = 32: .*"hidden_size"'),
    "type of the model": ({"config": {"model_type": "brt"}}, {}, 'config.model_type = brt: .*"bert"'),
    "configuration inside": (
        {"config": {"model_type": "clip", "text_config": {"hidden_sise": 32}}},
        {},
        'config.text_config.hidden_sise = 32: .*"hidden_size"',
    ),
    "configuration beside a folder": ({"folder": "x", "config": TINY}, {}, "train.model.config = .*Remove it"),
    "checkpointing": (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": True}},
        'gradient_checkpointing_kwargs.use_reentrent = True: .*"use_reentrant"',
    ),
}


@pytest.mark.parametrize("case", MISSPELT)
def test_a_misspelt_setting_is_refused_with_the_nearest_name(case: str, texts: Prepared, tmp_path: Path) -> None:
    model, settings, said = MISSPELT[case]
    recipe, splits, data = texts
    with pytest.raises(ConfigError, match=said):
        built = recipe.build_model({"config": TINY, **model}, data)
        trainer_of(recipe, data, built, tmp_path, splits["train"], 3, **settings).train()


def test_settings_that_a_configuration_takes_under_other_names_are_taken() -> None:
    for kind, settings in (
        ("llama", {"rope_theta": 1e6, "attn_implementation": "eager", "num_labels": 3, "dtype": "float32"}),
        ("t5", {"hidden_size": 32, "num_attention_heads": 2}),
        ("clip", {"text_config": {"hidden_size": 32}}),
    ):
        new_config({"model_type": kind, **settings}, settings, field="train.model.config")


# -- tags of words ----------------------------------------------------------------------------------------------------
def test_a_model_that_begins_at_random_beats_the_usual_tags_and_takes_new_rows(words: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = words
    trainer = trained(words, tmp_path, {"config": TINY}, 60, per_device_train_batch_size=16, learning_rate=1e-2)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_accuracy_over_usual"] > 0.03
    assert measured["eval_words"] == sum(len(row["words"]) for row in splits["test"])
    # The usual tags, by hand.
    counts: dict[str, Counter[int]] = {}
    for row in splits["train"]:
        for word, tag in zip(row["words"], row["labels"], strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    most = max(range(len(data.info["classes"])), key=lambda tag: sum(each[tag] for each in counts.values()))
    pairs = [pair for row in splits["test"] for pair in zip(row["words"], row["labels"], strict=True)]
    hits = [tag == (min(counts[word], key=lambda one: (-counts[word][one], one)) if word in counts else most)
            for word, tag in pairs]  # fmt: skip
    assert measured["eval_usual_accuracy"] == pytest.approx(np.mean(hits))
    # Each word is counted in the confusion matrix, as one of its row.
    output = trainer.predict(splits["test"])
    found = recipe.outcome_pairs(EvalPrediction(output.predictions, output.label_ids), data)
    assert found is not None
    assert found["labels"].tolist() == [tag for row in splits["test"] for tag in row["labels"]]
    assert (found["labels"] == found["predictions"]).mean() == pytest.approx(measured["eval_accuracy"])
    assert np.bincount(found["rows"]).tolist() == [len(row["words"]) for row in splits["test"]]
    assert (found["confidence"] > 0).all()
    # A new row has words and nothing else: one of many sequences, and one that the tokenizer knows nothing of.
    long = [{"words": ["return", "x"] * 60}, {"words": ["def", "\u200d", "("]}]
    predicted = recipe.prediction_columns(trainer.predict(long).predictions, data)
    assert [len(row) for row in predicted["prediction"]] == [120, 3] == [len(row) for row in predicted["confidence"]]
    assert predicted["prediction"][1][0] == "keyword"
    assert set(predicted["prediction"][0]) <= set(data.info["classes"])


def test_each_word_has_the_label_of_its_first_token_also_in_the_second_sequence(words: Prepared) -> None:
    train, collate = words[1]["train"], collate_of(words)
    long = ["unbelievably_long_name", "=", "1"] * 12
    row = {**train[0], "words": long, "labels": np.arange(36) % 13, "usual_tags": np.zeros(36, np.int64)}
    batch = collate([row, train[1]])
    assert batch["places"].shape == (2, 36), "the rows are counted by the first tensor"
    assert batch["input_ids"].shape[0] > 3
    assert batch["input_ids"].shape[1] <= 32
    assert (batch["labels"] >= 0).sum() == 36 + len(train[1]["words"])
    assert batch["labels"].flatten()[batch["places"][0]].tolist() == row["labels"].tolist()
    again = pickle.loads(pickle.dumps(collate))([row, train[1]])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_sentences_in_columns_and_lists_in_parquet_are_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(["EU", "rejects", "it"], ["B-ORG", "O", "O"]), (["Peter", "B", "x"], ["B-PER", "I-PER", "O"])] * 10
    text = "-DOCSTART- O\r\n\n# id = 1\n" + "\n".join(
        "".join(f"{w} NN {t}\n" for w, t in zip(*row, strict=True)) for row in rows
    )
    options: dict[str, Any] = {"split": {"test": 0.3, "validation": 0, "seed": 1}}
    _, first, data = replace(TOKEN, file="a.conll").prepare(tmp_path, text, **options)
    assert data.info["classes"] == ["B-ORG", "B-PER", "I-PER", "O"]
    headed = "Word POS Tag\n" + text.partition("id = 1\n")[2]
    assert replace(TOKEN, file="a.conll").prepare(tmp_path, headed, **options)[1] == first
    lines = "".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in rows)
    assert TOKEN.prepare(tmp_path, lines, **options)[1] == first
    cells = "words,tags\n" + "".join(f'"{words}","{tags}"\n' for words, tags in rows)  # as pandas writes lists
    assert replace(TOKEN, file="a.csv").prepare(tmp_path, cells, **options)[1] == first
    pq.write_table(pa.table({"words": [row[0] for row in rows], "tags": [row[1] for row in rows]}), tmp_path / "a.pq")
    assert prepare_sources(TOKEN.name, [str(tmp_path / "a.pq")], options, tmp_path)[1] == first


def measure_tags(predicted: np.ndarray, truth: np.ndarray, usual: np.ndarray, classes: list[str]) -> dict[str, float]:
    data = DataInfo({"info": {"classes": classes}, "splits": {}, "url": "", "files": []})
    return token_classification.compute_metrics(EvalPrediction((predicted, None), (truth, usual)), data)


def test_entities_count_where_name_and_ends_are_right() -> None:
    classes = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    truth = np.array([[1, 3, 4, 0, -100], [0, 2, 0, 4, 4]])
    predicted = np.array([[1, 3, 4, 1, -100], [0, 2, 2, 4, 0]])
    usual = np.full_like(truth, 4)
    measured = measure_tags(predicted, truth, usual, classes)
    # Right: PER 0-2. Predicted: PER 0-2, PER 3-4; LOC 0-3, LOC 4-5. Real: PER 0-2, LOC 3-4; LOC 0-2, LOC 2-3.
    assert measured["entity_precision"] == measured["entity_recall"] == measured["entity_f1"] == 0.25
    assert measured["entity_f1_over_usual"] == 0.25
    assert measured["accuracy"] == pytest.approx(6 / 9)
    assert measured["usual_accuracy"] == pytest.approx(3 / 9)
    assert "entity_f1" not in measure_tags(predicted, truth, usual, ["a", "b", "c", "d", "e"])
    truth, predicted = np.array([[0, 1, 3, 3]]), np.array([[0, 1, 2, 3]])
    ended = measure_tags(predicted, truth, predicted, ["B-X", "E-X", "O", "S-X"])
    # Right: X 0-2, X 3-4. Real: also X 2-3.
    assert [ended["entity_precision"], ended["entity_recall"]] == pytest.approx([1, 2 / 3])
    assert find_usual(zip("aab", (1, 0, 1), strict=True)) == ({"a": 0, "b": 1}, 1)


# -- embeddings of pairs ----------------------------------------------------------------------------------------------
def test_a_model_that_begins_at_random_beats_the_tokens_in_common_and_embeds_new_rows(
    names: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = names
    trainer = trained(names, tmp_path, {"config": TINY}, 60, **PAIRS)
    remembered = trainer.compute_metrics = Remembered(trainer.compute_metrics)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_mrr_over_overlap"] > 0.05
    assert measured["eval_candidates"] == len({row["character"] for row in splits["test"]})
    # By hand, from the embeddings that predictions have.
    texts = list(dict.fromkeys(row["character"] for row in splits["test"]))
    queries = trainer.predict([{"entity": row["entity"]} for row in splits["test"]])
    assert queries.label_ids is None
    candidates = trainer.predict([{"entity": text} for text in texts])
    vectors = [
        np.stack(recipe.prediction_columns(each.predictions, data)["embedding"]) for each in (queries, candidates)
    ]
    assert np.linalg.norm(vectors[0], axis=1) == pytest.approx(1, abs=1e-5)
    right = np.array([texts.index(row["character"]) for row in splits["test"]])
    ranks = embeddings.find_ranks(vectors[0] @ vectors[1].T, right)
    assert measured["eval_mrr"] == pytest.approx((1 / ranks).mean(), rel=1e-3)
    # Resamples of rows keep the candidates: their mean is that of all rows.
    resampled = remembered.resampled(200)
    assert np.mean(resampled["mrr"]) == pytest.approx(measured["eval_mrr"], abs=0.02)
    assert set(resampled["candidates"]) == {measured["eval_candidates"]}


def test_texts_of_pairs_that_are_cut_are_counted_with_their_prefixes(names: Prepared, tmp_path: Path) -> None:
    assert names[2].info["cut_texts"] == 0
    content = "entity,character\n" + "".join(f"q{row},p{row}\n" for row in range(20))
    more: dict[str, Any] = {"vocabulary": 200, "max_length": 12, "split": {"test": 0.2, "validation": 0}}
    for prefix, cut in (({}, 0), ({"query_prefix": "find this: " * 5}, 20)):
        assert EMBEDDINGS.prepare(tmp_path, content, **more, **prefix)[2].info["cut_texts"] == cut


def test_the_overlap_is_that_of_tokens_whatever_the_batches(names: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = names
    model = recipe.build_model({"config": TINY}, data)
    rows = [dict(row) for row in splits["test"][:40]]
    rows[7] = {**rows[7], "character": rows[3]["character"], "labels": rows[3]["labels"]}  # one text, two queries
    found = []
    for size in (3, 40):
        trainer = trainer_of(recipe, data, model, tmp_path, rows, 1, per_device_eval_batch_size=size, **PAIRS)
        found.append(trainer.evaluate(eval_dataset=rows))
        assert trainer._candidates is None
    for name in ("eval_mrr", "eval_overlap_mrr", "eval_candidates"):
        assert found[0][name] == pytest.approx(found[1][name]), name
    assert found[0]["eval_candidates"] == 39
    batch = collate_of(names)(rows)
    sets = [set(ids[mask > 0].tolist()) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    firsts = {row["labels"]: number for number, row in reversed(list(enumerate(rows)))}
    others = [sets[40 + number] for number in sorted(firsts.values())]
    order = sorted(firsts, key=lambda label: firsts[label])
    scores = np.array([[len(own & other) / len(other) ** 0.5 for other in others] for own in sets[:40]])
    by_hand = embeddings.find_ranks(scores, np.array([order.index(row["labels"]) for row in rows]))
    assert found[0]["eval_overlap_mrr"] == pytest.approx((1 / by_hand).mean())


def test_accumulated_batches_have_the_mean_of_their_losses(names: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = names
    model, collate = recipe.build_model({"config": {**TINY, **NO_DROPOUT}}, data), collate_of(names)
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 0.0, "logging_steps": 1}
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"][:16], 1, **settings)
    trainer.train()
    logged = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    order = [trainer.train_dataset[row] for row in range(16)]
    single = float(trainer.compute_loss(model, collate(order[:8])).detach())
    assert 0.3 * single < logged < 3 * single, "a mean, not a sum over sixteen rows"
    # A text that belongs to two queries of a batch is not a wrong one.
    same = [{**row, "labels": 0, "character": order[0]["character"]} for row in order[:4]]
    assert float(trainer.compute_loss(model, collate(same)).detach()) == pytest.approx(0, abs=1e-6)
    # Nor are the other texts of an equal query, nor the query itself.
    a, b, c = (row["entity"] for row in order[:3])
    pairs = [{"entity": a, "character": b}, {"entity": a, "character": c}, {"entity": b, "character": a}]
    batch = collate(
        [{**row, **pair, "labels": number} for number, (row, pair) in enumerate(zip(order[:3], pairs, strict=True))]
    )
    vectors = trainer.predict([{"entity": text} for text in (a, b, c)]).predictions
    by_hand = np.log1p(np.exp(vectors[1] @ (vectors[2] - vectors[0]) / model.config.embedding_temperature)) / 3
    assert float(trainer.compute_loss(model, batch).detach()) == pytest.approx(by_hand, rel=1e-4)


def test_ranks_of_equal_scores_are_shared() -> None:
    scores = np.array([[0.1, 0.9, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    assert embeddings.find_ranks(scores, np.array([2, 0, 0])).tolist() == [2, 2, 1.5]
    measured = embeddings.compute_metrics(EvalPrediction(np.array([1.0, 2.0, 20.0]), np.array([[2.0, 40]] * 3)))
    assert measured["mrr"] == pytest.approx((1 + 0.5 + 0.05) / 3)
    assert (measured["recall_at_1"], measured["recall_at_5"]) == pytest.approx((1 / 3, 2 / 3))
    assert measured["chance_recall_at_10"] == 0.25


def test_models_of_pairs_come_from_folders_with_adapters_and_choices(names: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = names
    first: Any = recipe.build_model({"config": TINY}, data)
    first.save_pretrained(tmp_path / "model")
    second: Any = recipe.build_model({"folder": tmp_path / "model", "pooling": "first", "temperature": 1}, data)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert (second.config.embedding_pooling, second.config.embedding_temperature) == ("first", 1.0)
    adapted: Any = recipe.build_model({"folder": tmp_path / "model", "adapter": {"rank": 4}}, data)
    assert all("lora" in name for name, each in adapted.named_parameters() if each.requires_grad)
    for model in (second, adapted):
        trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 1, **PAIRS)
        trainer.train()
        assert 0 < trainer.evaluate(eval_dataset={"a": splits["test"][:5]})["eval_a_mrr"] <= 1
    for option, words in (({"pooling": "mena"}, "not one of the choices"), ({"temperature": 0.0}, "cannot be divided")):
        with pytest.raises(ConfigError, match=words):
            recipe.build_model(option, data)
    again = pickle.loads(pickle.dumps(collate_of(names)))(splits["test"][:3])
    assert again["input_ids"].shape[0] == 6
    assert again["labels"].tolist() == [row["labels"] for row in splits["test"][:3]]
