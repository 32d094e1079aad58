"""Conversations of tables by split: recognized by their columns, checked turn by turn, none left out without a word.

messages                 a list of {role, content}, as OpenAI has them; content may be parts of text; `tool_calls`
conversations            a list of {from, value}, as ShareGPT has them
instruction, output      two turns, as Alpaca has them; with `input` behind the instruction, perhaps `history`
prompt, completion       texts, or lists as of `messages`
text                     a text without turns: all of it is trained

A row may have `system`, and `tools` for the template; lists may be texts of JSON, as in a CSV. A turn of the assistant
with `train: false` or `weight: 0` is not trained.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from typing_extensions import override

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.row_sources import FORMATS, find_row_files
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared.recipe_options import require_choice
from trainer_lib.recipes.tables.cells import read_reading
from trainer_lib.recipes.tables.table_files import naming_sources, renamed_row
from trainer_lib.recipes.texts.documents import DocumentSplits

FIELD = "prepare.options"
SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
"""Shape -> the columns that it needs, in the order in which they are looked for."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
_CALLS = ("function_call", "tool_call")  # of ShareGPT: a turn of the assistant whose text is the call
_OF_TURN = {"role", "content", "from", "value", "train", "weight"}
_OTHER_MEDIA = ("images", "videos", "audios")
_EXAMPLES = 10
_SPEAKERS = re.compile(r"\n\n(Human|Assistant):")  # of turns in a text, as of Anthropic's HH-RLHF


class Conversation(NamedTuple):
    """A conversation of a row."""

    place: str  # where it is from
    messages: list[dict[str, Any]]  # turns as templates take them: `role`, `content`, and what else they have
    trained: list[bool]  # whether the turns may be trained on
    tools: list[Any] | None  # those of the row, for the template
    values: Mapping[str, Any]  # the columns of the row
    fault: str = ""  # what is wrong with it; empty for one that can be rendered
    source: str | None = None  # the name of its source in a mixture; None: there is none
    text: str | None = None  # a text without turns, in place of `messages`
    shape: str = ""  # how its row has it; empty where it is in no shape
    # The number of its first turn for people: 0 for a system prompt in front of the row's own turns, else 1.
    first: int = 1

    def texts(self) -> list[str]:
        """The texts of its turns, or its only text."""
        return [turn["content"] for turn in self.messages] if self.text is None else [self.text]

    def name_turn(self, number: int) -> str:
        """The name of a turn in errors, given its number in `messages`."""
        return f"turn {number + self.first}" if number + self.first else "the system prompt"


class Faults:
    """Faults of conversations, and the share that may be left out for them.

    Args:
        most: the share of the conversations that may have it, from 0 on and below 1 (of `faulty`), or up to 1.
        setting: the option with this share: conversations are left out by "faulty", and else stay.
    """

    def __init__(self, most: float, setting: str = "faulty") -> None:
        if not 0 <= most <= 1 or (setting == "faulty" and most == 1):
            what, remedy = "This is not a share.", "Give a share from 0 on and below 1."
            raise ConfigError(what, field=f"{FIELD}.{setting}", value=most, remedy=remedy)
        self._setting = setting
        self.most = most
        self.kinds: Counter[str] = Counter()
        self._examples: list[str] = []

    def add(self, place: str, what: str, kind: str = "row") -> None:
        """Count a conversation that is left out for a fault of one of `texts.templates.KINDS`."""
        self.kinds[kind] += 1
        self._examples += [f"{place}: {what}"] if len(self._examples) < _EXAMPLES else []

    def require_few(self, conversations: int) -> None:
        """Raise DataError where more are left out than may be, with the first ten of them."""
        if (count := self.kinds.total()) <= self.most * conversations:
            return
        lines = "".join(f"\n  {example}" for example in self._examples)
        lines += f"\n  and {count - len(self._examples):,} more" if count > len(self._examples) else ""
        what, allows = "cannot be trained on", "leave out"
        if self._setting != "faulty":
            what, allows = "would lose answers", "cut"
        raise DataError(
            f"{counted(count, 'conversation')} of {conversations:,} {what}:{lines}\n",
            field=f"{FIELD}.{self._setting}",
            value=self.most,
            remedy=f"Correct the rows; or set {FIELD}.{self._setting} to the share of conversations to {allows}.",
        )


class ConversationSplits(DocumentSplits):
    """Conversations by split, as `DocumentSplits` has documents.

    The options are `shape`, `system`, `rename`, `read`, `files` and `split`; without a shape, rows are in the shapes
    that their columns are of.

    Raises:
        ConfigError: there is no such shape. DataError: the rows have none.
    """

    def __init__(self, options: Mapping[str, Any], sources: Sequence[str], mixture: Sequence[str] = ()) -> None:
        if options["shape"] is not None:
            require_choice(options["shape"], SHAPES, field=f"{FIELD}.shape")
        super().__init__({"text": "", "separator": None, **options}, sources, mixture)

    def read_all(self) -> Iterator[Conversation]:
        """All conversations, in the order of the files."""
        if self._files:
            for name in self.names:
                yield from self.read(name)
        else:
            yield from self._read_sources()

    @override
    def _read(self, sources: Sequence[str], field: str) -> Iterator[Any]:
        if not sources:
            remedy = "Name files, as in prepare.sources=[chats.jsonl]."
            raise DataError("There is nothing to read.", field=field, remedy=remedy)
        reading, was_found = read_reading(self._options["read"]), False
        with naming_sources(field):
            for place, row in read_rows(find_row_files(sources, FORMATS), None, reading):
                values = renamed_row(row, self._options["rename"], place)
                shape = self._options["shape"] or find_shape(values)
                if shape is None and not was_found:
                    wanted = "; ".join(" and ".join(columns) for columns in SHAPES.values())
                    what = f"the row has no conversation. Its columns are {', '.join(values)}, and one needs {wanted}"
                    remedy = "Name the columns so: prepare.options.rename={THEIRS: messages}."
                    raise DataError(f"{place}: {what}.", field=f"{FIELD}.shape", remedy=remedy)
                was_found = True
                yield read_conversation(place, values, shape, system=self._options["system"])


def find_shape(row: Mapping[str, Any]) -> str | None:
    """The first shape whose columns a row has, with values where there is such a one; None: it has none."""
    having = [shape for shape, columns in SHAPES.items() if all(column in row for column in columns)]
    filled = (shape for shape in having if not any(_is_missing(row[column]) for column in SHAPES[shape]))
    return next(filled, having[0] if having else None)


def _is_missing(value: Any) -> bool:
    return (
        value is None or (isinstance(value, float) and value != value) or (hasattr(value, "__len__") and not len(value))
    )


def read_conversation(
    place: str, row: Mapping[str, Any], shape: str | None, *, system: str | None = None, asks: bool = False
) -> Conversation:
    """The conversation of a row, with its fault.

    Args:
        shape: one of `SHAPES`; None: the row is in no shape.
        system: the first turn of conversations that have no turn of the system, in the row or in its column `system`.
        asks: it is a new row, whose last turn the assistant is to answer.
    """
    tools, fault = _read_list(row.get("tools"), "tools")
    read = Conversation(place, [], [], _without_nulls(tools) or None, row, shape=shape or "")
    if problem := _find_row_fault(row, shape, asks=asks) or fault:
        return read._replace(fault=problem)
    if shape == "text":
        return read._replace(text=row["text"])
    turns, fault = _turns(row, str(shape))
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            fault = fault or f"turn {number} is not a mapping of role and content"
            break
        message, wrong = _read_turn(turn, str(shape), _required_arguments(tools))
        fault = fault or (f"turn {number}: {wrong}" if wrong else "")
        messages.append(message)
    fault = fault or _find_fault(messages, asks=asks)
    marks = (turn.get("weight") if turn.get("train") is None else turn["train"] for turn in turns[: len(messages)])
    trained = [mark not in (False, 0) for mark in marks]
    first, prompt = 1, row.get("system") or system
    if prompt is not None and messages and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": prompt})
        trained.insert(0, True)
        first = 0
    return read._replace(messages=messages, trained=trained, fault=fault, first=first)


def read_question(row: Mapping[str, Any], *, system: str | None = None) -> Conversation:
    """The conversation of a new row, whose last turn the assistant answers. Raises DataError for a faulty one."""
    shape = next((name for name, columns in SHAPES.items() if not _is_missing(row.get(columns[0]))), None)
    asked = {name: value for name, value in row.items() if name not in ("output", "completion")}
    conversation = read_conversation("", asked, shape, system=system, asks=True)
    if conversation.fault:
        remedy = "Correct the row: its last turn is of the user or of a tool, and the assistant answers it."
        raise DataError(f"{conversation.fault}.", field="rows", remedy=remedy)
    return conversation


def _find_row_fault(row: Mapping[str, Any], shape: str | None, *, asks: bool) -> str:
    """The fault of a row's columns; empty for none."""
    if all(_is_missing(value) and not isinstance(value, list) for value in row.values()):
        return "the row is empty"
    if shape is None:
        return f"it has no conversation; its columns are {', '.join(row)}"
    needed = SHAPES[shape][:1] if asks else SHAPES[shape]
    lacking = next((column for column in needed if row.get(column) is None), None)
    if lacking is not None:
        return f"there is no value in the column '{lacking}'"
    media = next((name for name in _OTHER_MEDIA if not _is_missing(row.get(name))), None)
    if media is not None:
        return f"it has {media}, and the model reads texts"
    for column in ("system", "text"):
        if (column == "system" or shape == "text") and not isinstance(row.get(column), str | None):
            return f"the column '{column}' has a {type(row[column]).__name__}, and not a text"
    return "the text is empty" if shape == "text" and not row["text"].strip() else ""


def _read_list(value: Any, column: str) -> tuple[list[Any], str]:
    """A list, which may be a text of JSON as in the cell of a CSV, and what is wrong with it."""
    if _is_missing(value):
        return [], ""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            quoted = "; write it with json.dumps(), as str() gives no JSON" if value.lstrip()[:1] in ("[", "{") else ""
            return [], f"the column '{column}' is not a list, and its text is no JSON{quoted}"
    return (list(value), "") if isinstance(value, list | tuple) else ([], f"the column '{column}' is not a list")


def _turns(row: Mapping[str, Any], shape: str) -> tuple[list[Any], str]:
    if shape in ("messages", "conversations"):
        return _read_list(row[shape], shape)
    turns: list[Any] = []
    if shape == "instruction":
        pairs, fault = _read_list(row.get("history"), "history")
        if fault or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
            return [], fault or "the column 'history' has no pairs of an instruction and its answer"
        asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
        pairs = [*pairs, (asked, row["output"]) if "output" in row else (asked,)]
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=False)], ""
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        part = row.get(column)
        if column in row:
            turns += list(part) if isinstance(part, list | tuple) else [{"role": role, "content": part}]
    return turns, ""


def _required_arguments(tools: Sequence[Any]) -> dict[Any, Any]:
    """Tool -> the arguments that its schema requires: null is a value there, and no gap of a file of columns."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    schemas = {tool.get("name"): tool.get("parameters") for tool in functions if isinstance(tool, Mapping)}
    return {name: schema.get("required") or () for name, schema in schemas.items() if isinstance(schema, Mapping)}


def _read_turn(turn: Mapping[str, Any], shape: str, required: Mapping[Any, Any]) -> tuple[dict[str, Any], str]:
    """A turn as templates take it, and what is wrong with it."""
    has_role = turn.get("role") is not None
    name = turn["role"] if has_role else turn.get("from")
    role = _SHAREGPT.get(str(name), name) if shape == "conversations" or not has_role else name
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    others = {key: value for key, value in turn.items() if key not in _OF_TURN and value not in (None, [])}
    wrong = ""
    if role in _CALLS and isinstance(content, str):
        wrong = _add_calls(others, content)
        role, content = "assistant", None
    elif isinstance(others.get("tool_calls"), str):
        others["tool_calls"], wrong = _read_list(others["tool_calls"], "tool_calls")
    if others.get("tool_calls"):
        others["tool_calls"], wrong = _read_calls(others["tool_calls"], wrong, required)
    if isinstance(content, list | tuple):
        kinds = [part.get("type") for part in content if isinstance(part, Mapping) and part.get("type") != "text"]
        wrong = f"a part of kind '{kinds[0]}', and the model reads texts" if kinds else wrong
        content = "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    if role is None:
        wrong = f"it has no role; its keys are {', '.join(turn)}, and a turn has role and content, or from and value"
    elif role not in ROLES:
        near = f" (write '{_SHAREGPT[str(role)]}')" if str(role) in _SHAREGPT else ""
        wrong = f"the role '{role}' is unknown{near}; roles are {', '.join(ROLES)}"
    elif content is not None and not isinstance(content, str):
        wrong = f"its content is a {type(content).__name__}, and not a text"
    elif others.get("function_call"):
        wrong = "'function_call' is an old name (write 'tool_calls': [{'type': 'function', 'function': THE_CALL}])"
    elif not (content or "").strip() and not others.get("tool_calls"):
        has_content = "content" in turn or "value" in turn
        wrong = wrong or ("it is empty" if has_content else f"it is empty: its keys are {', '.join(turn)}")
    return {"role": role, "content": content or "", **others}, wrong


def _add_calls(turn: dict[str, Any], text: str) -> str:
    """Put the calls of a ShareGPT turn into it as OpenAI has them; what is wrong with them."""
    try:
        calls = parse_json(text)
    except ValueError:
        return "the call of a tool is no JSON"
    calls = calls if isinstance(calls, list) else [calls]
    turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return "" if all(isinstance(call, Mapping) and "name" in call for call in calls) else "the call names no tool"


def _read_calls(given: Any, wrong: str, required: Mapping[Any, Any]) -> tuple[Any, str]:
    """Calls of tools whose arguments are mappings, as templates take them; OpenAI has texts of JSON."""
    calls = _without_nulls(given)
    for call, theirs in zip(calls, given, strict=True) if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            whole, needed = theirs.get("function", theirs)["arguments"], required.get(function.get("name"), ())
            function["arguments"] = {
                key: _without_nulls(value) for key, value in whole.items() if value is not None or key in needed
            }
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = parse_json(function["arguments"] or "{}")
            except ValueError:
                wrong = wrong or "the arguments of its call are no JSON"
    return calls, wrong


def _without_nulls(value: Any) -> Any:
    """A value without the keys of null: a file of columns gives each mapping the keys of all the others."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _find_fault(messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
    """The fault of the order of turns; empty for none."""
    if not messages:
        return "it has no turn"
    if asks and messages[-1]["role"] not in ("user", "tool"):
        return f"turn {len(messages)}: it is of the {messages[-1]['role']}, and the last turn is to be answered"
    if not asks and not any(message["role"] == "assistant" for message in messages):
        return "the assistant has no turn, so nothing is trained"
    for number, (message, following) in enumerate(pairwise(messages), 1):
        if message.get("tool_calls") and following["role"] != "tool":
            return f"turn {number}: a tool is called, and no turn of a tool follows"
        if message["role"] == following["role"] == "assistant":
            return f"turn {number + 1}: the assistant has two turns in a row"
    return ""


# -- prompts with answers, which may be whole conversations ----------------------------------------------------------
def parse_turns(text: str) -> list[Any] | None:
    """The turns that a text has as JSON, or behind marks of speakers; None for any other text."""
    if (marked := _SPEAKERS.split(text))[0] == "" and marked[1:2] == ["Human"]:
        roles = ("user" if name == "Human" else "assistant" for name in marked[1::2])
        found = [{"role": role, "content": text.strip()} for role, text in zip(roles, marked[2::2], strict=True)]
        return found if found[-1]["content"] else found[:-1]  # it asks for an answer
    with suppress(ValueError):
        turns = parse_json(text) if text.startswith("[") else None
        return turns if isinstance(turns, list) else None
    return None


def turns_of(text: str, role: str) -> list[Any]:
    """The turns that a text has; any other text is a turn of this role."""
    turns = parse_turns(text)
    return ([{"role": role, "content": text}] if text else []) if turns is None else turns


def split_prompts(*columns: Sequence[str], places: Sequence[str]) -> list[list[str]]:
    """Prompts and answers ``[columns, rows]``, where answers are whole conversations without the turns of the prompt.

    These are the turns that all of them begin with, and of a single one all but the last. So they are where answers
    are lists and prompts are not, or begin or end with such turns. A text follows them where no user has a turn.

    Raises:
        DataError: a text is not what a user says in these turns.
    """
    found = []
    for place, prompt, *answers in zip(places, *columns, strict=True):
        turns = [parse_turns(answer) or [] for answer in answers]
        most, shared = min(map(len, turns)) - 1, 0
        while shared < most and all(conversation[shared] == turns[0][shared] for conversation in turns):
            shared += 1
        begun, asked, is_text = turns[0][: max(shared, 0)], turns_of(prompt, "user"), parse_turns(prompt) is None
        is_end = bool(begun) and asked[-len(begun) :] == begun
        if most >= 0 and (is_text or is_end or begun[: len(asked)] == asked):
            users = (turn for turn in begun if role_of(turn) in ("user", "human"))
            questions = [str(turn.get("content") or turn.get("value")) for turn in users]
            if is_text and questions and not any(prompt.strip() in text or text in prompt for text in questions):
                what = f"{place}: the answers begin with a turn of the user, and the prompt is another text"
                remedy = f"Put it into the turns; or leave it out: {FIELD}.rename={{prompt: unused}}."
                raise DataError(f"{what}: '{prompt[:40]}'.", field="prepare.sources", remedy=remedy)
            begun = asked if is_end else begun + (asked if is_text and not questions else [])
            prompt, *answers = map(json.dumps, (begun, *(conversation[shared:] for conversation in turns)))
        found.append((prompt, *answers))
    return [list(column) for column in zip(*found, strict=True)]


def role_of(turn: Any) -> str:
    """The role of a turn as its row has it; empty for what is not a turn."""
    return str(turn.get("role") or turn.get("from") or "") if isinstance(turn, Mapping) else ""
