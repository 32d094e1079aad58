"""The commands `trainflow checkpoints list | verify | prune | import`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trainer_lib.errors import ConfigError, DamagedError
from trainflow.flows.cli import terminal
from trainflow.flows.cli.examples import epilog
from trainflow.flows.cli.options import Bare, Debug, Json, Quiet, print_json
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.signals import stoppable

if TYPE_CHECKING:
    from trainer_lib.protocol.requests import ImportResult, RecipeFile

app = typer.Typer(help="List, verify, prune and import checkpoints, wherever they are.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(metavar="URL", help="A checkpoints folder, a stage's folder, or a storage.")]


@app.command("list", epilog=epilog("checkpoints list"))
def list_(url: Url, bare: Bare = False, as_json: Json = False, debug: Debug = False) -> None:
    """List checkpoints, newest first: step, time, size and state. Sizes are compared, bytes are not read (verify)."""
    from trainflow.flows.cli import inventory

    found = inventory.find(url)
    if as_json:
        print_json({"ok": True, "exit_code": 0, "checkpoints": [entry.to_dict() for entry in found]})
    else:
        terminal.show(inventory.listing(found)[1 if bare else 0 :])


@app.command(epilog=epilog("checkpoints verify"))
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint, or a folder of them.")],
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read every byte of committed checkpoints and compare sizes and digests. Exit code 16 if one is damaged."""
    from trainflow.flows.cli import inventory

    found = inventory.find(url)
    total = sum(entry.bytes for entry in found if entry.info is not None)
    # Read in full before anything is printed: the JSON form is one object.
    with terminal.reading(terminal.console(stderr=True), total, quiet=quiet or as_json) as on_read:
        problems = inventory.damage(found, on_read)
    if as_json:
        code = DamagedError.exit_code if any(problems.values()) else 0
        print_json({"ok": not code, "exit_code": code, "checkpoints": problems})
        raise typer.Exit(code)
    lines = inventory.intact_lines(problems)
    terminal.show([] if quiet else lines)


@app.command(epilog=epilog("checkpoints prune"))
def prune(
    url: Url,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of committed checkpoints to keep.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the oldest checkpoints beyond N, and what interrupted saves left.

    Never the best, the newest good one (every byte of it is read), one being read or written, or another program's.
    Those that were set aside as damaged stay for you to look at.
    """
    from trainflow.flows.cli import inventory

    doomed = inventory.victims(inventory.find(url), keep)
    records = {victim.entry.url: victim.to_dict() for victim in doomed}  # while they can still be measured
    if not dry_run:
        doomed = inventory.remove(doomed)
    removed = [records[victim.entry.url] for victim in doomed]
    if as_json:
        freed = sum(record["bytes"] for record in removed)
        print_json({"ok": True, "exit_code": 0, "dry_run": dry_run, "removed": removed, "bytes": freed})
    elif not quiet:
        terminal.show(inventory.pruned(removed, dry_run=dry_run))


@app.command("import", epilog=epilog("checkpoints import"))
def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint-N folder of the transformers Trainer.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="The folder of checkpoints to resume in.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="A function of yours that returns the model as it was trained."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Import a checkpoint that the transformers Trainer wrote: weights, optimizer, schedule, log.

    No code in it is run: pickles go through a reader that makes only tensors and numbers; training_args.bin is never
    opened. Resume with output_dir=DESTINATION and resume_from_checkpoint=True.
    """
    from trainer_lib.base.records import to_record
    from trainer_lib.launch import LaunchConfig, launch
    from trainer_lib.protocol.requests import ImportRequest
    from trainer_lib.storage import Store

    recipe, function = _function(model) if model is not None else (None, None)
    request = ImportRequest(
        output=Store.open(destination, field="destination").url,
        source=Store.open(source, field="source").url,
        recipe=recipe,
        model=function,
        debug=debug,
    )
    out = terminal.console(stderr=True, quiet=quiet)
    with stoppable(out.print, remedy="Nothing was committed; run it again."), out.status("importing"):
        result = launch(
            request,
            LaunchConfig(kind="process", processes=1),
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},  # nothing that the folder names is fetched
            on_line=lambda line: out.print(line, style="dim"),
            on_event=lambda event: None,
        )
    if as_json:
        print_json({"ok": True, "exit_code": 0, **to_record(result)})
    elif not quiet:
        terminal.show(_imported(result, destination))


def _function(text: str) -> tuple[RecipeFile, str]:
    """The file and the function that ``FILE.py:FUNCTION`` names."""
    from trainer_lib.protocol.requests import RecipeFile

    # From the right: the path itself may hold a colon.
    path, _, name = text.rpartition(":")
    file = Path(path).expanduser().absolute()
    if not name.isidentifier() or not file.is_file():
        raise ConfigError(
            "This file does not exist."
            if name.isidentifier() and path
            else "This is not of the form FILE.py:FUNCTION.",
            field="--model",
            value=text,
            remedy="Write for example --model train.py:build_model, a function without arguments.",
        )
    return RecipeFile(str(file), str(file.parent)), name


def _imported(result: ImportResult, destination: str) -> list[Text]:
    from trainflow.flows.records.sizes import describe_bytes

    left_out = ", ".join(result.left_out) or "nothing"
    return [
        Text(f"imported  step {result.step}, {result.parameters} parameters, {describe_bytes(result.bytes)}", "green"),
        Text(f"  where     {shown(result.url)}"),
        Text(f"  left out  {left_out}"),
        *(Text(f"  note      {note}") for note in result.notes),
        Text(f"  resume    output_dir={shlex.quote(destination)} resume_from_checkpoint=True"),
    ]
