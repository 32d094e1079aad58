"""Conversations as tokens, by a chat template, with the tokens that are trained: those that the assistant writes.

A template that marks what the assistant writes (`{% generation %}`) says it itself. With another one a turn is what
stands between the text up to it, with the request for an answer, and the text with it; both must be beginnings of the
whole text, or the conversation is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_lib.errors import ConfigError, first_line
from trainer_lib.recipes.shared.model_places import one_of
from trainer_lib.recipes.texts.conversations import FIELD, Conversation
from trainer_lib.recipes.texts.tokenizing import learn_byte_tokenizer, load_tokenizer, note_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import PrepareOutput

TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ 'assistant: ' }}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ message['role'] + ': ' + message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
}
"""Templates by name: with the marks of ChatML, which a tokenizer must know, or with none but the token for the end."""
LOSSES = ("assistant", "last", "all")
KINDS = {
    "row": "cannot be read as turns",
    "template": "do not fit the template",
    "unended": "have answers without a token for the end",
    "doubled": "begin with two tokens for the beginning",
    "untrained": "have nothing that is trained",
    "overlong": "are too long",
}
"""Kinds of faulty conversations, in words that say what they are."""
FILES = ".jinja"
"""The end of the name of a template's file."""
_TALKERS = ("user", "assistant")  # every template has a place for them
_QUIET = {"verbose": False}
_MARKS = re.compile(r"\{%-?\s*generation\b")


class FaultyError(Exception):
    """A conversation cannot be rendered, or nothing of it would be trained: why, as text and as one of `KINDS`."""

    def __init__(self, what: str, kind: str = "template") -> None:
        super().__init__(what)
        self.kind = kind


def _with_written_calls(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Turns whose calls of tools have their arguments as JSON, for a template that puts these behind a text."""
    written = deepcopy(list(messages))
    for call in (call for turn in written for call in turn.get("tool_calls", ())):
        function = call.get("function", call)
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return written


class ChatTemplate:
    """The template of a tokenizer, which keeps it.

    Args:
        tokenizer: a fast one.
        template: a name of `TEMPLATES`, a file, the text of a template, or None for that of the tokenizer.

    Raises:
        ConfigError: there is no such template, or the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, template: str | Path | None) -> None:
        field = f"{FIELD}.template"
        if template is not None:
            template = path = str(template)
            try:
                template = Path(path).read_text(encoding="utf-8") if path.endswith(FILES) else path
            except (OSError, ValueError) as error:
                what, remedy = f"The template cannot be read: {error}.", "Name a file with a Jinja template, in UTF-8."
                raise ConfigError(what, field=field, value=path, remedy=remedy) from error
            if template not in TEMPLATES and "{" not in template:
                remedy = f"Give one of {', '.join(TEMPLATES)}, a file NAME.jinja, or the text of a template."
                raise ConfigError("There is no template of this name.", field=field, value=template, remedy=remedy)
            tokenizer.chat_template = TEMPLATES.get(template, template)
        if not tokenizer.chat_template:
            remedy = f"Set it to one of {', '.join(TEMPLATES)}, or to the text of a template."
            raise ConfigError("The tokenizer has no chat template.", field=field, remedy=remedy)
        self.tokenizer = tokenizer
        self._text = str(tokenizer.chat_template)
        self._is_marked = _MARKS.search(self._text) is not None
        known = getattr(tokenizer, "added_tokens_decoder", {})
        self._ends = {number for number, token in known.items() if token.special} | set(tokenizer.all_special_ids)
        self._added = tuple(tokenizer.get_added_vocab())

    def render(self, conversation: Conversation, turns: int | None = None, *, asks: bool = False) -> str:
        """The text of the first turns, or of all; `asks`: with the beginning of the assistant's next one.

        Raises FaultyError: the template does not take the conversation.
        """
        text: str = self._apply(conversation, turns, tokenize=False, add_generation_prompt=asks)
        return text

    def _apply(self, conversation: Conversation, turns: int | None = None, **settings: Any) -> Any:
        messages = conversation.messages[:turns]
        apply = partial(self.tokenizer.apply_chat_template, tools=conversation.tools, **settings)
        try:
            with suppress(TypeError):
                return apply(messages)
            return apply(_with_written_calls(messages))
        except Exception as error:  # any that a template or a value in it raises
            raise FaultyError(f"the template does not take it ({first_line(error)})") from error

    def tokenize(self, conversation: Conversation, *, loss_on: str = "assistant") -> tuple[np.ndarray, np.ndarray]:
        """The tokens int32 ``[tokens]`` of a conversation, and which of them are trained, bool ``[tokens]``.

        Args:
            loss_on: "assistant": the turns of the assistant, "last": the last of these, "all": every token.

        Raises:
            FaultyError: the template does not take it, moves text or leaves a turn out, nothing would be trained, an
                answer has no end, or the text has two tokens for its beginning.
        """
        if conversation.text is not None:
            tokens = self._plain(conversation.text)
            self._require_one_beginning(tokens)
            return tokens, np.ones(len(tokens), bool)
        self._require_places(conversation)
        self._require_all_turns(conversation)
        answers = [number for number, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
        wanted = answers if loss_on == "assistant" else answers[-1:]
        wanted = [turn for turn in wanted if conversation.trained[turn]]
        tokens, parts = self._marked(conversation) if self._is_marked else (np.empty(0, np.int32), [])
        if len(parts) == len(answers):
            parts = [part for turn, part in zip(answers, parts, strict=True) if turn in wanted]
        else:  # only for what is trained, as a template may write other answers in another way
            tokens, parts = self._between(conversation, wanted)
        self._require_one_beginning(tokens)
        trained = np.zeros(len(tokens), bool)
        for turn, part in zip(wanted, parts, strict=True):
            if len(part) and int(tokens[part[-1]]) not in self._ends:
                what = "the template ends the answer without a token that means its end"
                raise FaultyError(f"{conversation.name_turn(turn)}: {what}", "unended")
            trained[part] = True
        if loss_on == "all":
            trained[:] = True
        if not trained.any():
            raise FaultyError("nothing of it is trained", "untrained")
        return tokens, trained

    def _plain(self, text: str) -> np.ndarray:
        """The tokens of a text without turns, with that for its end."""
        tokens: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return np.array([*tokens, end] if end is not None and tokens[-1:] != [end] else tokens, np.int32)

    def _require_one_beginning(self, tokens: np.ndarray) -> None:
        if len(tokens) > 1 and tokens[0] == tokens[1] == self.tokenizer.bos_token_id:
            raise FaultyError("its text begins with two tokens for the beginning", "doubled")

    def _require_places(self, conversation: Conversation) -> None:
        for name in ("tools", "tool_calls"):
            used = conversation.tools if name == "tools" else any(turn.get(name) for turn in conversation.messages)
            if used and name not in self._text:
                raise FaultyError(f"it has {name}, and the template has no place for them")

    def _require_all_turns(self, conversation: Conversation) -> None:
        """Raise FaultyError for a turn whose role the template has no place for, so that its text is lost."""
        others = [number for number, turn in enumerate(conversation.messages) if turn["role"] not in _TALKERS]
        text = self.render(conversation) if others else ""
        for number in others:
            turn, changed = conversation.messages[number], list(conversation.messages)
            if turn["content"].strip() not in text:
                changed[number] = {**turn, "content": f"{turn['content']} {number}"}
                if self.render(conversation._replace(messages=changed)) == text:
                    what = f"the template leaves it out, as it has no place for the {turn['role']} there"
                    raise FaultyError(f"{conversation.name_turn(number)}: {what}")

    def _marked(self, conversation: Conversation) -> tuple[np.ndarray, list[np.ndarray]]:
        """The tokens, and the numbers of those of the parts that the template marks."""
        made = self._apply(conversation, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=_QUIET)
        edges = np.flatnonzero(np.diff(np.array([0, *made["assistant_masks"], 0])))
        parts = [np.arange(start, stop) for start, stop in edges.reshape(-1, 2)]
        return np.array(made["input_ids"], np.int32), parts

    def _between(self, conversation: Conversation, answers: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The tokens, and the numbers of those of the assistant's turns, by the characters that they add."""
        text = self.render(conversation)
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, ends = np.array(made["offset_mapping"]).reshape(-1, 2).T
        spans = [self._span(conversation, text, turn) for turn in answers]
        # A token that begins before an answer, with a blank in front of its first word, is of the answer.
        parts = [((ends > start) & (starts < stop)).nonzero()[0] for start, stop in spans]
        return np.array(made["input_ids"], np.int32), parts

    def _span(self, conversation: Conversation, text: str, turn: int) -> tuple[int, int]:
        """The characters of a turn of the assistant, without the blanks behind the token for its end."""
        whole = self.render(conversation, turn + 1)
        if turn:
            before = self.render(conversation, turn, asks=True)
        else:  # without a turn before it, it follows the request that comes before any answer
            request = self.render(conversation, 1, asks=True).removeprefix(whole)
            before = whole[: whole.find(request)] + request
        for part in (before, whole):
            if not text.startswith(part):
                what = "the template writes the turns up to it in another way when others follow"
                is_last = all(later["role"] != "assistant" for later in conversation.messages[turn + 1 :])
                remedy = "" if is_last else f" ({FIELD}.loss_on=last trains the last answer alone)"
                raise FaultyError(f"{conversation.name_turn(turn)}: {what}, so its tokens are not known{remedy}")
        bare = whole.rstrip()
        return len(before), len(bare if bare.endswith(self._added) else whole)

    def show(self, conversation: Conversation, *, loss_on: str, most: int) -> list[tuple[str, bool]]:
        """The text of the first tokens in parts, with whether they are trained. Raises FaultyError as `tokenize`."""
        tokens, trained = (values[:most] for values in self.tokenize(conversation, loss_on=loss_on))
        edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        return [(self.tokenizer.decode(tokens[start:stop]), bool(trained[start])) for start, stop in pairwise(edges)]

    def ask(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """The tokens of turns with the beginning of the assistant's answer.

        Raises FaultyError as `render`, or the template has no place for tools.
        """
        conversation = Conversation("", list(messages), [], tools, {})
        self._require_places(conversation)
        text = self.render(conversation, asks=True)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens


def find_template(chosen: Mapping[str, Any], texts: Iterable[str], out: PrepareOutput) -> ChatTemplate:
    """The template and the tokenizer of the model that the options name, else one that is learned from the texts.

    The tokenizer is kept and noted. Raises ConfigError: there is no such model or template.
    """
    place = one_of(chosen, field=FIELD)
    if place is None:
        tokenizer = learn_byte_tokenizer(texts, vocabulary=chosen["vocabulary"], special=(TURN, END))
    else:
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], is_fast=True)
    template = ChatTemplate(tokenizer, chosen["template"] or ("chatml" if place is None else None))
    note_tokenizer(tokenizer, out)
    return template
