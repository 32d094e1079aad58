"""Answers that were judged: conversations among them, and the losses of ORPO, KTO and of rewards by hand.

feedback-optimization and reward-modeling learn, resume and publish; the divergence is that of the whole step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_recipe
from tests.support.named_recipes import (
    TINY,
    Prepared,
    RecipeCase,
    collate_of,
    jsonl,
    prove_resume,
    save_model,
    trained,
    trainer_of,
)
from trainer_lib import EvalPrediction, load_model
from trainer_lib.errors import DataError
from trainer_lib.recipes.feedback_optimization import _read_mark, compute_metrics, feedback_losses
from trainer_lib.recipes.preference_optimization import preference_losses
from trainer_lib.recipes.reward_modeling import reward_losses
from trainer_lib.recipes.texts.answers import log_probabilities
from trainer_lib.recipes.texts.templates import END, TEMPLATES, TURN
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer
from trainflow.flows.new_project.starting import read_sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
USUAL: dict[str, Any] = {"vocabulary": 500, "max_length": 96, "split": {"validation": 0, "test": 0.3}}
PAIRS = RecipeCase("preference-optimization", "pairs.jsonl", {**USUAL, "config": TINY})
REWARDS = RecipeCase("reward-modeling", "pairs.jsonl", USUAL)
MARKS = RecipeCase("feedback-optimization", "marks.jsonl", {**USUAL, "config": TINY})
TABLES = (RecipeCase("reward-modeling", "pairs.csv", USUAL), RecipeCase(MARKS.name, "marks.csv", MARKS.options))
BATCHES: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 1e-2}
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "one?"), ("assistant", "1"), ("assistant", "two"))
)
SETTINGS: dict[str, dict[str, Any]] = {"marks": {}, "ranks": {"config": TINY}, "pairs": {"loss": "orpo"}}


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return TABLES[1].prepare(tmp_path_factory.mktemp("marks"), read_sample("marked_lines.csv"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return TABLES[0].prepare(tmp_path_factory.mktemp("ranks"), read_sample("ranked_lines.csv"))


BRIEF = {"role": "system", "content": "brief"}
TURN_OF_HUMAN = {"from": "human", "value": "one?"}
OF_HH = "\n\nHuman: one?\n\nAssistant:"
MORE = {"role": "user", "content": "more?"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = "".join(read_sample("word_orders.jsonl").splitlines(keepends=True)[::6])
    return PAIRS.prepare(tmp_path_factory.mktemp("pairs"), rows)


# -- conversations ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        # As of UltraFeedback: the prompt is there once more, as a text.
        ({"prompt": "one?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "one?", "chosen": "1", "rejected": "two"}, {"template": "chatml"}),
        ({"prompt": "one?", "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": "one?", "chosen": [BRIEF, GOOD], "rejected": [BRIEF, BAD]}, {}),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": [BRIEF, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])}, {}),
        ({"conversations": [TURN_OF_HUMAN], "chosen": GOOD, "rejected": BAD}, {"rename": {"conversations": "prompt"}}),
        ({"prompt": "one?", "chosen": [TURN_OF_HUMAN, GOOD], "rejected": [TURN_OF_HUMAN, BAD]}, {}),
        ({"chosen": f"{OF_HH} 1", "rejected": f"{OF_HH} two"}, {}),
        ({"prompt": OF_HH, "chosen": "1", "rejected": "two"}, {}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "system": "brief"}, {"system": "long"}),
    ],
)
@pytest.mark.parametrize("case", [PAIRS, REWARDS], ids=lambda case: case.name)
def test_pairs_of_each_shape_are_the_same_conversations(
    tmp_path: Path, case: RecipeCase, row: dict[str, Any], options: dict[str, Any]
) -> None:
    made = case.prepare(tmp_path, jsonl(*[row] * 8), **{"system": "brief", **options})
    rows, tokenizer = made[1]["train"][:1], kept_tokenizer(made[2])
    new = [{name: row[name] for name in ("prompt", "chosen", "rejected", "system") if name in row} for row in rows]
    for batch in (collate_of(made)(rows), collate_of(made)(new)):
        texts = [tokenizer.decode(row[batch["attention_mask"][at].bool()]) for at, row in enumerate(batch["input_ids"])]
        start = f"{TURN}system\nbrief{END}\n{TURN}user\none?{END}\n{TURN}assistant\n"
        assert texts == [f"{start}1{END}", f"{start}two{END}"]
        assert [tokenizer.decode(row[row >= 0]) for row in batch["targets"]] == [f"1{END}", f"two{END}"]


@pytest.mark.parametrize(("options", "scored"), [({}, "11"), ({"loss_on": "last"}, "1")])
def test_of_answers_with_several_turns_all_turns_of_the_assistant_are_scored(
    tmp_path: Path, options: dict[str, Any], scored: str
) -> None:
    row = {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, BAD, MORE, BAD]}
    made = PAIRS.prepare(tmp_path, jsonl(*[row] * 8), **options)
    batch, tokenizer = collate_of(made)(made[1]["train"][:1]), kept_tokenizer(made[2])
    answers = [tokenizer.decode(targets[targets >= 0]) for targets in batch["targets"]]
    assert answers == ["".join(f"{mark}{END}" for mark in scored), "".join(f"two{END}" for _ in scored)]
    assert batch["lengths"].tolist() == [[(batch["targets"][at] >= 0).sum() for at in range(2)]]
    own = log_probabilities(made[0].build_model({}, made[2]), batch)
    assert batch["reference"].flatten().tolist() == pytest.approx(own.tolist(), rel=1e-5)


def test_tools_of_a_pair_are_given_to_the_template(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "f"}]}
    template = f"{{{{ tools[0].name if tools else 'none' }}}}{TEMPLATES['chatml']}"
    made = PAIRS.prepare(tmp_path, jsonl(*[row] * 8), template=template)
    new = {name: made[1]["train"][0][name] for name in row}
    for rows in (made[1]["train"][:1], [new], [{"prompt": "one?", "tools": new["tools"]}]):
        for ids in collate_of(made)(rows)["input_ids"]:
            assert kept_tokenizer(made[2]).decode(ids).startswith(f"f{TURN}user")
    refused = PAIRS.refused(tmp_path, jsonl(*[row] * 8), template="chatml")
    assert "it has tools, and the template has no place for them" in str(refused)


def test_all_faulty_pairs_are_listed_in_the_order_of_the_rows(tmp_path: Path) -> None:
    good = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    bad = [{**good, "rejected": [{"role": "bot", "content": "a"}]}, {**good, "prompt": [{**USER, "content": ""}]}]
    refused = str(PAIRS.refused(tmp_path, jsonl(*[good] * 6, *bad)))
    second = refused.index("row 7 (line 8): turn 1: it is empty")
    assert refused.rindex("row 6 (line 7): turn 2: the role 'bot' is unknown") < second
    other = {"prompt": "two?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    refused = str(PAIRS.refused(tmp_path, jsonl(*[other] * 8)))
    assert (
        "row 0 (line 1): the answers begin with a turn of the user, and the prompt is another text: 'two?'" in refused
    )
    trims, alike = TEMPLATES["chatml"].replace("'content']", "'content'] | trim"), {**GOOD, "content": "1 "}
    refused = str(PAIRS.refused(tmp_path, jsonl(*[{**good, "rejected": [alike]}] * 8), template=trims))
    assert "row 0 (line 1), columns 'chosen' and 'rejected': the two answers are alike" in refused


def test_lists_in_one_file_and_texts_in_another_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(jsonl(*[{"prompt": "one?", "chosen": "1", "rejected": "two"}] * 4))
    files = {"train": str(tmp_path / "pairs.jsonl"), "test": str(tmp_path / "test.jsonl")}
    talks = jsonl(*[{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}] * 8)
    error = PAIRS.refused(tmp_path, talks, files=files, split={})
    assert "test.jsonl, row 0 (line 1), column 'prompt': a text is not a list of turns" in str(error)


def test_marked_conversations_are_read_and_answered(tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "completion": [GOOD if at % 2 else BAD], "label": bool(at % 2)} for at in range(16)]
    made = MARKS.prepare(tmp_path, jsonl(*rows))
    ends = [kept_tokenizer(made[2]).decode(row["input_ids"]) for row in [collate_of(made)([{"prompt": "one?"}])]]
    assert ends == [[f"{TURN}user\none?{END}\n{TURN}assistant\n"]]
    parts = {**USER, "content": [{"type": "text", "text": "one?"}]}
    batch = collate_of(made)([{"prompt": json.dumps([parts])}])
    assert kept_tokenizer(made[2]).decode(batch["input_ids"]) == ends[0]
    with pytest.raises(DataError, match="Row 0 of the batch: turn 2: it is of the assistant, and the last turn"):
        collate_of(made)([{"prompt": json.dumps([USER, GOOD])}])
    marked = {(row["labels"], json.loads(row["completion"])[0]["content"]) for row in made[1]["train"]}
    assert marked == {(1, "1"), (0, "two")}


# -- losses -----------------------------------------------------------------------------------------------------------
def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


def test_losses_are_those_of_the_formulas() -> None:
    draw = np.random.default_rng(0)
    means = -draw.uniform(0.05, 4, (50, 2))
    odds = np.exp(means) / (1 - np.exp(means))
    wanted = -means[:, 0] - 0.3 * np.log(sigmoid(np.log(odds[:, 0] / odds[:, 1])))
    found = preference_losses(torch.from_numpy(means), beta=0.3, loss="orpo")
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9)
    assert torch.isfinite(preference_losses(torch.zeros(1, 2), beta=0.3, loss="orpo")).all()
    ratios, labels = draw.normal(0, 3, 50), draw.integers(0, 2, 50)
    gains = 0.2 * (ratios - 1.5)
    wanted = np.where(labels == 1, 2 * (1 - sigmoid(gains)), 0.5 * (1 - sigmoid(-gains)))
    given = (torch.from_numpy(ratios), torch.tensor(1.5), torch.from_numpy(labels))
    found = feedback_losses(*given, beta=0.2, good_weight=2.0, bad_weight=0.5)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    scores = draw.normal(0, 3, (50, 2))
    found = reward_losses(torch.from_numpy(scores))
    np.testing.assert_allclose(found.numpy(), -np.log(sigmoid(scores[:, 0] - scores[:, 1])), rtol=1e-9)


def test_the_area_counts_ties_as_half_and_takes_the_better_rule_of_lengths() -> None:
    rewards = np.array([[2.0, 0], [1, 0], [1, -3], [0, 0]])
    known = np.array([[0.0, 0, 5, 0], [0, 0, 1, 0], [0, 0, 9, 0], [1, 0, 9, 0]])
    measured = compute_metrics(EvalPrediction(rewards, (np.array([1, 1, 0, 0]), known)))
    assert (measured["auc"], measured["reference_auc"], measured["length_auc"]) == (3.5 / 4, 0.25, 1.0)
    assert (measured["good_reward"], measured["bad_reward"], measured["divergence"]) == (1.5, 0.5, 0)
    assert compute_metrics(EvalPrediction(rewards, (np.ones(4), known)))["auc"] == 0.5


def test_marks_may_be_whole_numbers_that_pandas_wrote() -> None:
    assert [_read_mark(mark, "row 0") for mark in (True, "FALSE", 1, "0", 1.0, "0.0")] == [1, 0, 1, 0, 1, 0]


def test_the_divergence_is_that_of_all_rows_of_the_step_by_other_answers(marks: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = marks
    model: Any = recipe.build_model({}, data)
    for each in model.parameters():
        each.data *= 1.2
    rows = splits["train"][:8]
    assert sorted(row["other"] for row in splits["test"]) == sorted(row["completion"] for row in splits["test"])
    trainer = trainer_of(recipe, data, model, tmp_path, rows, 1, **BATCHES)
    batches = [collate_of(marks)(rows[:2]), collate_of(marks)(rows[2:])]
    assert trainer.get_batch_samples(iter(batches), 2)[1] == 8
    tokenizer, ratios = kept_tokenizer(data), []
    for row in rows:
        prompt, answer = tokenizer(row["prompt"])["input_ids"], tokenizer(row["other"])["input_ids"]
        tokens = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            logs = model.double()(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        own = logs[range(len(tokens[0]) - 1), tokens[0, 1:]][len(prompt) - 1 :].sum()
        ratios.append(float(own) - row["reference_other"])
    assert float(trainer._divergence) == pytest.approx(max(0.0, float(np.mean(ratios))), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batches_of_any_size_take_the_same_steps(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recipe, splits, data = request.getfixturevalue(name)
    rows = [{**row, "labels": 1} for row in splits["train"][:20]]  # good ones alone: the model moves away
    small, weights, divergences = (recipe, {"train": rows}, data), [], []  # the last step has 4 rows
    for size, steps in ((8, 1), (2, 4)):
        given: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = trained(small, tmp_path / str(size), SETTINGS[name], 5, **given, learning_rate=1e-3)
        weights.append([each.detach() for each in trainer.model.parameters()])
        divergences.append(float(getattr(trainer, "_divergence", 1.0)))
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-4)
    assert divergences[0] > 0.1
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_bit_for_bit(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    given = {**BATCHES, "gradient_accumulation_steps": 2}
    prove_resume(request.getfixturevalue(name), tmp_path, SETTINGS[name], rows=70, **given)


# -- what is learned --------------------------------------------------------------------------------------------------
def test_marks_are_learned_and_new_answers_have_rewards(marks: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = marks
    trainer = trained(marks, tmp_path, {}, 80, **BATCHES)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert min(measured["eval_auc_over_length"], measured["eval_auc_over_reference"]) > 0.15
    assert measured["eval_good_reward"] > measured["eval_bad_reward"]
    known = trainer.predict(splits["test"][:9])
    new = trainer.predict([{name: row[name] for name in ("prompt", "completion")} for row in splits["test"][:9]])
    assert new.predictions[:, 0] == pytest.approx(known.predictions[:, 0], abs=1e-4)
    assert recipe.prediction_columns(new.predictions, data)["reward"] == new.predictions[:, 0].tolist()
    made = trainer.predict([{"prompt": row["prompt"]} for row in splits["test"][:2]]).predictions
    assert len(recipe.prediction_columns(made, data)["prediction"]) == 2


def test_rewards_are_learned_and_new_answers_have_them(ranks: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = ranks
    trainer = trained(ranks, tmp_path, {"config": TINY}, 60, **BATCHES)
    with torch.no_grad():
        losses, scores = trainer.judge(trainer.model.eval(), collate_of(ranks)(splits["test"][:8]))
    torch.testing.assert_close(losses, -(scores[:, 0] - scores[:, 1]).sigmoid().log(), atol=1e-5, rtol=1e-4)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_accuracy_over_length"] > 0.15
    assert not any("reference" in name for name in measured)
    known = trainer.predict(splits["test"][:5]).predictions
    for at, name in enumerate(("chosen", "rejected")):
        new = [{"completion": row[name]} for row in splits["test"][:5]]
        rewards = recipe.prediction_columns(trainer.predict(new).predictions, data)["reward"]
        assert rewards == pytest.approx(known[:, at].tolist(), abs=1e-4)


def test_a_published_reward_model_is_one_for_the_classification_of_sequences(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    (tmp_path / "rows.csv").write_text(read_sample("ranked_lines.csv"))
    publish_recipe(tmp_path / "model", "reward-modeling", tmp_path / "rows.csv", dict(USUAL), {"config": TINY})
    loaded: Any = load_model(str(tmp_path / "model"), trust_code=True)
    row = {"completion": "import ast"}
    [reward] = loaded.predict([row])["reward"]
    loaded.model.save_pretrained(tmp_path / "saved")
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    tokenizer = kept_tokenizer(loaded._data)
    with torch.no_grad():
        logits = plain(**tokenizer(row["completion"] + tokenizer.eos_token, return_tensors="pt")).logits
    assert plain.config.id2label == {0: "reward"}
    assert float(logits) == pytest.approx(reward, abs=1e-5)


@pytest.fixture(scope="module")
def base(marks: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(marks, marks[0].build_model({}, marks[2]), tmp_path_factory.mktemp("base"))


def test_a_language_model_becomes_one_of_rewards_by_adapters_and_a_new_head(base: Path, tmp_path: Path) -> None:
    made = TABLES[0].prepare(tmp_path, read_sample("ranked_lines.csv"), folder=base)
    settings: dict[str, Any] = {"folder": base, "adapter": {"rank": 4}}
    trainer = trained(made, tmp_path / "run", settings, 40, **BATCHES)
    changed = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert changed and all("lora" in name or "score" in name for name in changed)
    assert trainer.evaluate(eval_dataset=made[1]["test"])["eval_accuracy_over_length"] > 0.1
