"""A project whose sources several workers prepare, and what they have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCES = 24
RECIPE = '''
"""Rows of numbered sources, and a line in a file for each call."""
import os
import time


def list_sources(options, out):
    return list(range(options["sources"]))


def prepare_shard(source, options):
    time.sleep(options["seconds"])
    if source == options.get("bad"):
        raise KeyError("gone")
    with open(options["log"], "a") as log:
        log.write(f"{source} {os.getpid()}\\n")
    return {"train": [{"x": [float(source), float(n)]} for n in range(20)], "test": [{"x": [0.0, float(source)]}]}


def build_model(options, data): ...
'''


def project(folder: Path, seconds: float = 0.0, **options: Any) -> Path:
    """Write a recipe with `SOURCES` sources that take so long each, and a spec, into a new folder."""
    folder.mkdir()
    (folder / "recipe.py").write_text(RECIPE)
    spec = {
        "name": "shared",
        "recipe": "recipe.py",
        "storage": str(folder / "store"),
        "tracking": {"enabled": False},
        "prepare": {
            "shard_rows": 8,
            "options": {"sources": SOURCES, "seconds": seconds, "log": str(folder.parent / "calls"), **options},
        },
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))  # JSON is YAML
    return folder


def data_of(storage: Path) -> dict[str, bytes]:
    """The prepared data, by its path from the storage; the key is part of that."""
    stages = storage / "stages" / "prepare-data"
    files = [*stages.glob("*/data/**/*"), *stages.glob("*/data.json"), *stages.glob("*/statistics.json")]
    return {str(path.relative_to(storage)): path.read_bytes() for path in sorted(files) if path.is_file()}


def calls(folder: Path) -> list[int]:
    """The sources that workers have prepared, in the order of the calls."""
    return [int(line.split()[0]) for line in (folder / "calls").read_text().splitlines()]
