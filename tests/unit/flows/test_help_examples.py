"""Every command's `--help` ends with examples that are commands, and every command can be quiet and answer in JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from flows.cli.examples import _EXAMPLES
from flows.cli.main import application


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


COMMANDS = dict(_commands(typer.main.get_command(application())))
_SERVES = "It is at work until it is ended, and has no result."
NO_JSON = {
    "ui": _SERVES,
    "serve": _SERVES,
    "watch": _SERVES,
    "join": "Its result is that of the machine that leads.",
    "schema": "What it prints is JSON.",
}
NO_QUIET = {
    "ui": "The links are all that it prints.",
    "schema": "The schema is all that it prints.",
}


def test_every_command_has_examples() -> None:
    assert set(COMMANDS) == set(_EXAMPLES)
    assert [name for name, command in COMMANDS.items() if "trainflow" not in (command.epilog or "")] == []


@pytest.mark.parametrize(("option", "reasons"), [("--json", NO_JSON), ("--quiet", NO_QUIET)])
def test_every_command_but_those_with_a_reason_has_the_option(option: str, reasons: dict[str, str]) -> None:
    without = {name for name, command in COMMANDS.items() if not any(option in each.opts for each in command.params)}
    assert without == set(reasons)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_understood(name: str) -> None:
    for line in COMMANDS[name].epilog.split("\n\n")[1:]:
        words = shlex.split(line)
        assert words[: 1 + len(name.split())] == ["trainflow", *name.split()]
        # Parses and checks the words, and calls nothing; raises click's usage errors.
        COMMANDS[name].make_context(name, words[1 + len(name.split()) :])
