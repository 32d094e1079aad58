"""The recipes of language models, causal-language-modeling and preference-optimization, with adapters for both.

Training is packed and evaluation is not; preferences have their loss by hand, a reference, and exact resumes.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.named_recipes import (
    TINY,
    Prepared,
    RecipeCase,
    collate_of,
    prepare_sources,
    save_model,
    trained,
    trainer_of,
)
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.outcomes import summarize_outcomes
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.recipes import DataInfo
from trainer_lib.recipes.preference_optimization import compute_metrics, preference_losses
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainflow.flows.new_project.starting import read_sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
SOURCES = ("stdlib:json", "stdlib:concurrent")
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 1e-2}
ORDERS = read_sample("word_orders.jsonl").splitlines(keepends=True)
PREFERENCES = RecipeCase(
    "preference-optimization",
    "pairs.jsonl",
    {"vocabulary": 600, "max_length": 128, "config": TINY, "split": {"validation": 0, "test": 0.25}},
)
TWICE: dict[str, Any] = {"per_device_train_batch_size": 16, "learning_rate": 1e-2}
TEXTS = ("prompt", "chosen", "rejected")
GOOD = "".join(
    json.dumps({"prompt": f"say {n}", "chosen": f" {n} is said", "rejected": f" said is {n}"}) + "\n" for n in range(12)
)
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}


def prepare(where: Path, *sources: str, **options: Any) -> Prepared:
    usual = {"vocabulary": 400, "length": 64, "overlong": "split", "split": {"validation": 0.0, "test": 0.3}}
    return prepare_sources("causal-language-modeling", list(sources or SOURCES), {**usual, **options}, where)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def base(packed: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save_model(packed, packed[0].build_model({"config": TINY}, packed[2]), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return PREFERENCES.prepare(tmp_path_factory.mktemp("pairs"), "".join(ORDERS[::2]))


@pytest.fixture(scope="module")
def known(pairs: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Any = pairs[0].build_model({}, pairs[2])
    torch.manual_seed(1)
    for each in model.parameters():  # not the one that the seed of the options gives
        each.data += 0.05 * torch.randn_like(each)
    return save_model(pairs, model, tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def of_known(known: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = "".join(ORDERS[:40])
    return PREFERENCES.prepare(tmp_path_factory.mktemp("of_known"), rows, config={}, folder=known)


# -- packed training --------------------------------------------------------------------------------------------------
def test_training_is_packed_evaluation_is_not_and_the_model_beats_the_frequencies(
    packed: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = packed
    counts = data.info["packing"]["train"]
    assert counts["tokens_out"] == counts["tokens_in"] == sum(len(row["input_ids"]) for row in splits["train"])
    assert counts["padding"] < 0.1 * counts["rows"] * 64
    assert any(len(row["lengths"]) > 1 for row in splits["train"])
    assert all(len(row["lengths"]) == 1 for row in splits["test"])
    trainer = trained(packed, tmp_path / "run", {"config": TINY}, 40, **BATCHES)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_nats_below_unigram"] > 0.2
    assert measured["eval_nats_per_token"] == pytest.approx(measured["eval_loss"], rel=1e-3)
    assert measured["eval_tokens"] == sum(len(row["input_ids"]) - 1 for row in splits["test"])
    # The frequencies of the tokens that were predicted, by hand.
    targets = np.concatenate([row["input_ids"][1:] for row in splits["test"]])
    shares = np.bincount(targets)[np.bincount(targets) > 0] / len(targets)
    assert math.log(measured["eval_unigram_perplexity"]) == pytest.approx(-(shares * np.log(shares)).sum())
    columns = recipe.prediction_columns(np.asarray(trainer.predict(splits["test"]).predictions), data)
    assert list(columns["tokens"]) == [len(row["input_ids"]) - 1 for row in splits["test"]]
    assert recipe.after_evaluate is not None
    made = recipe.after_evaluate(trainer.model.eval(), data, {"prompts": ["def "], "sample_tokens": 5})
    assert made["files"]["samples.txt"].startswith(b"def ")
    assert recipe.after_evaluate(trainer.model, data, {}) == {}
    asked = {"prompts": [{"prompt": "def ", "answer": "f"}], "sample_tokens": 5}
    judged = recipe.after_evaluate(trainer.model, data, asked)["metrics"]
    assert set(judged) == {"answers_right", "answers_right_low", "answers_right_high"}


def test_new_rows_are_texts_measured_as_documents_and_continued(packed: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = packed
    assert data.info["new_columns"] == {"text": "string", "new_tokens": "int64"}
    trainer = trained(packed, tmp_path / "run", {"config": TINY}, 20, **BATCHES)
    model, tokenizer = trainer.model, kept_tokenizer(data)
    end = tokenizer.eos_token_id

    def columns_of(rows: list[Any]) -> Any:
        return recipe.prediction_columns(np.asarray(trainer.predict(rows).predictions), data)

    known = [row for row in splits["test"] if row["input_ids"][-1] == end and len(row["input_ids"]) > 9]
    texts = [tokenizer.decode(row["input_ids"][:-1]) for row in known]
    assert len(texts) == 3
    wanted, found = columns_of(known), columns_of([{"text": each} for each in texts])
    assert list(found["tokens"]) == list(wanted["tokens"]) == [len(row["input_ids"]) - 1 for row in known]
    assert found["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
    assert np.exp(found["nats_per_token"]) == pytest.approx(found["perplexity"])
    # A text of several rows has the sums of its pieces.
    long = texts[0] * 40
    tokens = [*tokenizer(long)["input_ids"], end]
    whole = columns_of([{"text": long}])
    starts = range(0, len(tokens), 64)
    assert len(starts) > 2
    assert whole["tokens"][0] == len(tokens) - len(starts)
    pieces = [torch.tensor([tokens[start : start + 64]]) for start in starts if len(tokens) - start > 1]
    with torch.no_grad():
        nats = sum(float(model(input_ids=each, labels=each).loss) * (each.shape[1] - 1) for each in pieces)
    assert whole["nats_per_token"][0] * whole["tokens"][0] == pytest.approx(nats, rel=1e-4)
    # Each text is continued as it is alone, by as many tokens as its row asks for.
    asked = [{"text": text, "new_tokens": number} for text, number in zip([*texts, long], (5, 0, 9, 7), strict=True)]
    made = columns_of(asked)
    assert list(made["tokens"][:3]) == list(found["tokens"][:3])
    for row, continuation in zip(asked, made["continuation"], strict=True):
        ids = torch.tensor([tokenizer(row["text"])["input_ids"][-(64 - 9) :]])
        if row["new_tokens"] == 0:
            assert continuation == ""
            continue
        alone = model.generate(input_ids=ids, max_new_tokens=row["new_tokens"], do_sample=False, pad_token_id=end)
        assert continuation == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


def test_new_texts_that_cannot_be_measured_are_refused(packed: Prepared, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["text"] + ["some words and more of them"] * 20))
    strict = prepare(tmp_path, str(tmp_path / "texts.csv"), overlong="refuse", pack=[], vocabulary=300)
    number = "column 'new_tokens': {} is not a number of tokens from 0 on and below the 64"
    for made, rows, words in (
        (packed, [{"text": "a"}, {"text": " "}], "column 'text': the text is empty"),
        (packed, [{"text": "a", "new_tokens": 64}], number.format(64)),
        (packed, [{"text": "a", "new_tokens": -1}], number.format(-1)),
        (strict, [{"text": "word " * 500}], r"the text has .* tokens, and a row has at most 64"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            collate_of(made)(rows)
        assert caught.value.remedy


def test_tables_become_documents_and_lost_tokens_are_counted(tmp_path: Path) -> None:
    rows = ["text"] + ["some words and more of them"] * 20 + ["word " * 500]
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    _, splits, data = prepare(tmp_path, str(tmp_path / "texts.csv"), overlong="drop", pack=[], vocabulary=300)
    counts = [data.info["packing"][name] for name in ("train", "test")]
    assert sum(each["documents_dropped"] for each in counts) == 1
    assert sum(each["tokens_lost"] for each in counts) > 64
    assert sum(each["documents"] for each in counts) == 21 == sum(map(len, splits.values())) + 1
    with pytest.raises(DataError, match="the document has") as caught:
        prepare(tmp_path, str(tmp_path / "texts.csv"), overlong=None)
    assert "texts.csv, row 20 (line 22)" in caught.value.message
    assert "overlong=split" in str(caught.value.remedy)


def test_a_model_and_its_tokenizer_come_from_a_folder(base: Path, packed: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepare(tmp_path, folder=base)
    assert data.info["vocabulary"] == 400
    ids = [[row["input_ids"].tolist() for row in each["train"]] for each in (splits, packed[1])]
    assert ids[0] == ids[1]
    model: Any = recipe.build_model({"folder": base}, data)
    assert model.dtype == torch.float32
    with pytest.raises(ConfigError, match="reads at most 64 tokens") as caught:
        prepare(tmp_path, folder=base, length=65)
    assert caught.value.field == "prepare.options.length"


def test_models_that_do_not_fit_are_refused(packed: Prepared, base: Path, tmp_path: Path) -> None:
    recipe, _, data = packed
    _, _, alone = prepare(tmp_path, "stdlib:json", pack=[])
    larger = DataInfo({"url": data.url, "info": {**data.info, "vocabulary": 500}, "splits": {}, "files": []})
    for info, options, words in (
        (data, {"adapter": {"rank": 8}}, "Adapters are for a model that has been trained"),
        (data, {"folder": base, "dtype": "float23"}, 'Did you mean "float32"?'),
        (data, {"folder": base, "config": TINY}, "its own configuration"),
        (data, {"folder": tmp_path / "nowhere"}, "cannot load this model"),
        (data, {"config": MAMBA}, "cannot train on packed rows"),
        (data, {"config": TINY, "flatten": True}, "train.model.flatten … no such option"),
        (larger, {"folder": base}, "knows 400 tokens, and the tokenizer of the data has 500"),
    ):
        with pytest.raises(ConfigError) as caught:
            recipe.build_model(options, info)
        assert all(part in str(caught.value) for part in words.split(" … ")), words
        assert caught.value.remedy
    recipe.build_model({"config": MAMBA}, alone)


# -- preferences ------------------------------------------------------------------------------------------------------
def by_hand(model: Any, tokenizer: Any, row: dict[str, Any], name: str) -> torch.Tensor:
    """The logarithm of an answer's probability, token after token in float64, without batches or padding."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = [*tokenizer(row[name])["input_ids"], tokenizer.eos_token_id]
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model.double()(input_ids=tokens).logits[0]
    total = torch.zeros((), dtype=torch.float64)
    for place, token in enumerate(answer):
        scores = logits[len(prompt) + place - 1]
        total = total + scores[token] - torch.log(torch.exp(scores).sum())
    return total


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_loss_and_gradients_are_those_of_the_formula(
    of_known: Prepared, known: Path, tmp_path: Path, loss: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe, splits, data = of_known
    model: Any = recipe.build_model({"folder": known, "beta": 0.3, "loss": loss}, data)
    torch.manual_seed(2)
    for each in model.parameters():
        each.data += 0.02 * torch.randn_like(each)
    rows = splits["train"][:5]
    trainer = trainer_of(recipe, data, model, tmp_path, rows, 1, **TWICE)
    model.double()  # in single precision what cancels in a margin is as large as what remains of it
    found: Any = trainer.compute_loss(model, collate_of(of_known)(rows))
    found.backward()
    other: Any = AutoModelForCausalLM.from_pretrained(known)
    other.load_state_dict(model.state_dict())
    reference: Any = AutoModelForCausalLM.from_pretrained(known).double()
    tokenizer = AutoTokenizer.from_pretrained(known)
    wanted: Any = torch.zeros((), dtype=torch.float64)
    for row in rows:
        with torch.no_grad():
            before = [by_hand(reference, tokenizer, row, name) for name in ("chosen", "rejected")]
        kept = [row["reference_chosen"], row["reference_rejected"]]
        assert kept == pytest.approx(list(map(float, before)), rel=1e-5)
        own = [by_hand(other, tokenizer, row, name) for name in ("chosen", "rejected")]
        margin = (own[0] - kept[0]) - (own[1] - kept[1])  # rounded, as the loss has them
        if loss == "orpo":
            tokens = [len(tokenizer(row[name])["input_ids"]) + 1 for name in ("chosen", "rejected")]
            means = [total / count for total, count in zip(own, tokens, strict=True)]
            odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
            wanted = wanted - means[0] - 0.3 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
        else:
            wanted = wanted - torch.log(1 / (1 + torch.exp(-0.3 * margin)))
    wanted = wanted / len(rows)
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad.double(), two.grad, rtol=1e-3, atol=1e-5 * float(two.grad.abs().max()) + 1e-8)


def test_a_model_at_random_learns_an_order_of_words_and_says_so_of_new_rows(pairs: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = pairs
    model: Any = recipe.build_model({}, data)
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 60, **TWICE)
    assert trainer.evaluate(eval_dataset=splits["test"])["eval_loss"] == pytest.approx(np.log(2), abs=1e-4)
    trainer.train()
    remembered = trainer.compute_metrics = Remembered(trainer.compute_metrics)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_accuracy_over_length"] > 0.1
    assert measured["eval_accuracy_over_reference"] > 0.1
    assert measured["eval_length_accuracy"] < 0.6
    assert measured["eval_reward_margin"] > 0
    assert min(remembered.resampled(50)["accuracy_over_length"]) > 0
    # The reference of new rows is the model that training began with, built again.
    known = trainer.predict(splits["test"][:9])
    new = trainer.predict([{name: row[name] for name in TEXTS} for row in splits["test"][:9]])
    assert new.label_ids is None
    assert new.predictions == pytest.approx(known.predictions, abs=1e-4)
    columns = recipe.prediction_columns(new.predictions, data)
    assert list(columns["prediction"]) == ["chosen" if margin > 0 else "rejected" for margin in columns["margin"]]
    assert all(0.5 <= each <= 1 for each in columns["probability"])
    summary = summarize_outcomes(known.predictions, known.label_ids[0])
    assert summary is not None
    assert len(summary["hardest"]) == 9
    # Prompts alone have an answer generated, whatever stands beside them in their batch.
    prompts = [{"prompt": row["prompt"]} for row in splits["test"][:4]]
    made, alone = (
        recipe.prediction_columns(trainer.predict(rows).predictions, data)["prediction"]
        for rows in (prompts, prompts[:1])
    )
    assert len(made) == 4
    assert made[0] == alone[0] != ""


def test_adapters_leave_the_reference_as_it_is(of_known: Prepared, known: Path, tmp_path: Path) -> None:
    recipe, splits, data = of_known
    model: Any = recipe.build_model({"folder": known, "adapter": {"rank": 4}}, data)
    assert all("lora" in name for name, each in model.named_parameters() if each.requires_grad)
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 5, **TWICE)
    trainer.train()
    seen = trainer.predict(splits["test"]).predictions
    assert np.abs(seen).max() > 0.01
    new = trainer.predict([{name: row[name] for name in TEXTS} for row in splits["test"]]).predictions
    assert new == pytest.approx(seen, abs=1e-4)


def test_another_model_than_the_reference_is_refused_before_the_first_step(
    pairs: Prepared, of_known: Prepared, known: Path, tmp_path: Path
) -> None:
    recipe, splits, data = of_known
    for made, options, words in (
        (of_known, {}, "in prepare that is from a folder … Name one model in train.model and in prepare.options."),
        (pairs, {"pretrained": "gpt2"}, "in prepare that is one at random"),
        (pairs, {"config": TINY}, "belongs to prepare … Move it to prepare.options.config."),
        (of_known, {"folder": known, "beta": 0.0}, "train.model.beta"),
        (of_known, {"folder": known, "loss": "dpo"}, "train.model.loss"),
        (pairs, {"adapter": {"rank": 4}}, "has been trained"),
    ):
        with pytest.raises(ConfigError) as caught:
            made[0].build_model(options, made[2])
        assert all(part in str(caught.value) for part in words.split(" … ")), words
    model: Any = recipe.build_model({"folder": known}, data)
    for each in model.parameters():  # the folder's model was trained on since prepare
        each.data *= 1.5
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 1, **TWICE)
    with pytest.raises(ConfigError, match="it is another model") as caught:
        trainer.train()
    assert "--force prepare" in str(caught.value.remedy)


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(known: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(known, tmp_path / "bare")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    error = PREFERENCES.refused(tmp_path, GOOD, folder=folder, config={})
    assert error.remedy == "Set prepare.options.pad_token=<|endoftext|>, a token that it has."
    made = PREFERENCES.prepare(tmp_path, GOOD, folder=folder, config={}, pad_token="<|endoftext|>")
    collate, rows = collate_of(made), made[1]["train"]
    assert pickle.loads(pickle.dumps(collate))(rows)["input_ids"].shape[0] == 2 * len(rows)
    assert PREFERENCES.refused(tmp_path, GOOD, folder=known).field == "prepare.options.config"
    long = PREFERENCES.refused(tmp_path, GOOD, folder=known, config={}, max_length=500)
    assert long.message.startswith("The model reads")
    with pytest.raises(DataError, match="tokens, and with its answer at most 128 are read"):
        collate([{"prompt": "a long prompt " * 200}])


def test_metrics_count_ties_as_half_and_take_the_better_rule_of_lengths() -> None:
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, 0.0]])
    known = np.array([[-1.0, -2.0, 3, 5], [-1.0, -2.0, 3, 5], [-4.0, -2.0, 3, 5], [-1.0, -1.0, 9, 5]])
    measured = compute_metrics(EvalPrediction(rewards, (np.zeros(4), known)))
    assert measured["accuracy"] == 2.5 / 4
    assert measured["reference_accuracy"] == 2.5 / 4
    assert measured["length_accuracy"] == 3 / 4
    assert measured["accuracy_over_length"] == -0.125
    assert measured["reward_margin"] == 0.75
    assert float(preference_losses(torch.zeros(1, 2), beta=0.1)) == pytest.approx(np.log(2))
