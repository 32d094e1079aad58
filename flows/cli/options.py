"""Shared parts of commands: arguments and options, shell completion, and answers."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from trainer_lib.errors import TrainflowError
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.server.api import quiet_environment


def complete_recipe(incomplete: str) -> list[str]:
    """The names of trainflow's own recipes that begin with the text."""
    from trainer_lib.protocol.recipe_names import ABOUT

    return [name for name in ABOUT if name.startswith(incomplete)]


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Keys of a spec (``train.args.seed=``), or the values behind a ``=``, that begin with the text, with their help.

    Arguments are many: they are listed behind ``train.args.``, and not before.
    """
    from trainflow.flows.spec.schema import spec_schema

    schema = spec_schema()
    key, equals, value = incomplete.partition("=")
    nodes = dict(_keys(schema, schema["properties"], ""))
    if equals:
        return [(f"{key}={text}", "") for text in _values(nodes.get(key, {})) if text.startswith(value)]
    depth = incomplete.count(".")
    return [
        (f"{name}=", str(node.get("description", "")).partition(". ")[0])
        for name, node in nodes.items()
        if name.startswith(incomplete) and (name.count(".") <= max(depth, 1) or ".args." not in name)
    ]


def _keys(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, node in properties.items():
        refs = [option["$ref"] for option in (node, *node.get("anyOf", ())) if "$ref" in option]
        section = schema["$defs"][refs[0].rpartition("/")[2]] if refs else {}
        if "properties" in section:
            yield from _keys(schema, section["properties"], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node


def _values(node: Mapping[str, Any]) -> list[str]:
    options = [node, *node.get("anyOf", ())]
    values = [str(value) for option in options for value in option.get("enum", ()) if value is not None]
    return values + (["true", "false"] if any(option.get("type") == "boolean" for option in options) else [])


Spec = Annotated[
    Path | None,
    typer.Argument(help="The pipeline's spec, a YAML or JSON file; unset: the one in this folder.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields of the spec to set: train.args.learning_rate=1e-3.",
        autocompletion=complete_override,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's own log.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but warnings and failures.")]
Bare = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show the result alone: no heading, no notes, no progress, no empty lines."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, everything else on stderr.")]


@dataclass(frozen=True)
class Form:
    """Options of a command that say in which form it shows what it does."""

    quiet: Quiet = False
    as_json: Json = False
    debug: Debug = False

    def console(self) -> Console:
        """The console of notes and progress."""
        return terminal.console(stderr=self.as_json, quiet=self.quiet)


@dataclass(frozen=True)
class BareForm(Form):
    """`Form` of a command whose answer is what it is called for: with `quiet` the answer alone is shown."""

    quiet: Bare = False


EPILOGS: dict[Callable[..., None], str] = {}
"""The ends of the commands' help texts."""


@dataclass(frozen=True)
class Answer:
    """The result of a command: its fields in JSON, what makes its lines for people, and the failure it ends with."""

    record: Mapping[str, Any]
    lines: Callable[[], Iterable[Text]]
    error: TrainflowError | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        code = 0 if self.error is None else self.error.exit_code
        return {"ok": not code, "exit_code": code, **self.record}

    def show(self, form: Form) -> None:
        """Print it."""
        if form.as_json:
            print_json(self.to_dict())
        elif isinstance(form, BareForm) or not form.quiet:
            terminal.show(list(self.lines()), bare=form.quiet)

    def end(self, form: Form) -> None:
        """End the command with its failure, if there is one."""
        if self.error is None:
            return
        if not form.as_json:
            raise self.error
        terminal.show(presentation.failure(self.error, debug=form.debug), stderr=True)
        raise typer.Exit(self.error.exit_code)


def command(examples: str) -> Callable[[Callable[..., Answer | None]], Callable[..., None]]:
    """Make a function a command, which prints the answer that it returns, and ends with its exit code.

    A parameter whose type is a dataclass stands for the options and arguments that its fields declare; those of `form`,
    which is the first one, come last. The lines of `examples` end the text of its ``--help``.
    """
    lines = textwrap.dedent(examples).strip().splitlines()

    def decorate(function: Callable[..., Answer | None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        groups: dict[str, Any] = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
        flat: list[inspect.Parameter] = []
        for name, parameter in sorted(parameters.items(), key=lambda item: item[0] == "form"):
            if name in groups:
                flat += inspect.signature(groups[name], eval_str=True).parameters.values()
            else:
                flat.append(parameter.replace(annotation=hints[name]))

        @functools.wraps(function)
        def call(**options: Any) -> None:
            quiet_environment()
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            if (answer := function(**options)) is not None:
                answer.show(options["form"])
                answer.end(options["form"])

        # Typer reads both.
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
        )
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
        # Lines are paragraphs, because others are joined.
        EPILOGS[call] = "\n\n".join(["Examples:", *lines])
        return call

    return decorate


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output."""
    # default=str: a record may hold paths.
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
