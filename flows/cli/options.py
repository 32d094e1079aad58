"""Arguments and options that several commands share, and how they answer in JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainflow.flows.cli.completion import complete_override

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
From = Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Run from this stage on.")]
FromRun = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Take the stages before --from from this earlier run (its id in the storage's runs/, or its MLflow run); "
        "without --from the stage that failed in it is the first.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", help="Check the whole pipeline on N rows of each split, apart from real results."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's own log.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but warnings and failures.")]
Bare = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show the result alone: no heading, no notes, no progress, no empty lines."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, everything else on stderr.")]


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON object to standard output."""
    # default=str: a record may hold paths.
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
