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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer_lib.errors import (
    Interrupted,
    OutOfMemoryError,
    Preempted,
    TrainflowError,
    without_temporary_folder,
)
from trainflow.flows.cli import presentation, terminal, usage_errors
from trainflow.flows.cli.examples import epilog
from trainflow.flows.cli.execution import execute
from trainflow.flows.cli.join import follow as follow_leader
from trainflow.flows.cli.join import follower_config
from trainflow.flows.cli.options import Bare, Debug, From, FromRun, Json, Limit, Overrides, Quiet, Spec, print_json
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.spec_choice import choose_spec_file
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.keys.resolver import Resolver

# The commands of other files, in the order of `trainflow --help`, after those of this one. Each is imported when it is
# called: a command says its first line sooner without the others.
_ELSEWHERE = {
    "init": "trainflow.flows.cli.scaffold:init",
    "schema": "trainflow.flows.cli.scaffold:schema",
    "plan": "trainflow.flows.cli.planning:plan",
    "sweep": "trainflow.flows.cli.sweep:sweep",
    "resume": "trainflow.flows.cli.resume:resume",
    "prove-resume": "trainflow.flows.cli.proof:prove_resume",
    "gc": "trainflow.flows.cli.cleaning:collect_garbage",
    "status": "trainflow.flows.cli.status:status",
    "runs": "trainflow.flows.cli.runs:runs",
    "show": "trainflow.flows.cli.runs:show",
    "compare": "trainflow.flows.cli.runs:compare",
    "logs": "trainflow.flows.cli.logs:logs",
    "tag": "trainflow.flows.cli.runs:tag",
    "sync": "trainflow.flows.cli.sync:sync",
    "serve": "trainflow.flows.cli.schedules:serve",
    "deploy": "trainflow.flows.cli.schedules:deploy",
    "watch": "trainflow.flows.cli.schedules:watch",
    "follow": "trainflow.flows.cli.follow:follow",
    "join": "trainflow.flows.cli.join:join",
    "predict": "trainflow.flows.cli.predicting:predict",
    "models": "trainflow.flows.cli.registry:models",
    "promote": "trainflow.flows.cli.registry:promote",
    "rollback": "trainflow.flows.cli.registry:rollback",
    "lineage": "trainflow.flows.cli.reproduce:lineage",
    "verify": "trainflow.flows.cli.reproduce:verify",
    "reproduce": "trainflow.flows.cli.reproduce:reproduce",
}
_GROUPS = {"checkpoints": "trainflow.flows.cli.checkpoints:app"}


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
    here: dict[str, Any] = {"run": run, "why": why, "ui": ui}
    known = {*here, *_ELSEWHERE, *_GROUPS}
    for name in [wanted] if wanted in known else [*here, *_ELSEWHERE, *_GROUPS]:
        if name in _GROUPS:
            app.add_typer(_load(_GROUPS[name]), name=name)
        else:
            command = here[name] if name in here else _load(_ELSEWHERE[name])
            app.command(name, epilog=epilog(name))(command)
    return app


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the failure's documented code; no traceback unless ``--debug``."""
    if argv is None:
        # At its end the interpreter would walk through every object of Prefect once more.
        atexit.register(gc.freeze)
    given = list(sys.argv[1:] if argv is None else argv)
    # From the words themselves: where a failure is caught, the command's parsed options are out of reach.
    debug, as_json = "--debug" in given, "--json" in given
    try:
        wanted = next((word for word in given if not word.startswith("-")), None)
        with _typed():
            usage_errors.call(application(wanted), given)
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
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        message = "The memory that this process may take is used up."
        remedy = "Raise its limit (ulimit -v, the limit of its container or job); the same command continues."
        raise OutOfMemoryError(message, remedy=remedy) from error


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that no memory is left: not even for the stack of a thread."""
    while error is not None and not (isinstance(error, MemoryError) or "can't start new thread" in str(error)):
        error = error.__context__
    return error is not None


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


def run(
    spec: Spec = None,
    overrides: Overrides = None,
    only: Annotated[str | None, typer.Option(metavar="STAGE", help="Run this stage alone.")] = None,
    start: From = None,
    force: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Run this stage again even if it is committed; repeatable."),
    ] = None,
    from_run: FromRun = None,
    limit: Limit = None,
    debug: Debug = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a pipeline: prepare, train, evaluate, predict, publish. Stages that are committed already are not run again.

    Interrupt it, kill it or pull the plug: the same command continues from the last commit.
    """
    quiet_environment()
    spec, overrides = choose_spec_file(spec, [*(overrides or []), *([] if limit is None else [f"limit={limit}"])])
    parsed = load_spec(spec, overrides, Resolver(), needs_sweep=False)
    if (follower := follower_config(parsed)) is not None:
        # It starts no engine and writes no record.
        follow_leader(follower, terminal.console(stderr=as_json, quiet=quiet))
        return
    from trainflow.flows.planning.plan import Plan
    from trainflow.flows.stages import require_stage

    only, start = require_stage(only, "--only"), require_stage(start, "--from")
    forced = [stage for name in force or [] if (stage := require_stage(name, "--force"))]
    if only or start or from_run:
        # Refused before an engine starts, where what they need is not there.
        Plan.of(parsed, only=only, start=start, from_run=from_run).require_committed()
    given = [str(spec), *overrides]
    chosen = {"--only": only, "--from": start, "--from-run": from_run}
    execute(
        parsed,
        title=presentation.title(parsed, spec),
        # Given again, --force would discard the checkpoints of the forced stage; without it the stage may be cached.
        again=["trainflow", "resume", "--storage", parsed.storage] if forced else _again(given, chosen),
        place=_place_words(spec, overrides),
        debug=debug,
        quiet=quiet,
        as_json=as_json,
        only=only,
        start=start,
        force=forced,
        from_run=from_run,
    )


def _again(given: Sequence[str], chosen: Mapping[str, str | None]) -> list[str]:
    """The command that continues a run: the spec with its overrides, and the options that chose the stages."""
    options = (word for name, value in chosen.items() if value for word in (name, value))
    return ["trainflow", "run", *given, *options]


def _place_words(spec: Path, overrides: Sequence[str]) -> list[str]:
    """The spec, with the overrides that decide where its runs are tracked, as words of a command."""
    sections = ("storage", "tracking", "name", "limit")
    deciding = [text for text in overrides if text.split("=")[0].split(".")[0] in sections]
    return [str(spec), *deciding]


def why(
    spec: Spec = None,
    overrides: Overrides = None,
    start: From = None,
    from_run: FromRun = None,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show for each stage whether its result is committed and intact, and if not, what differs. Runs nothing."""
    from trainflow.flows.planning.plan import Plan

    plan = Plan.of(
        load_spec(*choose_spec_file(spec, overrides), Resolver(), needs_sweep=False), start=start, from_run=from_run
    )
    plan.require_committed()
    reasons, warnings = list(plan.reasons.values()), [each for found in plan.warnings.values() for each in found]
    if as_json:
        stages = [reason.to_dict() for reason in reasons]
        print_json({"ok": True, "exit_code": 0, "stages": stages, "warnings": warnings})
    else:
        terminal.show(presentation.reasons(reasons, warnings), bare=bare)


def ui(
    spec: Annotated[Path | None, typer.Argument(help="A spec; unset: what is in this folder.")] = None,
    overrides: Overrides = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", help="A storage root, instead of a spec.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port on 127.0.0.1; unset: a free one.")] = None,
    debug: Debug = False,
) -> None:
    """Browse the runs in the UIs of MLflow and Prefect, on this machine only, until Ctrl-C."""
    quiet_environment()
    from trainflow.flows.cli.ui import find_place, show

    with _until_stopped():
        show(find_place(spec, overrides or [], storage), port, terminal.console())


@contextlib.contextmanager
def _until_stopped() -> Iterator[None]:
    """End the block quietly on Ctrl-C or SIGTERM: the proper end of a command that serves."""
    with contextlib.suppress(Interrupted, Preempted), stoppable(lambda _: None, remedy=""):
        yield


if __name__ == "__main__":
    main()
