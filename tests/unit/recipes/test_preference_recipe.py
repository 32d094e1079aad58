"""The recipe preference-optimization: its loss by hand, the reference, new rows, exact resumes, and what it refuses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.new_project.starter_data import word_orders
from tests.support.named_recipes import Prepared, prepare_file, trainer_of
from tests.support.resuming import prove
from trainer_lib import TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.evaluation.outcomes import summarize_outcomes
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.recipes.preference_scores import measure_preferences, preference_losses

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GIVEN: dict[str, Any] = {
    "vocabulary": 600,
    "max_length": 128,
    "config": TINY,
    "split": {"validation": 0, "test": 0.25},
}
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 16, "learning_rate": 1e-2}
TEXTS = ("prompt", "chosen", "rejected")


def prepare(where: Path, content: str, /, **options: Any) -> Prepared:
    return prepare_file("preference-optimization", where / "pairs.jsonl", content, {**GIVEN, **options})


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row_of(number: int, **changed: Any) -> dict[str, Any]:
    return {"prompt": f"say {number}", "chosen": f" {number} is said", "rejected": f" said is {number}", **changed}


GOOD = [row_of(number) for number in range(12)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("prepared"), "".join(word_orders().splitlines(keepends=True)[::2]))


@pytest.fixture(scope="module")
def base(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, as `save_pretrained` writes them."""
    recipe, _, data = prepared
    folder = tmp_path_factory.mktemp("base")
    model: Any = recipe.build_model({}, data)
    torch.manual_seed(1)
    for each in model.parameters():  # not the one that the seed of the options gives
        each.data += 0.05 * torch.randn_like(each)
    model.save_pretrained(folder)
    for name in data.info["tokenizer"]:
        (folder / Path(name).name).write_bytes(data.read_file(name))
    return folder


def by_hand(model: Any, data: Any, tokenizer: Any, row: dict[str, Any], name: str) -> torch.Tensor:
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


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_loss_and_gradients_are_those_of_the_formula(
    prepared: Prepared, base: Path, tmp_path: Path, loss: str, smoothing: float
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    content = word_orders().splitlines(keepends=True)[:40]
    options = {"vocabulary": 4000, "config": {}, "folder": base}
    recipe, splits, data = prepare(tmp_path, "".join(content), **options)
    chosen = {"folder": base, "beta": 0.3, "loss": loss, "label_smoothing": smoothing}
    model: Any = recipe.build_model(chosen, data)
    torch.manual_seed(2)
    for each in model.parameters():
        each.data += 0.02 * torch.randn_like(each)
    rows = splits["train"][:5]
    trainer = trainer_of(recipe, data, model, tmp_path, rows, 1, **BATCHES)
    found: Any = trainer.compute_loss(model, recipe.collate_with(data)(rows))  # type: ignore[misc]
    found.backward()
    other: Any = AutoModelForCausalLM.from_pretrained(base)
    other.load_state_dict(model.state_dict())
    reference: Any = AutoModelForCausalLM.from_pretrained(base).double()
    tokenizer = AutoTokenizer.from_pretrained(base)
    wanted: Any = torch.zeros((), dtype=torch.float64)
    for row in rows:
        with torch.no_grad():
            known = [by_hand(reference, data, tokenizer, row, name) for name in ("chosen", "rejected")]
        assert [row["reference_chosen"], row["reference_rejected"]] == pytest.approx(list(map(float, known)), rel=1e-5)
        own = [by_hand(other, data, tokenizer, row, name) for name in ("chosen", "rejected")]
        margin = (own[0] - known[0]) - (own[1] - known[1])
        if loss == "ipo":
            wanted = wanted + (margin - 1 / 0.6) ** 2
        else:
            right = 1 / (1 + torch.exp(-0.3 * margin))
            wanted = wanted - (1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right)
    wanted = wanted / len(rows)
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad.double(), two.grad, rtol=1e-3, atol=1e-5 * float(two.grad.abs().max()) + 1e-8)


def test_a_model_at_random_learns_an_order_of_words_and_says_so_of_new_rows(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    model: Any = recipe.build_model({}, data)
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 60, **BATCHES)
    assert trainer.evaluate(eval_dataset=splits["test"])["eval_loss"] == pytest.approx(np.log(2), abs=1e-4)
    trainer.train()
    remembered = trainer.compute_metrics = Remembered(trainer.compute_metrics)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_accuracy_over_length"] > 0.1
    assert measured["eval_accuracy_over_reference"] > 0.1
    assert measured["eval_length_accuracy"] < 0.6
    assert measured["eval_reward_margin"] > 0
    assert min(remembered.resampled("0" * 16, 50)["accuracy_over_length"]) > 0
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
    made = recipe.prediction_columns(trainer.predict(prompts).predictions, data)["prediction"]
    alone = recipe.prediction_columns(trainer.predict(prompts[:1]).predictions, data)["prediction"]
    assert len(made) == 4
    assert made[0] == alone[0] != ""


def test_adapters_leave_the_reference_as_it_is(base: Path, tmp_path: Path) -> None:
    recipe, splits, data = prepare(tmp_path, lines(*GOOD), folder=base, config={})
    model: Any = recipe.build_model({"folder": base, "lora": {"r": 4}}, data)
    assert all("lora" in name for name, each in model.named_parameters() if each.requires_grad)
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 5, **BATCHES)
    trainer.train()
    known = trainer.predict(splits["test"]).predictions
    assert np.abs(known).max() > 0.01
    new = trainer.predict([{name: row[name] for name in TEXTS} for row in splits["test"]]).predictions
    assert new == pytest.approx(known, abs=1e-4)


def test_a_run_that_goes_on_ends_like_one_that_was_not_stopped(prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepared

    def make(folder: Path, *callbacks: Any) -> Any:
        torch.manual_seed(0)
        return recipe.trainer_class(object)(  # its own class
            model=recipe.build_model({}, data),
            args=TrainingArguments(
                output_dir=str(folder),
                max_steps=8,
                save_steps=3,
                gradient_accumulation_steps=2,
                remove_unused_columns=False,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **BATCHES,
            ),
            data_collator=recipe.collate_with(data),
            train_dataset=splits["train"],
            callbacks=list(callbacks),
        )

    prove(make, tmp_path, 5)


def test_another_model_than_the_reference_is_refused_before_the_first_step(
    prepared: Prepared, base: Path, tmp_path: Path
) -> None:
    recipe, splits, data = prepare(tmp_path, lines(*GOOD), folder=base, config={})
    with pytest.raises(ConfigError, match=r"in prepare that is from a folder") as caught:
        recipe.build_model({}, data)
    assert caught.value.remedy == "Name one model in train.model and in prepare.options."
    with pytest.raises(ConfigError, match=r"in prepare that is one at random"):
        prepared[0].build_model({"pretrained": "gpt2"}, prepared[2])
    with pytest.raises(ConfigError, match="belongs to prepare") as caught:
        prepared[0].build_model({"config": TINY}, prepared[2])
    assert caught.value.remedy == "Move it to prepare.options.config."
    model: Any = recipe.build_model({"folder": base}, data)
    for each in model.parameters():  # the folder's model was trained on since prepare
        each.data *= 1.5
    trainer = trainer_of(recipe, data, model, tmp_path, splits["train"], 1, **BATCHES)
    with pytest.raises(ConfigError, match="it is another model") as caught:
        trainer.train()
    assert "--force prepare" in str(caught.value.remedy)
    for setting, value in (("beta", 0.0), ("label_smoothing", 0.5), ("loss", "dpo")):
        with pytest.raises(ConfigError) as caught:
            recipe.build_model({"folder": base, setting: value}, data)
        assert caught.value.field == f"train.model.{setting}"
    with pytest.raises(ConfigError, match="has been trained"):
        prepared[0].build_model({"lora": {"r": 4}}, prepared[2])


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepare(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


def test_rows_that_spoil_the_training_are_refused_by_file_row_and_column(tmp_path: Path) -> None:
    def of(**changed: Any) -> TrainflowError:
        return refused(tmp_path, lines(*GOOD, row_of(12, **changed)))

    assert "pairs.jsonl, row 12" in of(chosen=" ").message
    assert "column 'chosen': there is no value" in of(chosen=" ").message
    assert "column 'prompt': there is no value" in of(prompt="").message
    assert "column 'rejected': there is no value" in of(rejected=None).message
    same = of(rejected=" 12 is said ").message
    assert "pairs.jsonl, row 12" in same
    assert "columns 'chosen' and 'rejected': the two answers are alike" in same
    assert "column 'chosen': a list is not a text" in of(chosen=[{"role": "assistant"}]).message
    long = of(prompt="a long prompt " * 200)
    assert "row 12" in long.message
    assert "column 'prompt': the prompt has" in long.message
    assert long.field == "prepare.options.max_length"
    text = " the same words again and again" * 50
    assert "are the same for both answers" in of(chosen=text + " a", rejected=text + " b").message
    near = refused(tmp_path, lines(*GOOD), chosen="choosen")
    assert near.remedy == 'Did you mean "chosen"?'
    assert "no class to cut by" in refused(tmp_path, lines(*GOOD), split={"by": "stratified"}).message
    taken = refused(tmp_path, lines(*(dict(row, labels="x") for row in GOOD)), prompt="labels")
    assert "uses the name 'labels' itself" in taken.message


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(base: Path, tmp_path: Path) -> None:
    import shutil

    from transformers import AutoTokenizer

    folder = shutil.copytree(base, tmp_path / "bare")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    error = refused(tmp_path, lines(*GOOD), folder=folder, config={})
    assert error.remedy == "Set prepare.options.pad_token=<|endoftext|>, a token that it has."
    recipe, splits, data = prepare(tmp_path, lines(*GOOD), folder=folder, config={}, pad_token="<|endoftext|>")
    collate = recipe.collate_with(data)
    assert collate is not None
    batch = pickle.loads(pickle.dumps(collate))(splits["train"])
    assert batch["input_ids"].shape[0] == 2 * len(splits["train"])
    assert refused(tmp_path, lines(*GOOD), folder=base).field == "prepare.options.config"
    assert refused(tmp_path, lines(*GOOD), folder=base, config={}, max_length=500).message.startswith("The model reads")
    with pytest.raises(DataError, match="tokens, and with its answer at most 128 are read"):
        collate([{"prompt": "a long prompt " * 200}])


def test_metrics_count_ties_as_half_and_take_the_better_rule_of_lengths() -> None:
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, 0.0]])
    known = np.array([[-1.0, -2.0, 3, 5], [-1.0, -2.0, 3, 5], [-4.0, -2.0, 3, 5], [-1.0, -1.0, 9, 5]])
    measured = measure_preferences(rewards, known)
    assert measured["accuracy"] == 2.5 / 4
    assert measured["reference_accuracy"] == 2.5 / 4
    assert measured["length_accuracy"] == 3 / 4
    assert measured["accuracy_over_length"] == -0.125
    assert measured["reward_margin"] == 0.75
    assert float(preference_losses(torch.zeros(1, 2), beta=0.1)) == pytest.approx(np.log(2))
