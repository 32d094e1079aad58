"""The recipe's source closure: every project file that it imports, found without running anything.

The walk starts at the recipe's file and follows import statements through the project's root. Installed packages and
our own are not followed: their versions stand in the keys instead. Each file counts as the digest of its normalised
syntax tree, so comments, formatting and docstrings do not retrain; a docstring counts in a file that reads docstrings.

Imports are looked up below the root, its `src` folder, the recipe's own folder, and where packages are installed in
place. Where a file changes `sys.path`, they are looked up in every folder below the root, and in those around it that
the texts of the file name. Where code names a module at run time, every Python file below the root belongs to the
closure. What no reading sees are files that the code opens: declare them as `prepare.sources`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from trainer_lib.base.paths import expand_home
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import FOLDER, KEPT
from trainflow.tasks.code.syntax import (
    KEPT_FILES,
    ImportTarget,
    digest_syntax,
    import_targets,
    module_names,
    parse_file,
    reads_docstrings,
)

OURS = {"trainer_lib", "trainflow"}
_RECIPES = ("trainer_lib", "recipes")
_INSTALLED = {"site-packages", "dist-packages"}
_SKIPPED = _INSTALLED | {"__pycache__", "build", "dist", "env", "mlruns", "node_modules", "outputs", "venv", "wandb"}
# A storage below the project keeps copies of each run's sources.
_STORAGE = {"runs", "stages"}
_MOST_FILES = 300  # a package that is installed in place and has more files counts by their bytes, as a whole
_LOADERS = {"__import__", "eval", "exec", "imp", "importlib", "pkgutil", "pydoc", "runpy", "zipimport"}
"""Modules and builtins that import by a name that may be made at run time."""
_FACTS = ("importlib.metadata", "importlib.resources", "importlib.util.find_spec")  # parts of these that only look
_LOADS = {"exec_module", "load_module"}  # methods that import what such a look found
_MODULE_PATH = {"site", "site.addsitedir", "sys", "sys.path"}
"""Names that lead to the module path, the modules themselves where they are handed on."""
_LEVELS_AROUND = 3  # so many folders around the root may hold those that a file adds to the module path


@dataclass
class Closure:
    """The files a recipe consists of: path relative to the root -> digest of what the file means."""

    files: dict[str, str] = field(default_factory=dict)
    unseen: bool = False  # whether code names a module only at run time
    swept: set[str] = field(default_factory=set)
    """Files that no import statement names, which code may import by a name that it makes."""
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """Size in bytes and time of change (ns) of each file, taken before it was read."""
    trees: dict[str, ast.Module] = field(default_factory=dict, compare=False, repr=False)
    """The syntax tree of each file."""
    paths: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)  # paths of files on this machine
    root: Path = field(default_factory=Path, compare=False)  # the folder that absolute imports start from
    places: dict[Path, None] = field(default_factory=dict, compare=False)
    """All folders that absolute imports may start from, in their order."""

    def name_of(self, path: Path) -> str:
        """A file's name in `files`."""
        absolute = path.absolute()
        return next((name for name, known in self.paths.items() if known == absolute), path.name)

    def is_current(self) -> bool:
        """Whether no file has changed since; a worker reads the files as they are now."""
        return all(_mark(path) == mark for path, mark in self.marks.items())


def closure(
    recipe: str | Path, root: str | Path | None = None, *, fallback: str | Path | None = None, field: str = "recipe"
) -> Closure:
    """Walk the imports of `recipe` below `root`, and those of `fallback`, which has what `recipe` does not define.

    Raises ConfigError, about `field`, where one is not a Python file, or a file in the walk has a syntax error.
    """
    recipes = [Path(path).absolute() for path in (recipe, fallback) if path is not None]
    for path in recipes:
        if not path.is_file():
            reason = "This is a folder, not a file." if path.is_dir() else "There is no such file."
            raise ConfigError(reason, field=field, value=str(path), remedy="Give the path of the recipe's Python file.")
        if path.suffix != ".py":
            what = "A recipe is a Python file."
            raise ConfigError(what, field=field, value=str(path), remedy="Give the path of a .py file.")
    walk = _Walk(Path(root).absolute() if root is not None else find_root(recipes[0]), recipes, field)
    walk.visit()
    walk.found.files = dict(sorted(walk.found.files.items()))
    return walk.found


def find_root(recipe: str | Path, spec_folder: Path | None = None) -> Path:
    """The folder that imports start from: the nearest with a pyproject.toml, else the spec folder, else the recipe's.

    Around a recipe of trainflow's own there is no project; that of the working directory takes its place.
    """
    folder = Path(recipe).absolute().parent
    folder = Path.cwd() if folder == FOLDER else folder
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file():
            return candidate
    return spec_folder if spec_folder is not None and folder.is_relative_to(spec_folder) else folder


def is_covered(parts: Sequence[str]) -> bool:
    """Whether keys follow an import of this module: not into our own code, but into trainflow's recipes."""
    return not parts or parts[0] not in OURS or (tuple(parts[:2]) == _RECIPES and len(parts) > 2)


def recipe_module(parts: Sequence[str]) -> Path | None:
    """The path without ending of a module of trainflow's recipes (`trainer_lib.recipes.x.y`); None for any other."""
    return FOLDER.joinpath(*parts[2:]) if tuple(parts[:2]) == _RECIPES else None


class _Walk:
    """A walk over files; cycles end at files already seen."""

    def __init__(self, root: Path, recipes: Sequence[Path], field: str) -> None:
        self._field = field
        # src: a package that is installed in place from there. The recipe's own folder may come from PYTHONPATH.
        places = dict.fromkeys((root, root / "src", *(recipe.parent for recipe in recipes)))
        self.found = Closure(root=root, places=places)
        self._root, self._places = root, places
        self._recipes = recipes
        self._imports: dict[Path, list[ImportTarget]] = {}
        # Folders below the root by the name of a module or package in them, once the module path is changed.
        self._anywhere: dict[str, set[Path]] | None = None
        self._looked_up: set[str] = set()
        self._named: list[Path] = []

    def visit(self) -> None:
        """Visit the recipes and all that they import."""
        waiting, places = list(self._recipes), len(self._places)
        while waiting:
            path = waiting.pop()
            if path not in self._imports:
                self._read(path, parse_file(path, self._field))
                waiting.extend(self._imported(path))
            if not waiting and self.found.unseen:
                waiting.extend(self._sweep())
            if not waiting and places != len(self._places):
                # What was looked up before may be in a new place.
                places = len(self._places)
                waiting.extend(file for known in list(self._imports) for file in self._imported(known))

    def _imported(self, path: Path) -> list[Path]:
        return [file for target in self._imports[path] for file in self._files(path, target)]

    def _read(self, path: Path, tree: ast.Module) -> None:
        name = self._name(path)
        # Before the digest: a change in between then makes the closure stale, not wrong.
        self.found.marks[path] = _mark(path)
        self.found.files[name] = _digest(tree)
        self.found.trees[name], self.found.paths[name] = tree, path
        self._imports[path] = [target for _, target in _bound_imports(tree)]
        uses, makes_names = _dotted_uses(tree), _makes_names(tree)
        self.found.unseen = self.found.unseen or makes_names
        changes_path = any(use in _MODULE_PATH or use.startswith("sys.path.") for use in uses)
        if changes_path and self._anywhere is None:
            self._anywhere = _index(self._root)
        if changes_path or makes_names:
            for place in self._around(path, tree):
                if place.is_dir():
                    self._places[place] = None
                else:
                    self._named.append(place)

    def _sweep(self) -> list[Path]:
        """Take all files below the root, for a module that is known only at run time; some may not be Python."""
        taken = [path for path in (*python_files(self._root), *self._named) if path not in self._imports]
        for path in taken:
            try:
                tree = parse_file(path, self._field)
            except ConfigError:
                tree = _contents_tree([path])
            self._read(path, tree)
            self.found.swept.add(self._name(path))
        return [file for path in taken for file in self._imported(path)]

    def _name(self, path: Path) -> str:
        """The file's name in keys: from the root, else from the place that it is imported from."""
        known = next((name for name, other in self.found.paths.items() if other == path), None)
        if known is not None:
            return known
        if FOLDER in path.parents:  # wherever trainflow is installed
            return f"{KEPT}/{path.relative_to(FOLDER).as_posix()}"
        if path.is_relative_to(self._root):
            return path.relative_to(self._root).as_posix()
        around = [place for place in self._places if path.is_relative_to(place)]
        place = max(around, key=lambda place: len(place.parts), default=path.parent)
        name = f"({place.name})/{path.relative_to(place).as_posix()}"
        if path.parent == self._recipes[0].parent:
            name = path.name
        while name in self.found.paths:
            name += "~2"
        return name

    def _around(self, path: Path, tree: ast.Module) -> list[Path]:
        """Folders and Python files outside of the root that the texts of a file may name."""
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
        texts += [part for text in texts for part in os.environ.get(text or "=", "").split(os.pathsep)]
        starts = {*self._root.parents[:_LEVELS_AROUND], *path.parents[: 2 * _LEVELS_AROUND], Path.cwd()}
        found = sorted(start for start in starts if start.name)
        for text in texts:
            if 0 < len(text) < 200 and text.isprintable():
                # Parts of a path may be joined one by one.
                named = expand_home(text)
                joined = [Path(os.path.normpath(folder / named)) for folder in found]
                found += [place for place in joined if place.is_dir() or (place.suffix == ".py" and place.is_file())]
                found = list(dict.fromkeys(found))
        return [place for place in found if not place.is_relative_to(self._root)]

    # -- imports ------------------------------------------------------------------------------------------------------

    def _files(self, path: Path, target: ImportTarget) -> Iterator[Path]:
        """The files that importing `target` in the file `path` runs."""
        parts = target.module.split(".") if target.module else []
        names = [target.name] if target.name not in (None, "*") else []
        if target.level:
            package = path.parents[target.level - 1]
            initial = package / "__init__.py"
            # A relative import runs the package's __init__ as well; the root itself is not a package.
            if package not in (self._root, self._root / "src") and initial.is_file():
                yield initial
            places = [package]
        elif not is_covered([*parts, *names]):
            return
        elif (ours := recipe_module([*parts, *names])) is not None:
            # The longest part that is a module: what is behind it is a name in that.
            inside = (stem for stem in (ours, *ours.parents) if FOLDER in stem.parents)
            yield from list(filter(None, map(_module_file, inside)))[:1]
            return
        else:
            self._look_up(parts[0])
            # The first may hide the others, by an order that only the run knows: all of them count.
            places = list(self._places)
        for place in places:
            for depth in range(1, len(parts) + len(names) + 1):
                module = _module_file(place.joinpath(*[*parts, *names][:depth]))
                if module is not None:
                    yield module
            if target.name == "*" and place.joinpath(*parts).is_dir():
                # It may take in any module of a package: `__all__` decides at run time.
                yield from sorted(place.joinpath(*parts).glob("*.py"))

    def _look_up(self, name: str) -> None:
        """Add the places of a top-level module that are not known yet."""
        if self._anywhere is not None:
            self._places |= dict.fromkeys(sorted(self._anywhere.pop(name, ())))
        if name in self._looked_up or any(_module_file(place / name) for place in self._places):
            return
        self._looked_up.add(name)
        place = find_in_place(name)
        if place is None:
            return
        files, first = python_files(place / name, limit=_MOST_FILES), place / name / "__init__.py"
        if len(files) > _MOST_FILES and first in files and place not in self._places:
            # As the bytes of its files.
            files = python_files(place / name)
            self._places[place] = None
            self._read(first, _contents_tree(files))
            self.found.marks |= {file: _mark(file) for file in files}
            self._imports |= {file: [] for file in files}
        self._places[place] = None


@functools.lru_cache(KEPT_FILES)
def _digest(tree: ast.Module) -> str:
    return digest_syntax([tree], keep_docstrings=reads_docstrings(tree))


@functools.lru_cache(KEPT_FILES)
def _bound_imports(tree: ast.Module) -> tuple[tuple[str, ImportTarget], ...]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return tuple(pair for node in imports for pair in import_targets(node))


@functools.lru_cache(KEPT_FILES)
def _makes_names(tree: ast.Module) -> bool:
    return any(use.partition(".")[0] in _LOADERS and not use.startswith(_FACTS) for use in _dotted_uses(tree)) or any(
        isinstance(node, ast.Attribute) and node.attr in _LOADS for node in ast.walk(tree)
    )


@functools.lru_cache(KEPT_FILES)
def _dotted_uses(tree: ast.Module) -> frozenset[str]:
    """The names that a file uses, as dotted names of what they import."""
    bound: dict[str, set[str]] = {}
    for name, target in _bound_imports(tree):
        module = target.top if target.is_top else target.module
        bound.setdefault(name, set()).add(module if target.name is None else f"{module}.{target.name}")
    chains = set(module_names(tree))
    return frozenset(".".join((head, *chain[1:])) for chain in chains for head in bound.get(chain[0], (chain[0],)))


def _index(root: Path) -> dict[str, set[Path]]:
    """The folders below the root that hold a module or a package, by its name."""
    found: dict[str, set[Path]] = {}
    for file in python_files(root):
        found.setdefault(file.stem, set()).add(file.parent)
        for folder in file.parents:
            if folder == root:
                break
            found.setdefault(folder.name, set()).add(folder.parent)
    return found


def find_in_place(name: str) -> Path | None:
    """The folder above a top-level package or module that is imported from where it is edited; None for any other.

    Those are packages on PYTHONPATH, and what `pip install -e` links. A worker has the variables and the environment of
    this process, but not its working directory.
    """
    if name in OURS or name in sys.stdlib_module_names:
        return None
    own = {"", str(Path.cwd())} - set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    spec = PathFinder.find_spec(name, [place for place in sys.path if place not in own])
    for finder in sys.meta_path:
        # The finder of an editable package is a class in a module of this name.
        if spec is None and getattr(finder, "__module__", "").startswith("__editable__"):
            spec = finder.find_spec(name, None)
    if spec is None:
        return None
    if spec.origin is None or not spec.origin.endswith(".py"):
        # Folders without an __init__: the first that holds a module.
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        place = next((folder.parent for folder in folders if any(folder.glob("*.py"))), None)
    else:
        module = Path(spec.origin)
        place = module.parents[1] if module.name == "__init__.py" else module.parent
    return None if place is None or _INSTALLED & set(place.parts) else place


def python_files(folder: Path, *, limit: int | None = None) -> list[Path]:
    """The Python files below a folder, without installed packages, environments, storages and our own packages.

    The search stops after `limit` files.
    """
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files or set(folders) >= _STORAGE:
            folders.clear()
            continue
        ours = OURS if Path(place) == folder else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED | ours)
        found += [Path(place, name) for name in sorted(files) if name.endswith(".py")]
        if limit is not None and len(found) > limit:
            break
    return found


def _contents_tree(paths: Iterable[Path]) -> ast.Module:
    """A syntax tree that stands for the bytes of files: it counts for every stage."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            digest.update(b"unreadable")
    return ast.parse(f"contents({digest.hexdigest()!r})")


def _module_file(stem: Path) -> Path | None:
    package = stem / "__init__.py"
    if package.is_file():
        return package
    module = stem.with_name(f"{stem.name}.py")
    return module if module.is_file() else None


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1  # it is gone, or cannot be read
    return status.st_size, status.st_mtime_ns
