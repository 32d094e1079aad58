"""The command `trainflow prove-resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_lib.errors import NotReproducibleError
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Debug, Json, Overrides, Quiet, Spec, print_json
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.spec_choice import choose_spec_file
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import load_spec


def prove_resume(
    spec: Spec = None,
    overrides: Overrides = None,
    at: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Stop after this step; between two saves if unset.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, metavar="N", help="Train N steps instead of the spec's.")] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Stop by SIGKILL: resume from the last save.")] = False,
    keep: Annotated[str | None, typer.Option(metavar="URL", help="Keep the runs' files there.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outcome as JSON.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train twice, once stopped and resumed, and compare every step and every byte. Exit code 20 if they differ.

    The proof has a storage of its own; it leaves the pipeline's storage, MLflow and hubs alone.
    """
    quiet_environment()
    parsed = load_spec(*choose_spec_file(spec, overrides), needs_sweep=False)
    # After the spec is read: a mistake in it is shown before Prefect is imported.
    from trainflow.flows.planning.prove_resume import Question, describe_record, prove, write_record

    out = terminal.console(stderr=as_json, quiet=quiet)
    question = Question(at=at, steps=steps, kill=kill, keep=keep)
    with stoppable(out.print, remedy="Nothing was committed; run it again."):
        record = prove(parsed, question, lambda text: out.print(f"{parsed.name}: {text}"))
    if output is not None:
        write_record(record, output)
    if as_json:
        same = record["verdict"] == "equal"
        code = 0 if same else NotReproducibleError.exit_code
        print_json({"ok": same, "exit_code": code, "proof": record})  # whole, so that its seal holds
        raise typer.Exit(code)
    if not quiet or record["verdict"] != "equal":
        terminal.show(describe_record(record))
