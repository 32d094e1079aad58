"""The recipe embeddings: ranks among all texts of a split, a loss within batches, and pairs that it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import entity_names
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.recipes.retrieval import find_ranks, measure_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 32, "learning_rate": 5e-3}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GIVEN = {"query": "entity", "positive": "character"}


def prepare(where: Path, content: str, /, **options: Any) -> Prepared:
    return prepare_file("embeddings", where / "names.csv", content, {**GIVEN, **options})


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepare(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    options: dict[str, Any] = {"vocabulary": 400, "max_length": 32, "split": {"test": 0.2, "validation": 0}}
    return prepare(tmp_path_factory.mktemp("prepared"), entity_names(), **options)


def test_a_model_that_begins_at_random_beats_the_tokens_in_common_and_embeds_new_rows(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = trainer_of(
        recipe, data, recipe.build_model({"config": TINY}, data), tmp_path, splits["train"], 60, **BATCHES
    )
    trainer.train()
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
    ranks = find_ranks(vectors[0] @ vectors[1].T, right)
    assert measured["eval_mrr"] == pytest.approx((1 / ranks).mean(), rel=1e-3)
    # Resamples of rows keep the candidates: their mean is that of all rows.
    resampled = remembered.resampled("0" * 16, 200)
    assert np.mean(resampled["mrr"]) == pytest.approx(measured["eval_mrr"], abs=0.02)
    assert set(resampled["candidates"]) == {measured["eval_candidates"]}


def test_texts_that_are_cut_are_counted_with_their_prefixes(prepared: Prepared, tmp_path: Path) -> None:
    assert prepared[2].info["cut_texts"] == 0
    rows = "".join(f"q{row},p{row}\n" for row in range(20))
    split = {"test": 0.2, "validation": 0}
    more: dict[str, Any] = {"vocabulary": 200, "max_length": 12, "split": split}
    content = f"entity,character\n{rows}"
    assert prepare(tmp_path, content, **more)[2].info["cut_texts"] == 0
    assert prepare(tmp_path, content, **more, query_prefix="find this: " * 5)[2].info["cut_texts"] == 20


def test_the_overlap_is_that_of_tokens_whatever_the_batches(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    model = recipe.build_model({"config": TINY}, data)
    rows = [dict(row) for row in splits["test"][:40]]
    rows[7] = {**rows[7], "character": rows[3]["character"], "labels": rows[3]["labels"]}  # one text, two queries
    found = []
    for size in (3, 40):
        trainer = trainer_of(recipe, data, model, tmp_path, rows, 1, per_device_eval_batch_size=size, **BATCHES)
        found.append(trainer.evaluate(eval_dataset=rows))
        assert trainer._candidates is None
    for name in ("eval_mrr", "eval_overlap_mrr", "eval_candidates"):
        assert found[0][name] == pytest.approx(found[1][name]), name
    assert found[0]["eval_candidates"] == 39
    collate = recipe.collate_with(data)
    assert collate is not None
    batch = collate(rows)
    sets = [set(ids[mask > 0].tolist()) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    firsts = {row["labels"]: number for number, row in reversed(list(enumerate(rows)))}
    others = [sets[40 + number] for number in sorted(firsts.values())]
    order = sorted(firsts, key=lambda label: firsts[label])
    scores = np.array([[len(own & other) / len(other) ** 0.5 for other in others] for own in sets[:40]])
    by_hand = find_ranks(scores, np.array([order.index(row["labels"]) for row in rows]))
    assert found[0]["eval_overlap_mrr"] == pytest.approx((1 / by_hand).mean())


def test_accumulated_batches_have_the_mean_of_their_losses(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    model = recipe.build_model(
        {"config": {**TINY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}, data
    )
    collate = recipe.collate_with(data)
    assert collate is not None
    trainer = trainer_of(
        recipe,
        data,
        model,
        tmp_path,
        splits["train"][:16],
        1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        logging_steps=1,
    )
    trainer.train()
    logged = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    order = [trainer.train_dataset[row] for row in range(16)]
    single = float(trainer.compute_loss(model, collate(order[:8])).detach())
    assert 0.3 * single < logged < 3 * single, "a mean, not a sum over sixteen rows"
    # A text that belongs to two queries of a batch is not a wrong one.
    same = [{**row, "labels": 0, "character": order[0]["character"]} for row in order[:4]]
    assert float(trainer.compute_loss(model, collate(same)).detach()) == pytest.approx(0, abs=1e-6)


def test_ranks_of_equal_scores_are_shared() -> None:
    scores = np.array([[0.1, 0.9, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    assert find_ranks(scores, np.array([2, 0, 0])).tolist() == [2, 2, 1.5]
    measured = measure_ranks(np.array([1.0, 2.0, 20.0]), np.array([2.0, 2.0, 2.0]), np.array([40, 40, 40]))
    assert measured["mrr"] == pytest.approx((1 + 0.5 + 0.05) / 3)
    assert (measured["recall_at_1"], measured["recall_at_5"]) == pytest.approx((1 / 3, 2 / 3))
    assert measured["chance_recall_at_10"] == 0.25


def test_models_come_from_folders_with_adapters_and_choices(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    first: Any = recipe.build_model({"config": TINY}, data)
    first.save_pretrained(tmp_path / "model")
    second: Any = recipe.build_model({"folder": tmp_path / "model", "pooling": "first", "temperature": 1}, data)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert (second.config.embedding_pooling, second.config.embedding_temperature) == ("first", 1.0)
    adapted: Any = recipe.build_model({"folder": tmp_path / "model", "lora": {"r": 4}}, data)
    assert all("lora" in name for name, each in adapted.named_parameters() if each.requires_grad)
    for model in (second, adapted):
        trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 1, **BATCHES)
        trainer.train()
        assert 0 < trainer.evaluate(eval_dataset={"a": splits["test"][:5]})["eval_a_mrr"] <= 1
    with pytest.raises(ConfigError, match="not one of the choices"):
        recipe.build_model({"pooling": "mena"}, data)
    with pytest.raises(ConfigError, match="cannot be divided"):
        recipe.build_model({"temperature": 0.0}, data)
    collate = recipe.collate_with(data)
    assert collate is not None
    again = pickle.loads(pickle.dumps(collate))(splits["test"][:3])
    assert again["input_ids"].shape[0] == 6
    assert again["places"].tolist() == [0, 1, 2]


def test_pairs_that_spoil_the_training_are_refused(tmp_path: Path) -> None:
    good = "entity,character\n" + "".join(f"a{number},b{number}\n" for number in range(9))
    assert "row 9 (line 11), column 'character': there is no value" in refused(tmp_path, good + "a,\n").message
    assert "row 9 (line 11), column 'entity': there is no value" in refused(tmp_path, good + ' ,"b"\n').message
    assert refused(tmp_path, good, positive="charakter").remedy == 'Did you mean "character"?'
    assert "no class to cut by" in refused(tmp_path, good, split={"by": "stratified"}).message
    assert "have one text" in refused(tmp_path, "entity,character\n" + "a,b\n" * 9).message
    assert "uses the name 'place' itself" in refused(tmp_path, good.replace("entity", "place"), query="place").message
