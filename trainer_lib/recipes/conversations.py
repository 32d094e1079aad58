"""Conversations of tables by split: recognized by their columns, checked turn by turn, none left out without a word.

messages                 a list of {role, content}, as OpenAI has them; content may be parts of text; `tool_calls`
conversations            a list of {from, value}, as ShareGPT has them
instruction, output      a turn each, as Alpaca has them; with `input` behind the instruction, and perhaps `system`
prompt, completion       texts, or lists as of `messages`

A row may have `tools`, for the template. A turn of the assistant with `train: false` or `weight: 0` is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from trainer_lib.base.suggestions import counted
from trainer_lib.data.row_files import read_rows
from trainer_lib.data.row_sources import FORMATS, find_row_files
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.option_names import require_choice
from trainer_lib.recipes.table_cells import read_reading
from trainer_lib.recipes.table_files import naming_sources, renamed_row
from trainer_lib.recipes.text_documents import DocumentSplits

FIELD = "prepare.options"
SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
}
"""Shape -> the columns that it needs, in the order in which they are looked for."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
_OF_TURN = {"role", "content", "from", "value", "train", "weight"}
_EXAMPLES = 10


class Conversation(NamedTuple):
    """A conversation of a row.

    Attributes:
        place: where it is from.
        messages: turns as templates take them: `role`, `content`, and what else they have.
        trained: of each turn whether it may be trained on.
        tools: those of the row, for the template.
        values: the columns of the row.
        fault: what is wrong with it; empty for one that can be rendered.
        source: the name of its source in a mixture; None: there is none.
    """

    place: str
    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[Any] | None
    values: Mapping[str, Any]
    fault: str = ""
    source: str | None = None


class Faults:
    """What is wrong with conversations, and how many may be left out for it.

    Args:
        most: the share of the conversations that may be left out, from 0 on and below 1.
    """

    def __init__(self, most: float) -> None:
        if not 0 <= most < 1:
            what, remedy = "This is not a share.", "Give a share from 0 on and below 1."
            raise ConfigError(what, field=f"{FIELD}.faulty", value=most, remedy=remedy)
        self.most = most
        self.count = 0
        self._examples: list[str] = []

    def add(self, place: str, what: str) -> None:
        """Count a conversation that is left out."""
        self.count += 1
        self._examples += [f"{place}: {what}"] if len(self._examples) < _EXAMPLES else []

    def require_few(self, conversations: int) -> None:
        """Raise DataError where more are left out than may be, with the first ten of them."""
        if self.count <= self.most * conversations:
            return
        lines = "".join(f"\n  {example}" for example in self._examples)
        lines += f"\n  and {self.count - len(self._examples):,} more" if self.count > len(self._examples) else ""
        raise DataError(
            f"{counted(self.count, 'conversation')} of {conversations:,} cannot be trained on:{lines}\n",
            field=f"{FIELD}.faulty",
            value=self.most,
            remedy="Correct the rows; or set prepare.options.faulty to the share of conversations to leave out.",
        )


class ConversationSplits(DocumentSplits):
    """Conversations by split, as `DocumentSplits` has documents.

    Args:
        options: `shape`, `system`, `rename`, `read`, `files` and `split`.
        sources: the spec's `prepare.sources`.
        mixture: their names in a mixture; empty: there is none.

    Attributes:
        shape: how rows have their conversations; None before one was read.

    Raises:
        ConfigError: there is no such shape. DataError: the rows have none.
    """

    def __init__(self, options: Mapping[str, Any], sources: Sequence[str], mixture: Sequence[str] = ()) -> None:
        self.shape: str | None = options["shape"]
        if self.shape is not None:
            require_choice(self.shape, SHAPES, field=f"{FIELD}.shape")
        super().__init__({"text": "", "separator": None, **options}, sources, mixture)

    @override
    def read(self, name: str) -> Iterator[Any]:
        """The conversations of a split, in the order of the files."""
        yield from super().read(name)

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
        reading = read_reading(self._options["read"])
        with naming_sources(field):
            for place, row in read_rows(find_row_files(sources, FORMATS), None, reading):
                values = renamed_row(row, self._options["rename"], place)
                self.shape = self.shape or _find_shape(place, values)
                yield read_conversation(place, values, self.shape, system=self._options["system"])


def _find_shape(place: str, row: Mapping[str, Any]) -> str:
    for shape, columns in SHAPES.items():
        if all(column in row for column in columns):
            return shape
    wanted = "; ".join(" and ".join(columns) for columns in SHAPES.values())
    raise DataError(
        f"{place}: the row has no conversation. Its columns are {', '.join(row)}, and one needs {wanted}.",
        field=f"{FIELD}.shape",
        remedy="Name the columns so: prepare.options.rename={THEIRS: messages}. "
        "For texts without turns there is the recipe causal-language-modeling.",
    )


def read_conversation(place: str, row: Mapping[str, Any], shape: str, *, system: str | None = None) -> Conversation:
    """The conversation of a row, with its fault.

    Args:
        system: the first turn of conversations that have no turn of the system.
    """
    tools = row.get("tools") or None
    lacking = [column for column in SHAPES[shape] if row.get(column) is None]
    if lacking:
        return Conversation(place, [], [], tools, row, f"there is no value in the column '{lacking[0]}'")
    turns, fault = _turns(row, shape)
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            fault = fault or f"turn {number} is not a mapping of role and content"
            break
        message, wrong = _read_turn(turn, shape)
        fault = fault or (f"turn {number}: {wrong}" if wrong else "")
        messages.append(message)
    trained = [turn.get("train", turn.get("weight", 1)) not in (False, 0) for turn in turns[: len(messages)]]
    if system is not None and messages and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        trained.insert(0, True)
    return Conversation(place, messages, trained, tools, row, fault or _find_fault(messages))


def _turns(row: Mapping[str, Any], shape: str) -> tuple[list[Any], str]:
    if shape in ("messages", "conversations"):
        turns = row[shape]
        return (list(turns), "") if isinstance(turns, list | tuple) else ([], f"the column '{shape}' is not a list")
    if shape == "instruction":
        asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
        first = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        return [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}], ""
    turns = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        part = row[column]
        turns += list(part) if isinstance(part, list | tuple) else [{"role": role, "content": part}]
    return turns, ""


def _read_turn(turn: Mapping[str, Any], shape: str) -> tuple[dict[str, Any], str]:
    """A turn as templates take it, and what is wrong with it."""
    role = turn.get("role", turn.get("from"))
    role = _SHAREGPT.get(str(role), role) if shape == "conversations" else role
    content, wrong = turn.get("content", turn.get("value")), ""
    if isinstance(content, list | tuple):
        kinds = [part.get("type") for part in content if isinstance(part, Mapping) and part.get("type") != "text"]
        wrong = f"a part of kind '{kinds[0]}', and the model reads texts" if kinds else ""
        content = "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    if role not in ROLES:
        wrong = f"the role '{role}' is unknown; roles are {', '.join(ROLES)}"
    elif content is not None and not isinstance(content, str):
        wrong = f"its content is a {type(content).__name__}, and not a text"
    elif not (content or "").strip() and not turn.get("tool_calls"):
        wrong = wrong or "it is empty"
    others = {name: value for name, value in turn.items() if name not in _OF_TURN and value is not None}
    return {"role": role, "content": content or "", **others}, wrong


def _find_fault(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the order of turns; empty for nothing."""
    if not messages:
        return "it has no turn"
    if not any(message["role"] == "assistant" for message in messages):
        return "the assistant has no turn, so nothing is trained"
    for number, (message, following) in enumerate(zip(messages, [*messages[1:], {"role": ""}], strict=True), 1):
        if message.get("tool_calls") and following["role"] != "tool":
            return f"turn {number}: a tool is called, and no turn of a tool follows"
        if message["role"] == following["role"] == "assistant":
            return f"turn {number + 1}: the assistant has two turns in a row"
    return ""
