"""Words of a command: what does not fit is refused as a bad spec is, and help ends with examples that are commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from tests.support.command import TRAINFLOW, Done
from trainer_lib.errors import OutOfMemoryError
from trainflow.flows.cli import main as front_door
from trainflow.flows.cli.main import application, main


def _commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(typer.main.get_command(application())))


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """A command that is refused; returns its rows by name, and what it wrote on standard output."""

    def run(*words: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert not re.search("Usage:|╭", out + err), out + err
        rows = Done(int(str(ended.value.code)), out, err).failure()
        assert all(rows[name].endswith((".", "?")) for name in ("why", "do")), err
        return {**rows, "out": out}

    return run


@pytest.mark.parametrize(
    ("words", "where", "why", "do"),
    [
        ("gc --kep=3", "--kep", "No such option: --kep (Possible options:", "trainflow gc --help"),
        ("gc --keep many", "--keep", "Invalid value for '--keep': ", "trainflow gc --help"),
        ("gc --keep 0", "--keep", "greater than or equal to 1", "trainflow gc --help"),
        ("gc --keep", "--keep", "requires an argument", "--help"),
        ("logs", "RUN", "Missing argument 'RUN'.", "trainflow logs --help"),
        ("checkpoints prune x", "--keep", "Missing option '--keep'.", "trainflow checkpoints prune --help"),
        ("rnus", "trainflow", "No such command 'rnus'. Did you mean 'runs'?", "trainflow --help"),
        ("checkpoints lst", "trainflow checkpoints", "Did you mean 'list'?", "trainflow checkpoints --help"),
        ("schema spec.yaml", "trainflow schema", "unexpected extra argument(s) (spec.yaml)", "trainflow schema --help"),
    ],
)
def test_words_that_do_not_fit(refuse: Any, words: str, where: str, why: str, do: str) -> None:
    rows = refuse(*words.split())
    assert rows["where"] == where
    assert why in rows["why"]
    assert do in rows["do"]
    record = json.loads(refuse(*words.split(), "--json")["out"])
    # Of a command without --json it is the option that is refused, in JSON all the same.
    assert record["error"]["field"] in (where, "--json")
    assert (record["ok"], record["exit_code"], record["error"]["class"]) == (False, 2, "ConfigError")


@pytest.mark.parametrize("words", ["--help", "gc -h", "checkpoints --help", "--version", "", "checkpoints"])
def test_help_and_version_end_well(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    if "-" in words:
        assert not ended.value.code
        assert "trainflow" in out and err == ""
    else:  # without a command the help is shown
        assert ended.value.code == 2
        assert "Commands" in out + err and "✗" not in err


@pytest.mark.parametrize("words", [["runs", "--lmit", "1", "--json"], ["--help"]])
def test_nothing_complains_when_the_reader_of_the_output_has_ended(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*TRAINFLOW, *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == (2 if "--json" in words else 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert ("--lmit" in done.stderr) == ("--json" in words)


def test_memory_that_is_used_up_is_not_called_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(front_door, "_call", exhausted)
    with pytest.raises(SystemExit) as ended:
        main(["runs"])
    assert ended.value.code == OutOfMemoryError.exit_code
    assert "The memory that this process may take is used up." in " ".join(capsys.readouterr().err.split())


NAMED = {" ".join(path): command for path, command in COMMANDS.items()}
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
    assert [name for name, command in NAMED.items() if "trainflow" not in (command.epilog or "")] == []


@pytest.mark.parametrize(("option", "reasons"), [("--json", NO_JSON), ("--quiet", NO_QUIET)])
def test_every_command_but_those_with_a_reason_has_the_option(option: str, reasons: dict[str, str]) -> None:
    without = {name for name, command in NAMED.items() if not any(option in each.opts for each in command.params)}
    assert without == set(reasons)


@pytest.mark.parametrize("name", NAMED)
def test_an_example_is_understood(name: str) -> None:
    for line in NAMED[name].epilog.split("\n\n")[1:]:
        words = shlex.split(line)
        assert words[: 1 + len(name.split())] == ["trainflow", *name.split()]
        # Parses and checks the words, and calls nothing; raises click's usage errors.
        NAMED[name].make_context(name, words[1 + len(name.split()) :])
