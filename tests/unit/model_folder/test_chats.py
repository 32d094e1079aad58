"""A model trained on conversations: its answers to new ones, in a chat and as predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_recipe
from tests.support.named_recipes import TINY, refusal
from trainer_lib.errors import ConfigError
from trainer_lib.model_folder.chat import Chat
from trainer_lib.model_folder.loaded import LoadedModel, load_model
from trainer_lib.recipes.shared.model_places import new_causal_model
from trainflow.flows.cli import terminal
from trainflow.flows.cli.commands import predicting
from trainflow.flows.cli.options import BareForm

USER, ANSWER = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}
OPTIONS: dict[str, Any] = {"vocabulary": 300, "length": 96, "split": {"validation": 0, "test": 0.25}}
NEW = 5


def publish(where: Path, model: dict[str, Any], /, **options: Any) -> str:
    where.mkdir(parents=True, exist_ok=True)
    (where / "chats.jsonl").write_text(f"{json.dumps({'messages': [USER, ANSWER]})}\n" * 8)
    publish_recipe(where, "supervised-fine-tuning", where / "chats.jsonl", {**OPTIONS, **options}, model)
    return str(where)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return publish(tmp_path_factory.mktemp("chats"), {"config": TINY}, system="brief")


@pytest.fixture(scope="module")
def loaded(address: str) -> LoadedModel:
    return load_model(address, trust_code=True)


def say(chat: Chat, said: str, **settings: Any) -> tuple[str, str]:
    """The answer, and what was shown of it."""
    pieces: list[str] = []
    spoken, _ = chat.answer(said, pieces.append, **settings)
    return spoken.text, "".join(pieces)


# -- a chat -----------------------------------------------------------------------------------------------------------
def test_a_chat_goes_on_as_a_prediction_of_the_whole_conversation(loaded: LoadedModel) -> None:
    chat = Chat(loaded, new_tokens=NEW)
    first, shown = say(chat, "one?")
    assert shown.strip() == first
    assert loaded.predict([{"prompt": "one?", "new_tokens": NEW}])["answer"][0].strip() == first
    second, _ = say(chat, "two?")
    turns = [USER, {"role": "assistant", "content": first}, {"role": "user", "content": "two?"}]
    assert loaded.predict([{"messages": turns, "new_tokens": NEW}])["answer"][0].strip() == second
    assert [turn["content"] for turn in chat.turns] == ["one?", first, "two?", second]


def test_ctrl_c_ends_the_answer_and_keeps_what_there_is(loaded: LoadedModel) -> None:
    chat = Chat(loaded, new_tokens=NEW)
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    spoken, _ = chat.answer("one?", interrupt)
    assert (spoken.is_whole, spoken.tokens) == (False, 2)
    assert len(chat.turns) == 2
    chat._settings["eos_token_id"] = [*range(len(loaded.tokenizer))]
    assert chat.answer("two?", pieces.append)[0][1:] == (1, True)


def test_a_conversation_that_is_too_long_is_refused_and_stays(loaded: LoadedModel) -> None:
    chat = Chat(loaded, new_tokens=NEW)
    assert "the model reads 96" in str(refusal(lambda: chat.answer("one? " * 90, print)))
    assert chat.turns == []
    assert say(chat, "one?")


def test_a_model_of_judged_answers_that_does_not_say_its_length_reads_as_training_did(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "2"}]}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}
    options = {"vocabulary": 300, "max_length": 96, "config": config, "split": OPTIONS["split"]}
    publish_recipe(tmp_path, "preference-optimization", tmp_path / "pairs.jsonl", options, {})
    loaded: Any = load_model(str(tmp_path), trust_code=True)
    del loaded.model.config.max_position_embeddings  # as of one that was loaded
    assert "the model reads 96" in str(refusal(lambda: say(Chat(loaded), "one? " * 90)))


def test_the_base_answers_beside_the_model(tmp_path: Path, loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="began with weights at random"):
        Chat(loaded).answer("one?", print, heading=print)
    tokenizer, base = loaded.tokenizer, tmp_path / "base"
    tokenizer.save_pretrained(base)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    new_causal_model(TINY, length=96, vocabulary=len(tokenizer), ends=ends).save_pretrained(base)
    place = {"folder": str(base)}
    tuned = load_model(publish(tmp_path / "tuned", place, template="chatml", **place), trust_code=True)
    chat = Chat(tuned, new_tokens=NEW)
    headings: list[str] = []
    spoken, beside = chat.answer("one?", lambda text: None, heading=headings.append)
    assert beside == spoken  # it was not trained
    assert headings == ["base", "model"]


def test_lines_of_a_terminal_are_answered_and_obeyed(loaded: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    chat, said = Chat(loaded, new_tokens=NEW), iter(["one?", "/nothing", "/system long", "", "two?", "one? " * 90])

    def read(prompt: str) -> str:
        if (line := next(said, None)) is None:
            raise EOFError
        return line

    predicting.converse(chat, terminal.console(), with_base=False, read=read)
    shown = capsys.readouterr().out
    assert [turn["content"] for turn in chat.turns[::2]] == ["two?"]
    assert chat.system == "long"
    assert "There is no /nothing" in shown
    assert "the model reads 96" in shown


def test_the_command_answers_once(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    command: Any = predicting.chat
    ask, settings = command.__wrapped__, {"prompt": "one?", "new_tokens": NEW, "trust": "any"}
    answer = ask(BareForm(), address, **settings).to_dict()
    assert capsys.readouterr().out.strip() == answer["answer"]
    assert (answer["ok"], answer["whole"], answer["system"]) == (True, False, "brief"), "the limit ended it"
    assert answer["tokens"] == NEW
    assert ask(BareForm(as_json=True), address, **settings).to_dict() == answer
    assert capsys.readouterr().out == ""
    assert "nothing to answer" in str(refusal(lambda: ask(BareForm(), address, prompt=" ")))


# -- predictions ------------------------------------------------------------------------------------------------------
def test_conversations_in_every_shape_are_predicted_alike(loaded: LoadedModel) -> None:
    shapes: list[dict[str, Any]] = [
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "one?"}]},
        {"instruction": "one?", "input": ""},
        {"messages": json.dumps([USER])},
        {"messages": [USER], "system": float("nan")},  # as a frame has a gap
    ]
    rows = [{**row, "new_tokens": NEW} for row in (*shapes, {"prompt": "one?"})]
    answers = loaded.predict(rows, batch_size=2)["answer"]
    assert set(answers) == {loaded.predict([{"prompt": "one?", "new_tokens": NEW}])["answer"][0]}
    own = loaded.predict([{**rows[0], "system": "talk at length"}, rows[0]])["answer"]
    assert own[1] == answers[0]
    turns = [{"role": "system", "content": "talk at length"}, USER]
    assert own[0] == loaded.predict([{"messages": turns, "new_tokens": NEW}])["answer"][0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [USER, ANSWER]}, "turn 2: it is of the assistant"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "turn 1: the role 'bot' is unknown"),
        ({"messages": [{"role": "user", "content": "one? " * 90}]}, "column 'messages': "),
        ({"prompt": "one?", "tools": [{"name": "f"}]}, "it has tools, and the template has no place for them"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_named(loaded: LoadedModel, row: Any, words: str) -> None:
    assert words in str(refusal(lambda: loaded.predict([row])))
