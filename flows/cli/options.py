"""Options that several commands share, and how they answer in JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's own log.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, everything else on stderr.")]


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON object to standard output."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
