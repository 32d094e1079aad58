"""The recipe token-classification: words of files, tags of words whatever their tokens, and rows that it refuses."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import code_lines
from trainer_lib import EvalPrediction, Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.recipes.tag_metrics import find_usual_tags, measure_tags
from trainer_lib.storage import Store

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
Prepared = tuple[Recipe, dict[str, list[Any]], DataInfo]


def prepare(where: Path, content: str, /, *, file: str = "lines.jsonl", **options: Any) -> Prepared:
    (where / file).write_text(content)
    recipe = load(recipe_file("token-classification"), where)
    out = PrepareOutput(Store.open(where / "out"), [str(where / file)])
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare(options, out).items()}
    files = [vars(entry) for entry in out.files()]
    rows = {name: {"rows": len(each)} for name, each in splits.items()}
    data = {"url": str(where / "out"), "info": out.checked_info(), "splits": rows, "files": files}
    return recipe, splits, DataInfo(data)


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepare(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


def json_lines(*rows: tuple[Any, Any]) -> str:
    return "".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in rows)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lines = "".join(code_lines().splitlines(keepends=True)[:400])
    where = tmp_path_factory.mktemp("prepared")
    return prepare(where, lines, max_length=32, vocabulary=800, split={"test": 0.3, "validation": 0})


def trainer_of(recipe: Recipe, data: DataInfo, model: Any, folder: Path, rows: list[Any], steps: int) -> Trainer:
    found: Trainer = recipe.trainer_class(Trainer)(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=recipe.collate_with(data),
        train_dataset=rows,
        compute_metrics=recipe.compute_metrics_with(data),
    )
    return found


def test_a_model_that_begins_at_random_beats_the_usual_tags_and_takes_new_rows(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = trainer_of(recipe, data, recipe.build_model({"config": TINY}, data), tmp_path, splits["train"], 60)
    trainer.train()
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


def test_each_word_has_the_label_of_its_first_token_also_in_the_second_sequence(prepared: Prepared) -> None:
    recipe, splits, data = prepared
    collate = recipe.collate_with(data)
    assert collate is not None
    words = ["unbelievably_long_name", "=", "1"] * 12
    row = {**splits["train"][0], "words": words, "labels": np.arange(36) % 14, "usual_tags": np.zeros(36, np.int64)}
    batch = collate([row, splits["train"][1]])
    assert batch["places"].shape == (2, 36), "the rows are counted by the first tensor"
    assert batch["input_ids"].shape[0] > 3
    assert batch["input_ids"].shape[1] <= 32
    assert (batch["labels"] >= 0).sum() == 36 + len(splits["train"][1]["words"])
    assert batch["labels"].flatten()[batch["places"][0]].tolist() == row["labels"].tolist()
    again = pickle.loads(pickle.dumps(collate))([row, splits["train"][1]])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_sentences_in_columns_and_lists_in_parquet_are_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(["EU", "rejects", "it"], ["B-ORG", "O", "O"]), (["Peter", "B", "x"], ["B-PER", "I-PER", "O"])] * 10
    text = "-DOCSTART- O\n\n" + "\n".join("".join(f"{w} NN {t}\n" for w, t in zip(*row, strict=True)) for row in rows)
    options: dict[str, Any] = {"split": {"test": 0.3, "validation": 0, "seed": 1}}
    _, first, data = prepare(tmp_path, text, file="a.conll", **options)
    assert data.info["classes"] == ["B-ORG", "B-PER", "I-PER", "O"]
    _, second, _ = prepare(tmp_path, json_lines(*rows), **options)
    assert first == second
    pq.write_table(pa.table({"words": [row[0] for row in rows], "tags": [row[1] for row in rows]}), tmp_path / "a.pq")
    recipe = load(recipe_file("token-classification"), tmp_path)
    out = PrepareOutput(Store.open(tmp_path / "out"), [str(tmp_path / "a.pq")])
    assert {name: [dict(row) for row in each] for name, each in recipe.prepare(options, out).items()} == first


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
    assert find_usual_tags([(["a", "a", "b"], [1, 0, 1])]) == ({"a": 0, "b": 1}, 1)


def test_rows_that_spoil_the_training_are_refused(tmp_path: Path) -> None:
    good = [(["a", "b"], ["X", "Y"])] * 9
    short = refused(tmp_path, json_lines(*good, (["a", "b"], ["X"])))
    assert "lines.jsonl, row 9 (line 10): there are 2 words and 1 tags." in short.message
    assert "column 'words': the list of words is empty." in refused(tmp_path, json_lines(*good, ([], []))).message
    assert "there is no value" in refused(tmp_path, json_lines(*good, (None, ["X"]))).message
    assert "column 'words': a text is not a list" in refused(tmp_path, json_lines(*good, ("a b", ["X"]))).message
    empty = refused(tmp_path, json_lines(*good, (["a", ""], ["X", "Y"])))
    assert "row 9 (line 10), column 'words': number 1 of the list is empty" in empty.message
    given = {"by": "column", "column": "fold"}
    rows = [{"words": ["a", "b"], "tags": ["X", "Y"], "fold": "train"}, {"words": ["a"], "tags": ["Z"], "fold": "test"}]
    new = refused(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), split=given)
    assert "row 1 (line 2): the tag 'Z' of word 0 ('a') in the split 'test' is in no row of train" in new.message
    assert "there is nothing to learn" in refused(tmp_path, json_lines(*[(["a"], ["X"])] * 9)).message
    assert "no class to cut by" in refused(tmp_path, json_lines(*good), split={"by": "stratified"}).message
    assert refused(tmp_path, json_lines(*good), words="word").remedy == 'Did you mean "words"?'
    assert refused(tmp_path, json_lines(*good), max_lenght=3).remedy == 'Did you mean "max_length"?'
    bare = refused(tmp_path, "EU\n\n", file="a.conll")
    assert "a.conll, line 1: the word 'EU' has no tag" in bare.message


def test_a_model_comes_from_a_folder_with_a_new_head_or_adapters(prepared: Prepared, tmp_path: Path) -> None:
    recipe, _, data = prepared
    first: Any = recipe.build_model({"config": TINY}, data)
    first.save_pretrained(tmp_path)
    second = recipe.build_model({"folder": tmp_path}, data)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    fewer = DataInfo({"url": data.url, "info": {**data.info, "classes": ["a", "b"]}, "splits": {}, "files": []})
    with pytest.raises(ConfigError, match="knows 14 classes, and the data has 2"):
        recipe.build_model({"folder": tmp_path}, fewer)
    assert recipe.build_model({"folder": tmp_path, "new_head": True}, fewer).config.num_labels == 2
    with pytest.raises(ConfigError, match="Adapters are for a model that has been trained"):
        recipe.build_model({"lora": {"r": 4}}, data)
    adapted: Any = recipe.build_model({"folder": tmp_path, "lora": {"r": 4}}, data)
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert any("classifier" in name for name in trained)
    assert all("lora" in name or "classifier" in name for name in trained)
