"""Conversations: their shapes, what is wrong with them by row and turn, and which of their tokens are trained."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.chat_cases import CONTENT, FAMILIES, chats, family_tokenizer, marked_text, template_text
from tests.support.named_recipes import (
    TINY,
    Prepared,
    RecipeCase,
    collate_of,
    jsonl,
    prepare_sources,
    prove_resume,
    trained,
)
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.texts.conversations import read_conversation
from trainer_lib.recipes.texts.packed_batches import (
    batch_prompts,
    continue_prompts,
    end_tokens,
    generate,
    known_ends,
    stop_at,
)
from trainer_lib.recipes.texts.templates import END, TEMPLATES, TURN, ChatTemplate, FaultyError
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer, learn_byte_tokenizer
from trainflow.flows.new_project.starting import read_sample

CHATS = RecipeCase(
    "supervised-fine-tuning",
    "chats.jsonl",
    {"vocabulary": 300, "length": 128, "split": {"validation": 0, "test": 0.25}},
)
USER, ANSWER = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}
TWICE = [{"role": "system", "content": "short"}, USER, ANSWER, {"role": "user", "content": "two?"}]
TWICE += [{"role": "assistant", "content": "2"}]
LONG = "".join(random.Random(0).choices(string.ascii_letters, k=900))
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
CONVERSATION = read_conversation("here", {"messages": TWICE}, "messages")
NO_PROMPTS = ([3], [{"prompt": "a?", "answer": []}, {"text": "a?"}], [{"prompt": "a?", "answer": " "}], ["long " * 500])


def answers(made: Prepared, split: str = "train") -> list[str]:
    """The trained text of each row of a split."""
    tokenizer = kept_tokenizer(made[2])
    return [tokenizer.decode(np.asarray(row["input_ids"])[np.asarray(row["trained"])]) for row in made[1][split]]


# -- shapes: test_strange_chats.py has them all ----------------------------------------------------------------------
def test_conversations_of_two_sources_share_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(*[{"messages": [USER, ANSWER]}] * 9))
    (tmp_path / "b.jsonl").write_text(jsonl(*[{"messages": TWICE}] * 7))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    made = prepare_sources(CHATS.name, files, {**CHATS.options, "split": {"test": 0.25}}, tmp_path, ("one", "two"))
    assert {row["source"] for row in made[1]["train"]} == {"one", "two"}
    for rows in made[1].values():
        assert [row["source"] for row in rows] == sorted(row["source"] for row in rows)
        texts = [(row["source"], kept_tokenizer(made[2]).decode(row["input_ids"])) for row in rows]
        assert all(("two?" in text) == (source == "two") for source, text in texts)
    with pytest.raises(ConfigError, match=r"splits cannot have files"):
        prepare_sources(CHATS.name, files, {"files": {"train": tmp_path / "a.jsonl"}}, tmp_path, ("one", "two"))


def test_a_system_prompt_stands_before_conversations_that_have_none(tmp_path: Path) -> None:
    made = CHATS.prepare(tmp_path, jsonl(*[{"messages": [USER, ANSWER]}] * 4, {"messages": TWICE}), system="brief")
    texts = [kept_tokenizer(made[2]).decode(row["input_ids"]) for row in made[1]["train"] + made[1]["test"]]
    assert sum(text.count("system\nbrief") for text in texts) == 4
    assert sum(text.count("system\nshort") for text in texts) == 1


# -- faults -----------------------------------------------------------------------------------------------------------
FAULTY = [
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "turn 2: it is empty"),
    ({"messages": [USER, ANSWER, ANSWER]}, "turn 3: the assistant has two turns in a row"),
    ({"messages": [USER]}, "the assistant has no turn"),
    ({"messages": [{"role": "human", "content": "a"}, ANSWER]}, "turn 1: the role 'human' is unknown"),
    ({"messages": []}, "it has no turn"),
    ({"messages": [USER, CALL, USER, ANSWER]}, "turn 2: a tool is called, and no turn of a tool follows"),
    ({"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER]}, "no place for them"),
    ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, "it has tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "turn 1: a part of kind"),
    ({"messages": ["hello", ANSWER]}, "turn 1 is not a mapping"),
    ({"messages": "hello"}, "is not a list"),
    ({"messages": None}, "no value in the column 'messages'"),
    ({"messages": [USER, {**ANSWER, "content": 5}]}, "turn 2: its content is a int"),
    ({"messages": [USER, {**ANSWER, "train": False}]}, "nothing of it is trained"),
    ({"messages": [USER, {**ANSWER, "content": LONG}]}, "and a row has 128"),
]


@pytest.mark.parametrize(("row", "words"), FAULTY)
def test_a_faulty_conversation_is_named_by_row_and_turn_and_left_out_where_that_is_allowed(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    good = {"messages": [USER, ANSWER], "fold": "train"}
    content = jsonl(good, {**row, "fold": "train"}, *[good] * 8, {**good, "fold": "test"})
    split = {"by": "column", "column": "fold"}
    refused = CHATS.refused(tmp_path, content, split=split)
    assert (refused.field, words in str(refused)) == ("prepare.options.faulty", True)
    assert "chats.jsonl, row 1 (line 2): " in str(refused)
    counts = CHATS.prepare(tmp_path, content, split=split, faulty=0.1)[2].info["packing"]["train"]
    assert (counts["faulty"], counts["documents"], counts["tokens_trained"]) == (1, 9, 18)


def test_all_faults_are_listed_in_the_order_of_the_rows(tmp_path: Path) -> None:
    early = [case for case in FAULTY if "place" not in case[1] and "tools" not in case[1]][:5]
    refused = str(CHATS.refused(tmp_path, jsonl(*(row for row, _ in early), *[{"messages": [USER, ANSWER]}] * 5)))
    assert "5 conversations of 10 cannot be trained on" in refused
    found = [refused.index(words) for _, words in early]
    assert found == sorted(found)


@pytest.mark.parametrize(("overlong", "key"), [("cut", "cut"), ("drop", "documents_dropped")])
def test_what_is_too_long_is_cut_or_dropped_and_counted(tmp_path: Path, overlong: str, key: str) -> None:
    long = {"messages": [USER, {**ANSWER, "content": LONG}]}
    made = CHATS.prepare(tmp_path, jsonl(*[{"messages": [USER, ANSWER]}] * 7, long), overlong=overlong)
    assert sum(counts[key] for counts in made[2].info["packing"].values()) == 1
    assert max(len(row["input_ids"]) for rows in made[1].values() for row in rows) <= 128


def test_the_summary_names_what_is_left_out_and_cut_and_a_setting_refuses_more(tmp_path: Path) -> None:
    good: dict[str, Any] = {"messages": [USER, ANSWER]}
    long: dict[str, Any] = {"messages": [USER, {**ANSWER, "content": LONG}]}
    untrained: dict[str, Any] = {"messages": [USER, {**ANSWER, "train": False}]}
    rows = jsonl(*({**row, "fold": "train"} for row in [good] * 8 + [long, untrained]), {**good, "fold": "test"})
    options: dict[str, Any] = {"split": {"by": "column", "column": "fold"}, "overlong": "cut", "faulty": 0.1}
    shapes, train, test = CHATS.prepare(tmp_path, rows, **options)[2].info["summary"]
    assert shapes == "11 conversations: 11 in the shape messages."
    assert train.startswith("train: 9 with ")
    assert "; 1 left out: 1 have nothing that is trained; 1 with answers that are cut." in train
    assert "; " not in test
    refused = CHATS.refused(tmp_path, rows, **options, most_cut=0.05)
    assert refused.field == "prepare.options.most_cut"
    assert "1 conversation of 10 would lose answers" in str(refused)
    assert "row 8 (line 9): " in str(refused)


def test_a_text_without_turns_is_trained_as_a_whole(tmp_path: Path) -> None:
    made = CHATS.prepare(tmp_path, jsonl(*[{"text": "one two"}] * 8))
    assert answers(made, "test") == [f"one two{END}"] * 2
    assert made[2].info["shape"] == "text"


def test_the_end_of_answers_is_trained_where_the_pad_token_is_the_same(tmp_path: Path) -> None:
    tokenizer = learn_byte_tokenizer(["one two"], vocabulary=300, special=(TURN, END))
    tokenizer.pad_token, tokenizer.chat_template = END, TEMPLATES["chatml"]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = jsonl(*[{"messages": [USER, {**ANSWER, "content": "1" * number}]} for number in range(1, 9)])
    made = CHATS.prepare(tmp_path, rows, folder=str(tmp_path / "tokenizer"), pack=[])
    assert "6 train the token that fills up rows, as it ends answers too" in made[2].info["summary"][1]
    batch = collate_of(made)(made[1]["train"])
    assert (batch["labels"] == tokenizer.eos_token_id).sum() == 6
    assert batch["labels"][batch["attention_mask"] == 0].eq(-100).all()
    assert (batch["attention_mask"] == 0).any()


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "there.jinja").write_text(TEMPLATES["plain"])
    rows = jsonl(*[{"messages": [USER, ANSWER]}] * 8)
    made = CHATS.prepare(tmp_path, rows, template=str(tmp_path / "there.jinja"))
    assert kept_tokenizer(made[2]).decode(made[1]["test"][0]["input_ids"]).startswith("user: one?\nassistant: 1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_on": "user"}, "assistant, last, all"),
        ({"template": "llama"}, "There is no template of this name"),
        ({"template": "/nowhere/missing.jinja"}, "cannot be read"),
        ({"shape": "chat"}, "not one of the choices"),
        ({"faulty": 1.0}, "not a share"),
        ({"overlong": "split"}, "cut, drop, refuse"),
        ({"rename": {"messages": "talk"}}, "the row has no conversation. Its columns are talk"),
        ({"template": "{{ messages[0].nothing.more }}"}, "the template does not take it"),
        ({"template": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"}, "without a token that means"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in str(CHATS.refused(tmp_path, jsonl(*[{"messages": [USER, ANSWER]}] * 8), **options))


# -- which tokens are trained -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_with_their_ends_are_trained_as_marks_of_the_template_say(name: str) -> None:
    parts = FAMILIES[name]
    end = parts[1].partition(CONTENT)[2].rstrip()
    template = ChatTemplate(family_tokenizer(), template_text(*parts))
    marked = ChatTemplate(family_tokenizer(), marked_text(*parts))
    tokens, trained_on = template.tokenize(CONVERSATION)
    assert template.tokenizer.decode(tokens[trained_on]) == f"1{end}2{end}"
    assert template.tokenizer.decode(tokens[template.tokenize(CONVERSATION, loss_on="last")[1]]) == f"2{end}"
    assert template.tokenize(CONVERSATION, loss_on="all")[1].all()
    for messages in (TWICE, *chats()):
        conversation = read_conversation("here", {"messages": messages}, "messages")
        both = template.tokenize(conversation), marked.tokenize(conversation)
        assert [array.tolist() for array in both[0]] == [array.tolist() for array in both[1]]
        wanted = "".join(turn["content"] + end for turn in messages if turn["role"] == "assistant")
        assert template.tokenizer.decode(both[0][0][both[0][1]]).replace(" ", "") == wanted.replace(" ", "")


#: As of Mistral: what the system says stands in the last turn of the user, wherever that is.
MOVES = (
    "{% set system = messages[0]['content'] %}{% for m in messages[1:] %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.index0 >= messages | length - 3 %}{{ system }} {% endif %}{{ m['content'] }} [/INST]"
    f"{{% else %}}{{{{ m['content'] + '{END}' }}}}{{% endif %}}{{% endfor %}}"
)
TRIMS = "{{ message['content'] if loop.last else message['content'].strip('12') }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # The thoughts of earlier answers are removed, as by templates of models that reason.
        (
            template_text(CONTENT, "{% if loop.last %}thought {% endif %}" + CONTENT + END, ""),
            "turn 3: the template writes",
        ),
        (template_text(CONTENT, TRIMS + END, ""), "turn 3: the template writes"),
        (MOVES, "turn 3: the template writes"),
        # As of Gemma: there is no system.
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}", "No system"),
        # As of Zephyr: only the user and the assistant, or the system at first, have a place.
        (
            template_text("{% if message['role'] == 'user' %}" + CONTENT + "{% endif %}", CONTENT + END, ""),
            "turn 1: the template leaves it out, as it has no place for the system there",
        ),
        (template_text(CONTENT, CONTENT + END, "", "<s><s>"), "two tokens for the beginning"),
    ],
)
def test_a_template_that_moves_trims_or_refuses_text_is_refused_with_the_turn(template: str, words: str) -> None:
    tokenizer = family_tokenizer()
    tokenizer.bos_token = "<s>"
    with pytest.raises(FaultyError, match=words):
        ChatTemplate(tokenizer, template).tokenize(CONVERSATION)
    prompted = read_conversation("here", {"messages": TWICE[1:]}, "messages", system="short")
    with pytest.raises(FaultyError, match=words.replace("turn 1", "the system prompt").replace("turn 3", "turn 2")):
        ChatTemplate(tokenizer, template).tokenize(prompted)


@pytest.mark.parametrize("first", ["", "system\nYou help."])
def test_of_an_answer_before_all_questions_only_the_answer_is_trained(first: str) -> None:
    template = ChatTemplate(family_tokenizer(), first + template_text(*FAMILIES["chatml"]))
    tokens, trained_on = template.tokenize(read_conversation("here", {"messages": [ANSWER, *TWICE[1:]]}, "messages"))
    assert template.tokenizer.decode(tokens[trained_on]) == f"1{END}1{END}2{END}"


@pytest.mark.parametrize("arguments", ["call.function.arguments | tojson", "'' + call.function.arguments"])
def test_the_arguments_of_a_call_stand_in_the_text_once_as_json(arguments: str) -> None:
    called = "{% for call in message.tool_calls or [] %}{{ " + arguments + " }}{% endfor %}"
    template = ChatTemplate(family_tokenizer(), template_text(CONTENT, called + CONTENT + END, ""))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "\u00e9"}'}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}, ANSWER]
    tokens, trained_on = template.tokenize(read_conversation("here", {"messages": turns}, "messages"))
    assert template.tokenizer.decode(tokens[trained_on]) == f'{{"x": "\u00e9"}}{END}1{END}'


@pytest.mark.parametrize(("loss_on", "weight"), [("last", 1), ("assistant", 0)])
def test_a_template_may_rewrite_answers_that_are_not_trained(loss_on: str, weight: int) -> None:
    thinks = template_text(CONTENT, "{% if loop.last %}thought {% endif %}" + CONTENT + END, "")
    turns = [*TWICE[:2], {**ANSWER, "weight": weight}, *TWICE[3:]]
    template = ChatTemplate(family_tokenizer(), thinks)
    conversation = read_conversation("here", {"messages": turns}, "messages")
    tokens, trained_on = template.tokenize(conversation, loss_on=loss_on)
    assert template.tokenizer.decode(tokens[trained_on]) == f"thought 2{END}"
    assert template.tokenizer.decode(tokens) == template.render(conversation)


def test_turns_that_say_so_are_not_trained_and_plain_templates_end_answers_by_the_tokenizers_token() -> None:
    turns: list[dict[str, Any]] = [dict(turn) for turn in TWICE]
    turns[2]["weight"] = 0
    conversation = read_conversation("here", {"messages": turns}, "messages")
    template = ChatTemplate(family_tokenizer(), "plain")
    tokens, trained_on = template.tokenize(conversation)
    assert template.tokenizer.decode(tokens[trained_on]) == f"2{END}"
    without = family_tokenizer()
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(without, None)
    assert set(TEMPLATES) == {"chatml", "plain"}


# -- training ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = "".join(read_sample("code_chats.jsonl").splitlines(keepends=True)[:200])
    return CHATS.prepare(tmp_path_factory.mktemp("packed"), rows, length=512, overlong="drop")


def test_the_loss_is_that_of_the_answers_by_hand(packed: Prepared, tmp_path: Path) -> None:
    _, splits, _ = packed
    row = next(row for row in splits["train"] if len(row["lengths"]) > 1)
    batch = collate_of(packed)([row])
    torch.manual_seed(0)
    model: Any = packed[0].build_model({"config": TINY}, packed[2])
    model.eval().double()
    with torch.no_grad():
        loss = model(**batch)["loss"]
        start, nats = 0, []
        for length in row["lengths"]:  # each conversation alone
            ids = torch.tensor(np.asarray(row["input_ids"])[start : start + length], dtype=torch.long)[None]
            wanted = np.asarray(row["trained"])[start + 1 : start + length]
            logs = model(input_ids=ids)["logits"][0, :-1].log_softmax(-1)
            nats += [-logs[at, ids[0, at + 1]] for at in np.flatnonzero(wanted)]
            start += length
    assert float(loss) == pytest.approx(float(torch.stack(nats).mean()), abs=1e-6)


def test_answers_are_learned_and_written_for_new_rows(packed: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = packed
    trainer = trained(packed, tmp_path / "run", {"config": TINY}, 60, per_device_train_batch_size=8, learning_rate=1e-2)
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_nats_below_unigram"] > 0.2
    assert measured["eval_token_accuracy"] > 0.15
    assert measured["eval_tokens"] == data.info["packing"]["test"]["tokens_trained"]
    assert measured["eval_nats_per_token"] == pytest.approx(measured["eval_loss"], rel=1e-3)
    columns = recipe.prediction_columns(np.asarray(trainer.predict(splits["test"]).predictions), data)
    assert sum(columns["tokens"]) == measured["eval_tokens"]
    new = [
        {"prompt": "def f(): pass\nWhich parameter comes first?", "new_tokens": 3},
        {"prompt": "a?", "new_tokens": 5},
    ]
    written = recipe.prediction_columns(np.asarray(trainer.predict(new).predictions), data)["answer"]
    assert len(written) == 2
    assert recipe.after_evaluate is not None
    shown = recipe.after_evaluate(trainer.model.eval(), data, {"prompts": ["a?"], "sample_tokens": 5})
    assert shown["files"]["samples.txt"].decode().splitlines() == ["a?", "", *written[1].splitlines()]
    _judge_before_and_after(packed, trainer.model, written)


def _judge_before_and_after(packed: Prepared, model: nn.Module, written: Sequence[str]) -> None:
    recipe, _, data = packed
    torch.manual_seed(0)
    first = recipe.build_model({"config": TINY}, data).eval()
    data.build_first = lambda: first
    asked = [{"prompt": "a?", "answer": [f" {written[1].upper()}.", "other"]}, {"prompt": "b?", "answer": "#"}, "c?"]
    assert recipe.after_evaluate is not None
    judged = recipe.after_evaluate(model, data, {"prompts": asked, "sample_tokens": 5})
    rows = json.loads(judged["files"]["prompts.json"])
    assert [list(row) for row in rows] == [["prompt", "before", "after", "expected", "right"]] * 3
    assert [row["right"] for row in rows] == [True, False, None]
    assert rows[0]["after"] == written[1] != rows[0]["before"]
    metrics = judged["metrics"]
    assert (metrics["answers_right"], metrics["answers_right_before"], metrics["answers_gain"]) == (0.5, 0.0, 0.5)
    assert metrics["answers_gain_p"] == 1.0  # one prompt of two is chance
    data.build_first = None


@pytest.mark.parametrize("prompts", NO_PROMPTS)
def test_prompts_that_cannot_be_asked_are_refused(packed: Prepared, prompts: list[Any]) -> None:
    recipe, _, data = packed
    assert recipe.after_evaluate is not None
    with pytest.raises(ConfigError) as caught:
        recipe.after_evaluate(recipe.build_model({"config": TINY}, data).eval(), data, {"prompts": prompts})
    assert (caught.value.field, bool(caught.value.remedy)) == ("evaluate.options.prompts", True)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_end_at_the_end_of_a_turn_and_of_a_text(name: str) -> None:
    tokenizer = family_tokenizer()
    tokenizer.chat_template = template_text(*FAMILIES[name])
    conversation = read_conversation("", {"messages": [USER, ANSWER]}, "messages")
    tokens, trained = ChatTemplate(tokenizer, None).tokenize(conversation)
    ends = end_tokens(tokenizer)
    assert ends[:1] == [tokenizer.eos_token_id]
    assert int(tokens[trained.nonzero()[0][-1]]) in ends
    tokenizer.chat_template = None
    assert end_tokens(tokenizer) == [tokenizer.eos_token_id]


def test_prompts_are_continued_together_as_alone_up_to_any_token_that_ends_them(packed: Prepared) -> None:
    torch.manual_seed(0)
    tokenizer, model = kept_tokenizer(packed[2]), packed[0].build_model({"config": TINY}, packed[2]).eval()
    assert known_ends(model) == [tokenizer.convert_tokens_to_ids(END)]
    prompts = [tokenizer(text)["input_ids"] for text in ("one", "a much longer prompt", "c")]
    alone = [generate(model, [prompt], 8)[0] for prompt in prompts]
    assert [len(tokens) for tokens in alone] == [8, 8, 8]
    assert generate(model, prompts, 8) == alone
    ids, mask = batch_prompts(prompts, pad=0)
    new = continue_prompts(model, ids, mask, torch.tensor([8, 3, 0]))
    assert [row[row >= 0].tolist() for row in new] == [alone[0], alone[1][:3], []]
    end = alone[0][-1]
    stop_at(model, [end])
    assert generate(model, prompts, 8) == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in alone]


def test_training_goes_on_bit_for_bit(packed: Prepared, tmp_path: Path) -> None:
    given: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-2}
    prove_resume(packed, tmp_path, {"config": TINY}, steps=100, **given)
