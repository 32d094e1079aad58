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

from tests.support.command import TRAINFLOW
from trainer_lib.errors import OutOfMemoryError
from trainflow.flows.cli import usage_errors
from trainflow.flows.cli.main import application, main

# What Typer and pydantic write: a usage line, a box, their sentences.
TYPERS = re.compile(
    r"Input should|valid (integer|number)|pydantic|Traceback|Usage:|╭|Invalid value|No such|Missing (argument|option)|"
    r"unexpected extra|requires an"
)


def _commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(typer.main.get_command(application())))


def _numbers(kind: str) -> list[tuple[tuple[str, ...], str, Any, Any]]:
    """Command, option and bounds of every option that takes a number of the kind."""
    found = []
    for path, command in COMMANDS.items():
        for option in command.params:
            # What `--help` shows of an option without a metavar of its own.
            annotation = getattr(option, "type_descriptor", None) and option.type_descriptor.annotation
            if option.param_type_name == "option" and getattr(annotation, "__name__", "") == kind:
                declared = option.type_descriptor.parameter_info
                found += [(path, name, declared.min, declared.max) for name in option.opts]
    return found


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """A command that is refused; returns its rows by name, and what it wrote on standard output."""

    def run(*words: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert ended.value.code == 2, out + err
        assert not TYPERS.search(out + err), out + err
        first, *lines = err.splitlines()
        assert first == "✗ bad input"
        rows = dict(re.findall(r"^  (where|why|do) +(\S.*)$", "\n".join(lines), re.M))
        assert set(rows) == {"where", "why", "do"}, err
        assert all(rows[name].endswith((".", "?")) for name in ("why", "do")), err
        return {**rows, "out": out}

    return run


def test_there_are_options_that_take_numbers() -> None:
    assert {" ".join(path) for path, *_ in _numbers("int")} >= {"run", "gc", "runs", "logs", "ui", "serve", "deploy"}
    assert {" ".join(path) for path, *_ in _numbers("float")} >= {"join", "reproduce"}


@pytest.mark.parametrize("written", ["many", "1.5", ""])
@pytest.mark.parametrize(("path", "option", "low", "high"), _numbers("int"))
def test_text_in_place_of_a_whole_number(
    refuse: Any, path: tuple[str, ...], option: str, low: Any, high: Any, written: str
) -> None:
    rows = refuse(*path, option, written)
    assert (rows["where"], rows["why"]) == (f"{option} = {written}", "This is not a whole number.")
    words = [f"{which} {bound}" for which, bound in (("at least", low), ("at most", high)) if bound is not None]
    assert rows["do"] == f"Give a whole number{' of ' if words else ''}{' and '.join(words)}."


@pytest.mark.parametrize(("path", "option", "low", "high"), [*_numbers("int"), *_numbers("float")])
def test_a_number_out_of_its_range_or_text_in_its_place(
    refuse: Any, path: tuple[str, ...], option: str, low: Any, high: Any
) -> None:
    for bound, wrong, side in ((low, -1, "least"), (high, 1, "most")):
        if bound is not None:
            rows = refuse(*path, option, str(bound + wrong))
            assert rows["where"] == f"{option} = {bound + wrong}"
            assert rows["why"] == f"The number must be at {side} {bound:g}."
            assert side == "most" or f"of at least {bound:g}" in rows["do"]
    if (path, option, low, high) in _numbers("float"):
        rows = refuse(*path, f"{option}=many")
        assert (rows["where"], rows["why"]) == (f"{option} = many", "This is not a number.")
        assert rows["do"].startswith("Give a number")


@pytest.mark.parametrize("path", COMMANDS)
def test_an_option_that_does_not_exist(refuse: Any, path: tuple[str, ...]) -> None:
    rows = refuse(*path, "--debgu")
    assert (rows["where"], rows["why"]) == ("--debgu", f"trainflow {' '.join(path)} has no such option.")
    # Every command but `join` and `schema` has --debug.
    has_it = any("--debug" in option.opts for option in COMMANDS[path].params)
    assert rows["do"] == 'Did you mean "--debug"?' if has_it else "Choose one of: --" in rows["do"]


@pytest.mark.parametrize(
    ("words", "where", "why", "do"),
    [
        (("gc", "--kep=3"), "--kep", "trainflow gc has no such option.", 'Did you mean "--keep"?'),
        (("gc", "-keep", "3"), "-keep", "trainflow gc has no such option.", 'Did you mean "--keep"?'),
        (("runs", "-x"), "-x", "trainflow runs has no such option.", "Choose one of: --storage, --name, --state,"),
        (("--verzion",), "--verzion", "trainflow has no such option.", 'Did you mean "--version"?'),
        (("--storage", "here", "runs"), "--storage", "trainflow has no such option.", "behind the name of a command"),
        (("gc", "--keep"), "--keep", "This option needs a value.", "Write --keep N."),
        (("ui", "--storage"), "--storage", "This option needs a value.", "Write --storage URL."),
        (("ui", "--port"), "--port", "This option needs a value.", "Write --port VALUE."),
        (("gc", "--delete=yes"), "--delete = yes", "This option takes no value.", "Write --delete alone."),
        (("rnus",), "COMMAND = rnus", "trainflow has no such command.", 'Did you mean "runs"?'),
        (("rnus", "--json"), "COMMAND = rnus", "trainflow has no such command.", 'Did you mean "runs"?'),
        (("zzz",), "COMMAND = zzz", "trainflow has no such command.", "Choose one of: run, why, ui,"),
        (("checkpoints", "lst"), "COMMAND = lst", "trainflow checkpoints has no such command.", '"list"?'),
        (("logs",), "RUN", "trainflow logs needs this argument.", "Write trainflow logs RUN."),
        (("compare", "last"), "RUN", "trainflow compare needs this argument.", "Write trainflow compare RUN RUN."),
        (("tag", "last"), "NAME", "trainflow tag needs this argument.", "Write trainflow tag RUN NAME."),
        (("schema", "spec.yaml"), "spec.yaml", "trainflow schema takes no further argument.", "Remove it."),
        (("watch", "a", "b", "c", "d"), "c d", "trainflow watch takes no further argument.", "Remove them."),
    ],
)
def test_words_that_do_not_fit(refuse: Any, words: tuple[str, ...], where: str, why: str, do: str) -> None:
    rows = refuse(*words)
    assert (rows["where"], rows["why"]) == (where, why)
    assert do in rows["do"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("gc --keep many", "--keep", "many"),
        ("runs -n 0", "-n", "0"),
        ("gc --kep 3", "--kep", None),
        ("rnus", "COMMAND", "rnus"),
        ("logs", "RUN", None),
        ("serve x", "--json", None),  # it has no --json: that is what is refused, in JSON all the same
    ],
)
def test_json_has_one_object_of_the_refusal(refuse: Any, words: str, field: str, value: str | None) -> None:
    answer = json.loads(refuse(*words.split(), "--json")["out"])
    assert (answer["ok"], answer["exit_code"], answer["error"]["class"]) == (False, 2, "ConfigError")
    assert (answer["error"]["field"], answer["error"]["value"]) == (field, value)


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


def test_a_shell_still_completes_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TRAINFLOW_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "trainflow gc --ke")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit) as ended:
        main(["gc", "--ke"])
    assert not ended.value.code
    assert "--keep" in capsys.readouterr().out


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


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_memory_that_is_used_up_is_not_called_a_bug(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chained(*_: object) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("cannot join thread before it is started")

    monkeypatch.setattr(usage_errors, "call", chained)
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
