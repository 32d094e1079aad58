"""Build the site strictly: `python -m docs.site [--to FOLDER]`; every warning of Zensical is an error."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.site import command_reference, error_reference, python_reference
from docs.site.gather import ROOT, gather

CONFIG = "zensical.toml"


def write_sources(folder: Path) -> None:
    """Write the pages into an empty folder: those of `docs`, what they link to, and the generated reference."""
    gather(folder)
    reference = folder / "reference"
    reference.mkdir()
    pages = {**python_reference.pages(), **command_reference.pages(), **error_reference.pages()}
    for name, text in pages.items():
        (reference / name).write_text(text, "utf-8")


def check_navigation(nav: list[Any], folder: Path) -> list[str]:
    """Compare the navigation with the pages, which Zensical does not; returns a line for every difference.

    Copies below `repository/` are reached by links, so they may be absent from the navigation.
    """
    listed = list(_list_pages(nav))
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    outside = {name for name in pages.difference(listed) if not name.startswith("repository/")}
    return [
        *(f"{CONFIG}: nav lists {name}, which is no page." for name in listed if name not in pages),
        *(f"{CONFIG}: nav lacks the page {name}." for name in sorted(outside)),
    ]


def _list_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _list_pages(part)


def main() -> int:
    """Write the sources, and build the site from them; returns Zensical's exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build", help="holds docs (the sources) and site")
    to: Path = parser.parse_args().to.resolve()
    write_sources(to / "docs")
    text = (ROOT / CONFIG).read_text("utf-8")
    if differences := check_navigation(tomllib.loads(text)["project"]["nav"], to / "docs"):
        sys.stderr.write("\n".join(differences) + "\n")
        return 1
    # The configuration names build/docs; the copy of it that Zensical reads has paths from its own place.
    config = to / CONFIG
    config.write_text(text.replace('"build/', '"'), "utf-8")
    shutil.rmtree(to / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
