"""Build the site strictly: `python -m docs.site [--to FOLDER]`; every warning of MkDocs is an error."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from docs.site import command_reference, error_reference, python_reference
from docs.site.gather import ROOT, gather


def write_sources(folder: Path) -> None:
    """Write the pages into an empty folder: those of `docs`, what they link to, and the generated reference."""
    gather(folder)
    reference = folder / "reference"
    reference.mkdir()
    pages = {**python_reference.pages(), **command_reference.pages(), **error_reference.pages()}
    for name, text in pages.items():
        (reference / name).write_text(text, "utf-8")


def main() -> int:
    """Write the sources, and build the site from them; returns MkDocs' exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build", help="holds docs (the sources) and site")
    to: Path = parser.parse_args().to.resolve()
    write_sources(to / "docs")
    # The configuration names build/docs; for another place a copy of it is written, which MkDocs reads paths from.
    config = to / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    config.write_text(text.replace(": build/", ": "), "utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(config)]
    # Set: the theme does not advertise its successor.
    return subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
