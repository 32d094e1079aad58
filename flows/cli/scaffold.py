"""`trainflow init` and `trainflow schema`: a new project, and what an editor needs to know of its spec."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from flows.cli import terminal
from flows.cli.completion import complete_recipe
from flows.cli.options import Debug, Json, Quiet, print_json
from trainer_lib.recipe_names import ABOUT


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
    from flows.new_project.starting import write_project

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
    from flows.spec.schema import spec_schema
    from trainer_lib.errors import StorageError

    text = json.dumps(spec_schema(), indent=1)
    if to is None:
        typer.echo(text)
        return
    try:
        to.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        what = f"The file cannot be written: {error.strerror}."
        raise StorageError(what, field="--to", value=str(to), remedy="Give a file that you may write.") from error
