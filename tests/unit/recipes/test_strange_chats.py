"""Files of conversations as people make them: each is read, or refused in a sentence with file, row and turn."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.named_recipes import prepare_sources, refusal
from trainer_lib.errors import DataError
from trainer_lib.recipes.texts.conversations import find_shape, read_conversation, read_question
from trainer_lib.recipes.texts.templates import END
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer

OPTIONS: dict[str, Any] = {"vocabulary": 300, "length": 128, "split": {"validation": 0, "test": 0.25}}
USER, ANSWER = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}
TURNS = [USER, ANSWER]
ROW = {"messages": TURNS}
SHAREGPT = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "1"}]
ROWS = 8


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(**columns: str) -> bytes:
    written = io.StringIO()
    lines = csv.writer(written)
    lines.writerow(columns)
    lines.writerows([list(columns.values())] * ROWS)
    return written.getvalue().encode()


def parquet(**columns: Any) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table({name: [value] * ROWS for name, value in columns.items()}), written)
    return written.getvalue()


READ: dict[str, tuple[str, bytes, str]] = {
    "lines": ("a.jsonl", jsonl(*[ROW] * ROWS), "messages"),
    "a mark of the order of bytes": ("a.jsonl", b"\xef\xbb\xbf" + jsonl(*[ROW] * ROWS), "messages"),
    "empty lines at the end": ("a.jsonl", jsonl(*[ROW] * ROWS) + b"\n\n  \n", "messages"),
    "an array": ("a.json", json.dumps([ROW] * ROWS, indent=2).encode(), "messages"),
    "ShareGPT's turns as messages": ("a.jsonl", jsonl(*[{"messages": SHAREGPT}] * ROWS), "messages"),
    "OpenAI's turns as conversations": ("a.jsonl", jsonl(*[{"conversations": TURNS}] * ROWS), "conversations"),
    "JSON in a CSV": ("a.csv", table(messages=json.dumps(TURNS)), "messages"),
    "JSON in a Parquet file": ("a.parquet", parquet(conversations=json.dumps(SHAREGPT)), "conversations"),
    "nested lists": ("a.parquet", parquet(messages=[{**USER, "tool_calls": None}, ANSWER]), "messages"),
    "parts of text": (
        "a.jsonl",
        jsonl(*[{"messages": [{"role": "user", "content": [{"type": "text", "text": "one?"}]}, ANSWER]}] * ROWS),
        "messages",
    ),
    "Alpaca in a CSV": ("a.csv", table(instruction="one?", input="", output="1"), "instruction"),
    "other columns": ("a.jsonl", jsonl(*[{"id": 1, "messages": TURNS, "text": "x"}] * ROWS), "messages"),
    "an empty column beside": (
        "a.jsonl",
        jsonl(*[{"messages": None, "conversations": SHAREGPT}] * ROWS),
        "conversations",
    ),
    "two shapes": ("a.jsonl", jsonl(*[ROW, {"conversations": SHAREGPT}] * (ROWS // 2)), "messages, conversations"),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_of_conversations_is_read(tmp_path: Path, name: str) -> None:
    file, content, shape = READ[name]
    (tmp_path / file).write_bytes(content)
    _, splits, data = prepare_sources("supervised-fine-tuning", [str(tmp_path / file)], OPTIONS, tmp_path)
    assert data.info["shape"] == shape
    assert data.info["summary"][0].startswith(f"{ROWS} conversations: ")
    texts = [kept_tokenizer(data).decode(row["input_ids"]) for row in splits["train"] + splits["test"]]
    assert sum(text.count(f"1{END}") for text in texts) == ROWS
    assert sum(text.count("one?") for text in texts) == ROWS


def turns(*given: Any) -> bytes:
    return jsonl(*[ROW] * ROWS, {"messages": list(given)})


def calling(arguments: Any, **tool: Any) -> dict[str, Any]:
    """A row in which a tool is called as OpenAI has it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, asks, {"role": "tool", "content": "3"}, ANSWER], "tools": [{"type": "function", **tool}]}


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
PLACE = f"row {ROWS} (line {ROWS + 1}): "
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a name of ShareGPT": (
        "a.jsonl",
        turns({"role": "human", "content": "a"}, ANSWER),
        f"{PLACE}turn 1: the role 'human' is unknown (write 'user')",
    ),
    "another name for roles": (
        "a.jsonl",
        turns({"speaker": "user", "content": "a"}, ANSWER),
        f"{PLACE}turn 1: it has no role; its keys are speaker, content",
    ),
    "another name for texts": (
        "a.jsonl",
        turns({"role": "user", "text": "a"}, ANSWER),
        f"{PLACE}turn 1: it is empty: its keys are role, text",
    ),
    "no text": ("a.jsonl", turns({"role": "user", "content": None}, ANSWER), f"{PLACE}turn 1: it is empty"),
    "a call as OpenAI had it": (
        "a.jsonl",
        turns(USER, {"role": "assistant", "content": None, "function_call": CALL["function"]}, ANSWER),
        f"{PLACE}turn 2: 'function_call' is an old name (write 'tool_calls': [",
    ),
    "a function's answer": (
        "a.jsonl",
        turns(USER, {"role": "function", "name": "f", "content": "3"}, ANSWER),
        f"{PLACE}turn 2: the role 'function' is unknown (write 'tool')",
    ),
    "arguments that are no JSON": (
        "a.jsonl",
        jsonl(*[ROW] * ROWS, calling("{x: 1}")),
        f"{PLACE}turn 2: the arguments of its call are no JSON",
    ),
    "a list of images": (
        "a.jsonl",
        jsonl(*[ROW] * ROWS, {**ROW, "images": ["a.png"]}),
        f"{PLACE}it has images, and the model reads texts",
    ),
    "a row without turns": (
        "a.jsonl",
        jsonl(*[ROW] * ROWS, {"id": 3}),
        f"{PLACE}it has no conversation; its columns are id",
    ),
    "an empty row": ("a.jsonl", jsonl(*[ROW] * ROWS, {}), f"{PLACE}the row is empty"),
    "an empty row of a CSV": (
        "a.csv",
        table(instruction="one?", output="1") + b",\r\n",
        f"row {ROWS} (line {ROWS + 2}): the row is empty",
    ),
    "Python's notation": ("a.csv", table(messages=str(TURNS)), "its text is no JSON; write it with json.dumps()"),
    "other columns alone": (
        "a.csv",
        table(question="one?", answer="1"),
        "Its columns are question, answer, and one needs messages; conversations;",
    ),
    "lists for rows": (
        "a.json",
        json.dumps([TURNS] * ROWS).encode(),
        "it is a list, not a mapping from columns to values",
    ),
    "an array over lines": ("a.jsonl", json.dumps([ROW] * ROWS, indent=1).encode(), "give one object a line"),
    "an array in a line": (
        "a.jsonl",
        json.dumps([ROW] * ROWS).encode(),
        "it is a list, not a mapping from columns to values",
    ),
    "an unknown pair of history": (
        "a.jsonl",
        jsonl(*[{"instruction": "a", "output": "b", "history": ["c"]}] * ROWS),
        "the column 'history' has no pairs",
    ),
    "a system prompt that is none": ("a.jsonl", jsonl(*[{**ROW, "system": 5}] * ROWS), "the column 'system' has a int"),
    "an empty text": ("a.jsonl", jsonl(*[{"text": "a"}] * ROWS, {"text": " "}), f"{PLACE}the text is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_with_a_fault_is_refused_in_words(tmp_path: Path, name: str) -> None:
    file, content, words = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    refused = refusal(lambda: prepare_sources("supervised-fine-tuning", [str(tmp_path / file)], OPTIONS, tmp_path))
    assert words in str(refused)
    assert file in str(refused)


CALLED = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]
CALLED += [{"from": "observation", "value": "3"}, {"from": "gpt", "value": "b"}]


def arguments_of(read: Any) -> Any:
    return read.messages[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("row", "roles", "check"),
    [
        (
            {"conversations": CALLED},
            "user assistant tool assistant",
            lambda read: read.messages[1]["tool_calls"][0]["function"]["name"] == "f",
        ),
        ({**ROW, "system": "s"}, "system user assistant", lambda read: read.messages[0]["content"] == "s"),
        (
            {**ROW, "tools": '[{"type": "function"}]'},
            "user assistant",
            lambda read: read.tools == [{"type": "function"}],
        ),
        (
            {"instruction": "b", "output": "d", "history": [["a", "c"]]},
            "user assistant user assistant",
            lambda read: read.messages[2]["content"] == "b",
        ),
        *(
            (calling(given), "user assistant tool assistant", lambda read: arguments_of(read) == {"x": 1})
            for given in ('{"x": 1}', {"x": 1}, {"x": 1, "key_of_another_row": None})
        ),
        (
            {"messages": calling({"x": 1})["messages"][:2]},
            "user assistant",
            lambda read: arguments_of(read) == {"x": 1},
        ),
        (calling(""), "user assistant tool assistant", lambda read: arguments_of(read) == {}),
        (calling('{"x": null}'), "user assistant tool assistant", lambda read: arguments_of(read) == {"x": None}),
        (
            calling({"x": None, "y": None}, function={"name": "f", "parameters": {"required": ["x"]}}),
            "user assistant tool assistant",
            lambda read: arguments_of(read) == {"x": None},
        ),
        (
            calling({}, function={"name": "f", "key_of_another_row": None}),
            "user assistant tool assistant",
            lambda read: read.tools == [{"type": "function", "function": {"name": "f"}}],
        ),
        (
            {"messages": [USER, {**ANSWER, "train": None, "weight": 0}]},
            "user assistant",
            lambda read: read.trained == [True, False],
        ),
    ],
)
def test_what_rows_have_besides_is_read(row: dict[str, Any], roles: str, check: Callable[[Any], bool]) -> None:
    read = read_conversation("here", row, find_shape(row))
    assert not read.fault
    assert [turn["role"] for turn in read.messages] == roles.split()
    assert check(read)


def test_turns_are_numbered_as_in_the_row_whatever_stands_before_them() -> None:
    read = read_conversation("here", {"messages": [USER, ANSWER, ANSWER]}, "messages", system="brief")
    assert read.fault == "turn 3: the assistant has two turns in a row"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": TURNS}, "turn 2: it is of the assistant, and the last turn is to be answered"),
        ({"messages": [{"role": "user", "content": ""}]}, "turn 1: it is empty"),
        ({"prompt": ""}, "the row is empty"),
        ({"system": "s"}, "it has no conversation; its columns are system"),
    ],
)
def test_a_new_conversation_that_cannot_be_answered_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_question(row)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"conversations": SHAREGPT[:1]},
        {"instruction": "one?", "input": None, "output": "1"},
        {"prompt": "one?"},
        {"prompt": [USER]},
    ],
)
def test_a_new_conversation_is_read_in_every_shape(row: dict[str, Any]) -> None:
    assert read_question(row).messages == [USER]
