"""Python files of a project that no import statement names, and packages that are used from where they are edited."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import FOLDER
from trainflow.tasks.code.syntax import digest_syntax, parse_file, reads_any

OURS = {"trainer_lib", "trainflow"}
_INSTALLED = {"site-packages", "dist-packages"}
_SKIPPED = _INSTALLED | {"__pycache__", "build", "dist", "env", "mlruns", "node_modules", "outputs", "venv", "wandb"}
# A storage below the project keeps copies of each run's sources.
_STORAGE = {"runs", "stages"}


_RECIPES = ("trainer_lib", "recipes")


def is_covered(parts: Sequence[str]) -> bool:
    """Whether keys follow an import of this module: not into our own code, but into trainflow's recipes."""
    return not parts or parts[0] not in OURS or (tuple(parts[:2]) == _RECIPES and len(parts) > 2)


def recipe_module(parts: Sequence[str]) -> Path | None:
    """The path without ending of a module of trainflow's recipes (`trainer_lib.recipes.x`); None for any other."""
    return FOLDER.joinpath(*parts[2:]) if tuple(parts[:2]) == _RECIPES else None


def find_in_place(name: str) -> Path | None:
    """The folder above a package or module that is imported from where it is edited; None for one that is not.

    So are packages on PYTHONPATH, and those that `pip install -e` links. A worker has the variables and the
    environment of this process, but not its working directory.

    Args:
        name: a top-level name.
    """
    if name in OURS or name in sys.stdlib_module_names:
        return None
    own = {"", str(Path.cwd())} - set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    found = PathFinder.find_spec(name, [place for place in sys.path if place not in own])
    for finder in sys.meta_path:
        # The finder of an editable package is a class in a module of this name.
        if found is None and getattr(finder, "__module__", "").startswith("__editable__"):
            found = finder.find_spec(name, None)
    place = _place_of(found) if found is not None else None
    return place if place is not None and not _INSTALLED & set(place.parts) else None


def _place_of(spec: ModuleSpec) -> Path | None:
    if spec.origin is None or not spec.origin.endswith(".py"):
        # Folders without an __init__: the first that holds a module.
        folders = [Path(each) for each in spec.submodule_search_locations or ()]
        return next((each.parent for each in folders if any(each.glob("*.py"))), None)
    module = Path(spec.origin)
    return module.parent.parent if module.name == "__init__.py" else module.parent


def python_files(folder: Path, *, limit: int | None = None) -> list[Path]:
    """The Python files below a folder, without installed packages, environments, storages and our own packages.

    Args:
        limit: stop after this many.
    """
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files or set(folders) >= _STORAGE:
            folders.clear()
            continue
        ours = OURS if Path(place) == folder else set()
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _SKIPPED | ours)
        found += [Path(place, each) for each in sorted(files) if each.endswith(".py")]
        if limit is not None and len(found) > limit:
            break
    return found


def parse_or_digest(path: Path) -> tuple[ast.Module, str]:
    """The syntax tree of a file and its digest; of a file that is not Python a tree that stands for its bytes."""
    try:
        tree = parse_file(path, "recipe")
    except ConfigError:
        return contents_tree([path])
    return tree, digest_syntax([tree], keep_docstrings=reads_any(tree))


def contents_tree(paths: Iterable[Path]) -> tuple[ast.Module, str]:
    """A syntax tree that stands for the bytes of files, and their digest: it counts for every stage that runs it."""
    digest = hashlib.sha256()
    for part in _digests(paths):
        digest.update(part)
    text = digest.hexdigest()
    return ast.parse(f"contents({text!r})"), text


def _digests(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        try:
            yield hashlib.sha256(path.read_bytes()).digest()
        except OSError:
            yield b"unreadable"
