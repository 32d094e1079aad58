"""The repository as data: its folders, sources and metadata, for the tests that keep its rules."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("trainflow", "flows", "tasks", "trainer_lib")


def sources(*folders: str) -> Iterator[Path]:
    """Every Python file below the folders (the three houses when none is named), in order."""
    for folder in folders or HOUSES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def relative(path: Path) -> str:
    """A file's name from the repository's root, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages() -> set[str]:
    """Dotted names of the folders that hold an `__init__.py`."""
    inits = (init for house in HOUSES for init in (ROOT / house).rglob("__init__.py"))
    return {_dotted(init.parent) for init in inits}


def _dotted(path: Path) -> str:
    """The name by which a file or folder is imported: `trainflow` has links to the houses `flows` and `tasks`."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"trainflow.{name}" if name.split(".")[0] in ("flows", "tasks") else name


def modules(package: str) -> list[str]:
    """Dotted names of a package's modules, itself first, `__main__` left out."""
    names = []
    for path in sources():
        dotted = _dotted(path).removesuffix(".__init__")
        if (dotted == package or dotted.startswith(f"{package}.")) and path.stem != "__main__":
            names.append(dotted)
    return names
