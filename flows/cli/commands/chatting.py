"""The command `trainflow chat`: a conversation with a trained model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainer_lib.errors import ConfigError, TrainflowError
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.commands.predicting import ModelArgument, Trust, find_address, read_trust
from trainflow.flows.cli.options import Answer, BareForm, command
from trainflow.flows.cli.signals import stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from trainer_lib.model_folder.chat import Chat, Spoken

_WORDS = "/reset and /system TEXT begin again, /exit ends; Ctrl-C ends an answer"
_Prompt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Answer this alone; unset: what is piped in, or talk.")
]
_System = Annotated[str | None, typer.Option(metavar="TEXT", help="First turn; unset: that of training; empty: none.")]
_Base = Annotated[bool, typer.Option("--base", help="Answer with the base model as well, to compare.")]
_NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="The most tokens of an answer.")]
_Temperature = Annotated[float, typer.Option(min=0.0, metavar="T", help="0: the likeliest token each time.")]


@command("""
    trainflow chat last
    trainflow chat models:/helper@champion --base --prompt "What is a closure?"
""")
def chat(
    form: BareForm,
    model: ModelArgument,
    prompt: _Prompt = None,
    system: _System = None,
    base: _Base = False,
    new_tokens: _NewTokens = 512,
    temperature: _Temperature = 0.0,
    trust: Trust = None,
) -> Answer | None:
    """Talk with a model that was trained on conversations, by its template and system prompt.

    Nothing of the conversation is logged or written.
    """
    from trainer_lib.model_folder.locate import find_model, require_trust

    asked = prompt if prompt is not None or sys.stdin.isatty() else sys.stdin.read()
    if (asked is None and form.as_json) or (asked is not None and not asked.strip()):
        remedy = "Give --prompt TEXT, or pipe a text in."
        raise ConfigError("There is nothing to answer.", field="--prompt", value=asked, remedy=remedy)
    address, out = find_address(model), terminal.console(stderr=form.as_json)
    described = find_model(address)
    require_trust(described, read_trust(trust))
    if not described.description.info.get("tokenizer"):  # known without executing its code
        remedy = "Ask it with trainflow predict."
        raise ConfigError("The model reads no texts.", field="MODEL", value=model, remedy=remedy)
    with stoppable(out.print, remedy="Run it again."):
        from trainer_lib.model_folder.chat import Chat
        from trainer_lib.model_folder.loaded import load_model

        loaded = load_model(address, trust_code=described.description.code_digest)
        talk = Chat(loaded, system, new_tokens=new_tokens, temperature=temperature)
    if asked is None:
        converse(talk, out, with_base=base, bare=form.quiet, debug=form.debug)
        return None
    spoken, base_answer = _answer(talk, asked, terminal.console(quiet=form.as_json), base)
    others = {} if base_answer is None else {"base": _record(base_answer)}
    return Answer({**_record(spoken), **others, "system": talk.system or None}, list)


def _record(spoken: Spoken) -> dict[str, Any]:
    return {"answer": spoken.text, "tokens": spoken.tokens, "whole": spoken.is_whole}


def _answer(talk: Chat, text: str, out: Console, with_base: bool) -> tuple[Spoken, Spoken | None]:
    """Show an answer piece by piece; with that of the base above it, both have a heading."""

    def show(piece: str) -> None:
        out.print(Text(piece), end="")

    return talk.answer(text, show, heading=(lambda name: out.print(Text(name, "dim"))) if with_base else None)


def converse(
    talk: Chat,
    out: Console,
    *,
    with_base: bool,
    bare: bool = False,
    debug: bool = False,
    read: Callable[[str], str] | None = None,
) -> None:
    """Answer lines until /exit or the end of the input; a failure is shown, and the conversation stays.

    Args:
        read: shows a prompt and returns a line, as `input`; None: that of the terminal.
    """
    read = read or _read_line
    if not bare:
        out.print(Text(_WORDS, "dim"))
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            out.print()
            continue
        word, _, text = line.partition(" ")
        if word == "/exit":
            return
        if word in ("/reset", "/system"):
            talk.turns, talk.system = [], text.strip() if word == "/system" else talk.system
            continue
        try:
            if line.startswith("/"):
                out.print(Text(f"There is no {word}: {_WORDS}", "yellow"))
            elif line:
                _answer(talk, line, out, with_base)
        except TrainflowError as error:
            terminal.show(presentation.failure(error, debug=debug))


def _read_line(prompt: str) -> str:
    import readline  # noqa: F401 - lines can be edited, and earlier ones called back while it runs

    return input(prompt)
