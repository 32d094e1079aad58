"""Files of conversations as people make them: each is read, or refused in a sentence with file, row and turn."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.named_recipes import jsonl, prepare_sources, refusal
from trainer_lib.errors import DataError
from trainer_lib.recipes.texts.conversations import find_shape, read_conversation, read_question
from trainer_lib.recipes.texts.templates import END, TURN
from trainer_lib.recipes.texts.tokenizing import kept_tokenizer

OPTIONS: dict[str, Any] = {"vocabulary": 300, "length": 128, "split": {"validation": 0, "test": 0.25}}
USER, ANSWER = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}
TURNS = [USER, ANSWER]
ROW = {"messages": TURNS}
SHAREGPT = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "1"}]
ROWS = 8


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


def of(*rows: Any) -> tuple[str, bytes]:
    """A file with these rows, repeated to `ROWS`."""
    return "a.jsonl", jsonl(*rows * (ROWS // len(rows))).encode()


PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "one?"}]}, ANSWER]}
CALLS: list[Any] = [{**USER, "tool_calls": None}, ANSWER]
#: What is in a file, and the shape that it has.
READ: dict[str, tuple[tuple[str, bytes], str]] = {
    "lines": (of(ROW), "messages"),
    "a mark of the order of bytes": (("a.jsonl", b"\xef\xbb\xbf" + of(ROW)[1]), "messages"),
    "empty lines at the end": (("a.jsonl", of(ROW)[1] + b"\n\n  \n"), "messages"),
    "an array": (("a.json", json.dumps([ROW] * ROWS, indent=2).encode()), "messages"),
    "ShareGPT's turns": (of({"conversations": SHAREGPT}), "conversations"),
    "ShareGPT's turns as messages": (of({"messages": SHAREGPT}), "messages"),
    "OpenAI's turns as conversations": (of({"conversations": TURNS}), "conversations"),
    "JSON in a CSV": (("a.csv", table(messages=json.dumps(TURNS))), "messages"),
    "JSON in a Parquet file": (("a.parquet", parquet(conversations=json.dumps(SHAREGPT))), "conversations"),
    "nested lists": (("a.parquet", parquet(messages=CALLS)), "messages"),
    "parts of text": (of(PARTS), "messages"),
    "Alpaca": (of({"instruction": "one?", "input": "", "output": "1"}), "instruction"),
    "Alpaca in a CSV": (("a.csv", table(instruction="one?", input="", output="1")), "instruction"),
    "texts": (of({"prompt": "one?", "completion": "1"}), "prompt"),
    "lists of turns": (of({"prompt": [USER], "completion": [ANSWER]}), "prompt"),
    "other columns": (of({"id": 1, "messages": TURNS, "text": "x"}), "messages"),
    "an empty column beside": (of({"messages": None, "conversations": SHAREGPT}), "conversations"),
    "two shapes": (of(ROW, {"conversations": SHAREGPT}), "messages, conversations"),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_of_conversations_is_read(tmp_path: Path, name: str) -> None:
    (file, content), shape = READ[name]
    (tmp_path / file).write_bytes(content)
    options = {**OPTIONS, "pack": []}
    _, splits, data = prepare_sources("supervised-fine-tuning", [str(tmp_path / file)], options, tmp_path)
    assert data.info["shape"] == shape
    assert data.info["summary"][0].startswith(f"{ROWS} conversations: ")
    tokenizer, rows = kept_tokenizer(data), splits["train"] + splits["test"]
    text = f"{TURN}user\none?{END}\n{TURN}assistant\n1{END}\n"
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == [text] * ROWS
    trained = [tokenizer.decode(np.asarray(row["input_ids"])[np.asarray(row["trained"])]) for row in rows]
    assert trained == [f"1{END}"] * ROWS
    assert f"assistant\n⟦1{END}⟧" in data.read_file("conversations.txt").decode()


def calling(arguments: Any, **tool: Any) -> dict[str, Any]:
    """A row in which a tool is called as OpenAI has it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, asks, {"role": "tool", "content": "3"}, ANSWER], "tools": [{"type": "function", **tool}]}


def begun(**first: Any) -> dict[str, Any]:
    return {"messages": [first, ANSWER]}


OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": {}}}
OLD_ANSWER = {"role": "function", "name": "f", "content": "3"}
#: A row behind sound ones, and what is said of it.
FAULTY: dict[str, tuple[dict[str, Any], str]] = {
    "a name of ShareGPT": (
        begun(role="human", content="a"), "turn 1: the role 'human' is unknown (write 'user')"),
    "another name for roles": (
        begun(speaker="user", content="a"), "turn 1: it has no role; its keys are speaker, content"),
    "another name for texts": (begun(role="user", text="a"), "turn 1: it is empty: its keys are role, text"),
    "no text": (begun(role="user", content=None), "turn 1: it is empty"),
    "a call as OpenAI had it": (
        {"messages": [USER, OLD_CALL, ANSWER]}, "turn 2: 'function_call' is an old name (write 'tool_calls': ["),
    "a function's answer": (
        {"messages": [USER, OLD_ANSWER, ANSWER]}, "turn 2: the role 'function' is unknown (write 'tool')"),
    "arguments that are no JSON": (calling("{x: 1}"), "turn 2: the arguments of its call are no JSON"),
    "a list of images": ({**ROW, "images": ["a.png"]}, "it has images, and the model reads texts"),
    "a row without turns": ({"id": 3}, "it has no conversation; its columns are id"),
    "an empty row": ({}, "the row is empty"),
}  # fmt: skip
NO_MAPPING = "it is a list, not a mapping from columns to values"
REFUSED: dict[str, tuple[tuple[str, bytes], str]] = {
    **{
        name: (("a.jsonl", jsonl(*[ROW] * ROWS, row).encode()), f"row {ROWS} (line {ROWS + 1}): {words}")
        for name, (row, words) in FAULTY.items()
    },
    "an empty row of a CSV": (
        ("a.csv", table(instruction="one?", output="1") + b",\r\n"),
        f"row {ROWS} (line {ROWS + 2}): the row is empty",
    ),
    "Python's notation": (
        ("a.csv", table(messages=str(TURNS))), "its text is no JSON; write it with json.dumps()"),
    "other columns alone": (
        ("a.csv", table(question="one?", answer="1")),
        "Its columns are question, answer, and one needs messages; conversations;",
    ),
    "lists for rows": (("a.json", json.dumps([TURNS] * ROWS).encode()), NO_MAPPING),
    "an array over lines": (("a.jsonl", json.dumps([ROW] * ROWS, indent=1).encode()), "give one object a line"),
    "an array in a line": (("a.jsonl", json.dumps([ROW] * ROWS).encode()), NO_MAPPING),
    "an unknown pair of history": (
        of({"instruction": "a", "output": "b", "history": ["c"]}), "the column 'history' has no pairs"),
    "a system prompt that is none": (of({**ROW, "system": 5}), "the column 'system' has a int"),
    "an empty text": (
        ("a.jsonl", jsonl(*[{"text": "a"}] * ROWS, {"text": " "}).encode()),
        f"row {ROWS} (line {ROWS + 1}): the text is empty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_with_a_fault_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (file, content), words = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    refused = refusal(lambda: prepare_sources("supervised-fine-tuning", [str(tmp_path / file)], OPTIONS, tmp_path))
    assert words in str(refused)
    assert file in str(refused)


CALLED = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]
CALLED += [{"from": "observation", "value": "3"}, {"from": "gpt", "value": "b"}]


ASKED, USED = "user assistant", "user assistant tool assistant"
NAMED = [{"type": "function", "function": {"name": "f"}}]
NEEDS_X = {"name": "f", "parameters": {"required": ["x"]}}


def called(read: Any) -> dict[str, Any]:
    found: dict[str, Any] = read.messages[1]["tool_calls"][0]["function"]
    return found


@pytest.mark.parametrize(
    ("row", "roles", "look", "expected"),
    [
        ({"conversations": CALLED}, USED, lambda read: called(read)["name"], "f"),
        ({**ROW, "system": "s"}, f"system {ASKED}", lambda read: read.messages[0]["content"], "s"),
        ({**ROW, "tools": '[{"type": "function"}]'}, ASKED, lambda read: read.tools, [{"type": "function"}]),
        (
            {"instruction": "b", "output": "d", "history": [["a", "c"]]},
            f"{ASKED} {ASKED}",
            lambda read: read.messages[2]["content"],
            "b",
        ),
        (calling({}, function={"name": "f", "key_of_another_row": None}), USED, lambda read: read.tools, NAMED),
        ({"messages": [USER, {**ANSWER, "train": None, "weight": 0}]}, ASKED, lambda read: read.trained, [True, False]),
        *(
            (row, USED if len(row["messages"]) > 2 else ASKED, lambda read: called(read)["arguments"], expected)
            for row, expected in (
                (calling('{"x": 1}'), {"x": 1}),
                (calling({"x": 1}), {"x": 1}),
                (calling({"x": 1, "key_of_another_row": None}), {"x": 1}),
                ({"messages": calling({"x": 1})["messages"][:2]}, {"x": 1}),
                (calling(""), {}),
                (calling('{"x": null}'), {"x": None}),
                (calling({"x": None, "y": None}, function=NEEDS_X), {"x": None}),
            )
        ),
    ],
)
def test_what_rows_have_besides_is_read(
    row: dict[str, Any], roles: str, look: Callable[[Any], Any], expected: Any
) -> None:
    read = read_conversation("here", row, find_shape(row))
    assert not read.fault
    assert [turn["role"] for turn in read.messages] == roles.split()
    assert look(read) == expected


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
