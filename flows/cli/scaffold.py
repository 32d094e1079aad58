"""`trainflow init` and `trainflow schema`: a new project, and what an editor needs to know of its spec."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from trainer_lib.protocol.recipe_names import ABOUT
from trainflow.flows.cli import terminal
from trainflow.flows.cli.completion import complete_recipe
from trainflow.flows.cli.options import Debug, Json, Quiet, print_json


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="A new folder; its name is the pipeline's.")],
    recipe: Annotated[
        str,
        typer.Option(help=f"One of trainflow's own recipes: {', '.join(ABOUT)}.", autocompletion=complete_recipe),
    ] = "tabular-classification",
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a new project: a spec, small real data, a test and a README, ready to run offline."""
    from trainflow.flows.new_project.starting import write_project

    files = write_project(name, recipe)
    spec = shlex.quote(str(files[0]))
    if as_json:
        record = {"spec": str(files[0]), "files": [str(file) for file in files], "next": f"trainflow run {spec}"}
        print_json({"ok": True, "exit_code": 0, **record})
        return
    listed = "".join(f"  {file}\n" for file in files)
    terminal.console(quiet=quiet).print(f"{listed}\n  next: trainflow run {spec}")


def schema(
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write it to a file instead.")] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of a spec, by which editors complete and check it.

    In the spec's first line: # yaml-language-server: $schema=schema.json
    """
    from trainer_lib.errors import StorageError
    from trainflow.flows.spec.schema import spec_schema

    text = json.dumps(spec_schema(), indent=1)
    if to is None:
        typer.echo(text)
        return
    try:
        to.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        what = f"The file cannot be written: {error.strerror}."
        raise StorageError(what, field="--to", value=str(to), remedy="Give a file that you may write.") from error
