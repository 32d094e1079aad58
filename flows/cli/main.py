"""The `trainflow` command: the front door.

A bad spec is refused before Prefect, MLflow or torch is imported, so everything heavy is imported inside the commands.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer

from trainer_lib.errors import ConfigError, OutOfMemoryError, TrainflowError, without_temporary_folder
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import EPILOGS, print_json

# The commands, in the order of `trainflow --help`. A command is imported when it is called: its first line comes sooner
# without the others.
_COMMANDS = {
    "run": "execution:run",
    "why": "execution:why",
    "ui": "ui:ui",
    "init": "schedules:init",
    "schema": "schedules:schema",
    "plan": "execution:plan",
    "sweep": "sweep:sweep",
    "resume": "execution:resume",
    "prove-resume": "reproduce:prove_resume",
    "gc": "checkpoints:collect_garbage",
    "status": "runs:status",
    "runs": "runs:runs",
    "show": "runs:show",
    "compare": "runs:compare",
    "logs": "runs:logs",
    "tag": "runs:tag",
    "sync": "registry:sync",
    "serve": "schedules:serve",
    "deploy": "schedules:deploy",
    "follow": "schedules:follow",
    "mix": "schedules:mix",
    "join": "execution:join",
    "predict": "predicting:predict",
    "chat": "predicting:chat",
    "evaluate": "predicting:evaluate",
    "export": "predicting:export",
    "models": "registry:models",
    "promote": "registry:promote",
    "rollback": "registry:rollback",
    "lineage": "reproduce:lineage",
    "verify": "reproduce:verify",
    "reproduce": "reproduce:reproduce",
    "checkpoints list": "checkpoints:list_",
    "checkpoints verify": "checkpoints:verify",
    "checkpoints prune": "checkpoints:prune",
    "checkpoints import": "checkpoints:import_",
}
_GROUPS = {"checkpoints": "List, verify, prune and import checkpoints, wherever they are."}
# Typer carries a click of its own, so the class is reached through the one that it exports.
_UsageError: Any = typer.BadParameter.__mro__[1]


def application(wanted: str | None = None) -> typer.Typer:
    """Make the command line, with the command `wanted` alone if there is such a one, else with all of them."""
    app = typer.Typer(
        name="trainflow",
        help="From data and a model to a published, tracked, reproducible model: one resumable pipeline.",
        epilog="Exit codes: 0 done, 2 bad input, 130 Ctrl-C, others by the kind of failure (docs/failures.md).",
        no_args_is_help=True,
        # Typer's own tracebacks would print local variables, and with them secrets.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    is_known = wanted in {name.split()[0] for name in _COMMANDS}
    groups: dict[str, typer.Typer] = {}
    for name, place in _COMMANDS.items():
        if is_known and name.split()[0] != wanted:
            continue
        module, _, function = place.partition(":")
        call: Any = getattr(importlib.import_module(f"trainflow.flows.cli.commands.{module}"), function)
        group, _, own = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(help=_GROUPS[group], no_args_is_help=True)
            app.add_typer(groups[group], name=group)
        groups.get(group, app).command(own, epilog=EPILOGS[call])(call)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the failure's documented code; no traceback unless ``--debug``."""
    if argv is None:
        # At its end the interpreter would walk through every object of Prefect once more.
        atexit.register(gc.freeze)
    words = list(sys.argv[1:] if argv is None else argv)
    # From the words themselves: where a failure is caught, the command's parsed options are out of reach.
    debug, as_json = "--debug" in words, "--json" in words
    try:
        with _typed():
            _call(application(next((word for word in words if not word.startswith("-")), None)), words)
    except TrainflowError as error:
        if as_json:
            _print_failure({"ok": False, "exit_code": error.exit_code, "error": error.to_record()})
        terminal.show(presentation.failure(error, debug=debug), stderr=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _leave_stdout()
        sys.exit(1)
    except Exception as error:
        import traceback

        details = traceback.format_exc()
        if as_json:
            record = {"class": type(error).__name__, "message": str(error)}
            _print_failure({"ok": False, "exit_code": 1, "error": record})
        terminal.show(presentation.unexpected(error, details, debug=debug), stderr=True)
        sys.exit(1)


def _call(app: typer.Typer, words: list[str]) -> NoReturn:
    """Run a command line to its end, a SystemExit. Raises ConfigError for words that do not fit the command."""
    try:
        code = app(args=words, prog_name="trainflow", standalone_mode=False)
    except typer.Abort:
        code = 1
    except _UsageError as error:
        if not error.format_message():  # of a command without words, which shows its help
            error.show()
            raise SystemExit(2) from None
        raise _refusal(error) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _refusal(error: Any) -> ConfigError:
    """Words that do not fit their command, as Typer says it."""
    text, command = error.format_message(), "trainflow COMMAND" if error.ctx is None else error.ctx.command_path
    parameter = getattr(error, "param", None)
    name = None if parameter is None else parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar
    what = text if text.endswith((".", "?")) else f"{text}."
    _, *examples = ((error.ctx and error.ctx.command.epilog) or "").split("\n\n")
    remedy = f"{f'An example: {examples[0]}; ' if examples else ''}{command} --help shows its words."
    return ConfigError(what, field=getattr(error, "option_name", None) or name or command, remedy=remedy)


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Give an error of the machine, of which any code may be the victim, its type."""
    try:
        yield
    except FileNotFoundError as error:
        failure = without_temporary_folder(error)
        if failure is None:
            raise
        raise failure from error
    except MemoryError as error:
        message = "The memory that this process may take is used up."
        remedy = "Raise its limit (ulimit -v, the limit of its container or job); the same command continues."
        raise OutOfMemoryError(message, remedy=remedy) from error


def _print_failure(record: dict[str, Any]) -> None:
    """Print the record of a failure; where the reader of standard output has ended, the exit code alone tells it."""
    try:
        print_json(record)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()


def _leave_stdout() -> None:
    """The reader of our output (head, less) has ended: what is still to be written goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        typer.echo(f"trainflow {metadata.version('trainflow')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Hold the options of the command itself."""


if __name__ == "__main__":
    main()
