"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click

from trainflow.flows.cli.main import application


def pages() -> dict[str, str]:
    """Return the page, by its file name."""
    command = typer.main.get_command(application())
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="trainflow"), name="trainflow")
    text = text.replace("# `trainflow`", "# Commands", 1)
    # The list of all commands, which comes first, links to each.
    first, each = text.split("\n## ", 1)
    first = re.sub(r"^\* `([a-z][a-z-]+)`: ", r"* [`\1`](#trainflow-\1): ", first, flags=re.MULTILINE)
    return {"commands.md": f"{first}\n## {each}".replace("docs/failures.md", "[failures](../failures.md)")}
