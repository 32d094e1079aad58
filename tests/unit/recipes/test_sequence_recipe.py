"""The recipe sequence-to-sequence: texts that are generated and scored, and pairs of texts that it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import character_names
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.text_scores import score_text
from trainer_lib.recipes.text_tensors import encode_texts

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "learning_rate": 1e-2}
TINY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
BART = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
GIVEN = {"text": "name", "target": "parts"}


def prepare(where: Path, content: str, /, **options: Any) -> Prepared:
    return prepare_file("sequence-to-sequence", where / "names.csv", content, {**GIVEN, **options})


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepare(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lines = "".join(character_names().splitlines(keepends=True)[:400])
    options: dict[str, Any] = {"vocabulary": 400, "target_length": 24, "split": {"test": 0.1, "validation": 0}}
    return prepare(tmp_path_factory.mktemp("prepared"), lines, **options)


def test_texts_are_generated_in_evaluation_and_for_new_rows(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    torch.manual_seed(0)
    trainer = trainer_of(
        recipe, data, recipe.build_model({"config": TINY}, data), tmp_path, splits["train"], 30, **BATCHES
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert not losses or losses[-1] < 6
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert data.info["label"] == "parts"  # new rows may have it
    assert data.info["cut_texts"] == 0
    words = data.info["lead_words"]
    leads = [" ".join(row["name"].split()[:words]) for row in splits["test"]]
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


def test_a_batch_ends_its_targets_and_keeps_their_texts(prepared: Prepared) -> None:
    recipe, splits, data = prepared
    collate = recipe.collate_with(data)
    assert collate is not None
    long = {**splits["train"][0], "labels": "latin " * 40}
    batch = collate([long, *splits["train"][1:4]])
    assert batch["labels"].shape == (4, 24), "longer targets are cut"
    for row in batch["labels"]:
        tokens = row[row >= 0]
        assert tokens[-1] == data.info["eos_token_id"]
        assert (tokens == data.info["eos_token_id"]).sum() == 1
    assert "labels" not in collate([{"name": "a"}])
    again = pickle.loads(pickle.dumps(collate))([long, *splits["train"][1:4]])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_a_perfect_model_scores_one_on_all_rows_and_on_resamples(prepared: Prepared) -> None:
    recipe, splits, data = prepared
    collate, compute = recipe.collate_with(data), recipe.compute_metrics_with(data)
    assert collate is not None
    assert compute is not None
    batch = {name: value.numpy() for name, value in collate(splits["test"][:9]).items()}
    given = EvalPrediction(batch["labels"], (batch["wanted"], batch["lead"]))
    measured = compute(given)
    assert measured["exact_match"] == measured["rouge_l"] == 1
    assert measured["chrf"] == pytest.approx(1)
    chosen = np.array([3] * 9)
    one = compute(EvalPrediction(*(tuple(part[chosen] for part in each) if isinstance(each, tuple) else each[chosen]
                                   for each in (given.predictions, given.label_ids))))  # fmt: skip
    lead = " ".join(splits["test"][3]["name"].split()[: data.info["lead_words"]])
    assert one["lead_chrf"] == pytest.approx(score_text(lead, splits["test"][3]["labels"])[2])
    empty = EvalPrediction(np.full((1, 2), -100), (encode_texts(["a"]).numpy(), encode_texts(["a"]).numpy()))
    assert compute(empty)["rouge_l_over_lead"] == -1


def test_models_come_from_configurations_and_folders_with_beams_or_adapters(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    for config in (TINY, {**BART, "d_model": 32}):
        first: Any = recipe.build_model({"config": config}, data)
        folder = tmp_path / first.config.model_type
        first.save_pretrained(folder)
        second: Any = recipe.build_model({"folder": folder, "beams": 2}, data)
        assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
        assert (second.generation_config.num_beams, second.generation_config.max_new_tokens) == (2, 24)
        trainer = trainer_of(recipe, data, second, tmp_path / "run", splits["train"], 1, **BATCHES)
        trainer.train()
        assert 0 <= trainer.evaluate(eval_dataset=splits["test"][:4])["eval_chrf"] <= 1
    with pytest.raises(ConfigError, match="Adapters are for a model that has been trained"):
        recipe.build_model({"lora": {"r": 4}}, data)
    adapted: Any = recipe.build_model({"folder": tmp_path / "t5", "lora": {"r": 4}}, data)
    assert all("lora" in name for name, each in adapted.named_parameters() if each.requires_grad)
    trainer = trainer_of(recipe, data, adapted, tmp_path / "run", splits["train"], 1, **BATCHES)
    trainer.train()
    assert 0 <= trainer.evaluate(eval_dataset=splits["test"][:4])["eval_chrf"] <= 1


def test_scores_are_those_of_the_papers() -> None:
    # LCS 3 of 4 and 5 words: F = 2 * 3 / (4 + 5).
    assert score_text("the cat sat down", "the cat has sat there")[1] == pytest.approx(6 / 9)
    assert score_text(" a b ", "a b") == pytest.approx((1, 1, 1))
    assert score_text("", "a") == (0, 0, 0)
    assert score_text("a", "A")[0] == 0


def test_pairs_that_spoil_the_training_are_refused(tmp_path: Path) -> None:
    good = "name,parts\n" + "a,b\n" * 9
    assert "row 9 (line 11), column 'parts': there is no value" in refused(tmp_path, good + "a,\n").message
    assert "row 9 (line 11), column 'name': there is no value" in refused(tmp_path, good + ' ,"b"\n').message
    assert refused(tmp_path, good, target="part").remedy == 'Did you mean "parts"?'
    assert refused(tmp_path, good, text="nam").remedy == 'Did you mean "name"?'
    assert "where the texts are" in refused(tmp_path, good, text=None).message
    assert refused(tmp_path, good, target=None).field == "prepare.options.target"
    assert "no class to cut by" in refused(tmp_path, good, split={"by": "stratified"}).message
    assert refused(tmp_path, good, max_lenght=3).remedy == 'Did you mean "max_length"?'
    assert "cannot load this model" in refused(tmp_path, good, folder=tmp_path / "none").message
    taken = refused(tmp_path, good.replace("name", "labels", 1), text="labels")
    assert "uses the name 'labels' itself" in taken.message
