"""The recipe's source closure: every project file that it imports, found without running anything.

The walk starts at the recipe's file and follows import statements through the project's root. Installed packages and
our own are not followed: their versions stand in the keys instead. Each file counts as the digest of its normalised
syntax tree, so comments, formatting and docstrings do not retrain; a docstring counts in a file that reads docstrings.

Imports are looked up below the root, its `src` folder, the recipe's own folder, the folders that code adds to
`sys.path`, and where packages are installed in place. Where a module's name or place is known only at run time, every
Python file below the root belongs to the closure. What no reading sees are files that the code opens: declare them as
`prepare.sources`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import FOLDER, KEPT
from trainflow.tasks.code.project_files import (
    OURS,
    contents_tree,
    find_in_place,
    is_covered,
    parse_or_digest,
    python_files,
    recipe_module,
)
from trainflow.tasks.code.search_paths import Additions, find_additions
from trainflow.tasks.code.syntax import digest_syntax, parse_file, reads_any

_MOST_FILES = 300
"""A package that is installed in place and has more files counts by their bytes, as a whole."""


@dataclass(frozen=True)
class Closure:
    """The files a recipe consists of: path relative to the root -> digest of what the file means."""

    files: dict[str, str]
    unseen: tuple[str, ...] = field(default=())
    """Places where a module is named only at run time, as ``file:line``."""
    unattributed: tuple[str, ...] = field(default=())
    """Places that change the module path by folders which are known only at run time, as ``file:line``."""
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """Size in bytes and time of change (ns) of each file, taken before it was read."""
    trees: dict[str, ast.Module] = field(default_factory=dict, compare=False, repr=False)
    """The syntax tree of each file."""
    paths: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)
    """Where each file lies on this machine."""
    root: Path = field(default_factory=Path, compare=False)
    """The folder that absolute imports start from."""
    places: tuple[Path, ...] = field(default=(), compare=False)
    """All folders that absolute imports may start from."""

    def name_of(self, path: Path) -> str:
        """What a file is called in `files`."""
        absolute = path.absolute()
        return next((name for name, known in self.paths.items() if known == absolute), path.name)

    def joined(self, other: Closure) -> Closure:
        """The files of both."""
        names: dict[str, str] = {}
        for name, path in other.paths.items():
            # Two files outside of the root may go by one name.
            names[name] = name if self.paths.get(name, path) == path else f"{name}~2"
        return Closure(
            {**self.files, **{names[name]: digest for name, digest in other.files.items()}},
            tuple(sorted({*self.unseen, *other.unseen})),
            tuple(sorted({*self.unattributed, *other.unattributed})),
            {**self.marks, **other.marks},
            {**self.trees, **{names[name]: tree for name, tree in other.trees.items()}},
            {**self.paths, **{names[name]: path for name, path in other.paths.items()}},
            self.root,
            tuple(dict.fromkeys((*self.places, *other.places))),
        )

    def is_current(self) -> bool:
        """Whether no file has changed since; a worker reads the files as they are now."""
        return all(_mark(path) == mark for path, mark in self.marks.items())


def closure(recipe: str | Path, root: str | Path | None = None, *, field: str = "recipe") -> Closure:
    """Walk the imports of `recipe` below `root`.

    Raises:
        ConfigError: about `field`: no such Python file, or a file in the walk has a syntax error.
    """
    recipe = Path(recipe).absolute()
    if not recipe.is_file():
        reason = "This is a folder, not a file." if recipe.is_dir() else "There is no such file."
        raise ConfigError(reason, field=field, value=str(recipe), remedy="Give the path of the recipe's Python file.")
    if recipe.suffix != ".py":
        raise ConfigError(
            "A recipe is a Python file.", field=field, value=str(recipe), remedy="Give the path of a .py file."
        )
    walk = _Walk(Path(root).absolute() if root is not None else find_root(recipe), recipe, field)
    walk.visit(recipe)
    return Closure(
        dict(sorted(walk.digests.items())),
        tuple(sorted(walk.unseen)),
        tuple(sorted(walk.unattributed)),
        walk.marks,
        walk.trees,
        walk.paths,
        walk.root,
        tuple(walk.places),
    )


def find_root(recipe: str | Path, spec_folder: Path | None = None) -> Path:
    """Where the recipe's imports start: the nearest with a pyproject.toml, else the spec folder, else its own.

    Around a recipe of trainflow's own there is no project; that of the working directory takes its place.
    """
    folder = Path(recipe).absolute().parent
    folder = Path.cwd() if folder == FOLDER else folder
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").is_file():
            return candidate
    return spec_folder if spec_folder is not None and folder.is_relative_to(spec_folder) else folder


def top_level_names(path: Path) -> set[str] | None:
    """Names that a file defines or imports at its top level; None when a star import hides some of them."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(parse_file(path, "recipe").body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # Its body is left out: names in there are local.
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        # Also below `if`, `try` and `with`: a name defined there is a name of the module.
        waiting.extend(ast.iter_child_nodes(node))
    return None if "*" in names else names


class _Walk:
    """A walk over files; cycles end at files already seen."""

    def __init__(self, root: Path, recipe: Path, field: str) -> None:
        self.root = root
        self.recipe = recipe
        self.field = field
        self.digests: dict[str, str] = {}
        self.unseen: set[str] = set()
        self.unattributed: set[str] = set()
        self.marks: dict[Path, tuple[int, int]] = {}
        self.trees: dict[str, ast.Module] = {}
        self.paths: dict[str, Path] = {}
        # src: a package that is installed in place from there. The recipe's own folder may come from PYTHONPATH.
        self.places: dict[Path, None] = dict.fromkeys((root, root / "src", recipe.parent))
        self._names: dict[Path, str] = {}
        self._additions: dict[Path, Additions] = {}
        # Files that no import statement names need not be Python; those swept up may never be imported.
        self._tolerated: set[Path] = set()
        self._swept: set[Path] = set()
        self._looked_up: set[str] = set()

    def visit(self, first: Path) -> None:
        """Visit a file and all that it imports."""
        waiting, places = [first], 0
        while waiting:
            path = waiting.pop()
            if path not in self._names:
                self._read(path)
                waiting.extend(self._imports(path))
            if not waiting and places != len(self.places):
                # What was read before may be found in a new place.
                places = len(self.places)
                waiting.extend(each for known in list(self._names) for each in self._imports(known))
            if not waiting and (self.unseen or self.unattributed):
                waiting.extend(self._all_files())

    def _read(self, path: Path) -> None:
        name = self._name(path)
        self._names[path] = name
        # Before the read: a change in between then makes the closure stale, not wrong.
        self.marks[path] = _mark(path)
        if path in self._tolerated:
            tree, self.digests[name] = parse_or_digest(path)
        else:
            tree = parse_file(path, self.field)
            self.digests[name] = digest_syntax([tree], keep_docstrings=reads_any(tree))
        self.trees[name] = tree
        self.paths[name] = path
        found = self._additions[path] = find_additions(path, tree)
        if path not in self._swept:
            self.unseen |= {f"{name}:{line}" for line in found.unknown_modules}
            self.unattributed |= {f"{name}:{line}" for line in found.unknown_folders}
        for folder in self._located(path, found.folders):
            if folder.is_dir():
                self.places.setdefault(folder)

    def _name(self, path: Path) -> str:
        """The file's name in keys: from the root, else from the place that it is imported from."""
        if path.parent == FOLDER:  # wherever trainflow is installed
            return f"{KEPT}/{path.name}"
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        if path.parent == self.recipe.parent:
            return path.name
        place = next((each for each in self.places if path.is_relative_to(each)), path.parent)
        name = f"({place.name})/{path.relative_to(place).as_posix()}"
        while name in self.paths:
            name += "~2"
        return name

    def _located(self, path: Path, written: Iterable[str]) -> Iterator[Path]:
        """Where paths of a file may lie; relative ones follow the working directory, which may be any of these."""
        for each in written:
            starts = (self.root, path.parent, Path.cwd()) if not Path(each).is_absolute() else (self.root,)
            yield from dict.fromkeys(Path(os.path.normpath(start / each)) for start in starts)

    def _all_files(self) -> list[Path]:
        """All files below the root, for a module that is known only at run time."""
        found = [path for path in python_files(self.root) if path not in self._names]
        self._tolerated.update(found)
        self._swept.update(found)
        return found

    # -- imports ------------------------------------------------------------------------------------------------------

    def _imports(self, path: Path) -> Iterator[Path]:
        for node in ast.walk(self.trees[self._names[path]]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._absolute(alias.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                yield from self._from(path, node)
        found = self._additions[path]
        for module in found.modules:
            yield from self._absolute(module.split("."))
        for package in found.below:
            yield from self._all_below(package.split("."))
        for file in self._located(path, found.files):
            if file.is_file() and file not in self._names:
                self._tolerated.add(file)
                yield file

    def _from(self, path: Path, node: ast.ImportFrom) -> Iterator[Path]:
        parts = node.module.split(".") if node.module else []
        names = [alias.name for alias in node.names]
        if node.level == 0:
            for name in names:
                yield from self._absolute([*parts, *_submodules(name)])
            if "*" in names and parts[0] not in OURS:
                for place in list(self.places):
                    yield from _siblings(place.joinpath(*parts))
            return
        package = path.parent
        for _ in range(node.level - 1):
            package = package.parent
        own = package / "__init__.py"
        # A relative import runs the package's __init__ as well; the root itself is not a package.
        if package not in (self.root, self.root / "src") and own.is_file():
            yield own
        for name in names:
            yield from self._below(package, [*parts, *_submodules(name)])
        if "*" in names:
            yield from _siblings(package.joinpath(*parts))

    def _absolute(self, parts: list[str]) -> Iterator[Path]:
        if not is_covered(parts):
            return
        own = recipe_module(parts[:3])  # what is behind that is a name in it
        if own is not None:
            found = _module_file(own)
            yield from () if found is None else (found,)
            return
        if not any(_module_file(place / parts[0]) for place in self.places):
            self._look_up(parts[0])
        # The first may hide the others, by an order that only the run knows: all of them count.
        for place in list(self.places):
            yield from self._below(place, parts)

    def _look_up(self, name: str) -> None:
        """Add the place of a package that is installed in place."""
        if name in self._looked_up:
            return
        self._looked_up.add(name)
        place = find_in_place(name)
        if place is None or place in self.places:
            return
        own = python_files(place / name, limit=_MOST_FILES)
        if len(own) > _MOST_FILES and (place / name / "__init__.py") in own:
            self._read_whole(place, name)
        else:
            self.places.setdefault(place)

    def _read_whole(self, place: Path, package: str) -> None:
        """Take a large package as the bytes of its files."""
        files, first = python_files(place / package), place / package / "__init__.py"
        name = f"({place.name})/{package}/__init__.py"
        self.marks |= {each: _mark(each) for each in files}
        self.trees[name], self.digests[name] = contents_tree(files)
        self.paths[name], self._names[first] = first, name
        self._additions[first] = Additions()
        self.places.setdefault(place)
        self._names |= dict.fromkeys(files, name)
        self._additions |= {each: Additions() for each in files}

    def _all_below(self, parts: list[str]) -> Iterator[Path]:
        """All modules of a package, of which one is chosen at run time."""
        if parts[0] in OURS:
            return
        yield from self._absolute(parts)
        for place in list(self.places):
            folder = place.joinpath(*parts)
            yield from python_files(folder) if folder.is_dir() else ()

    def _below(self, place: Path, parts: list[str]) -> Iterator[Path]:
        """The files that importing `parts` from `place` runs: every package's __init__ on the way, then the module."""
        for depth in range(1, len(parts) + 1):
            found = _module_file(place.joinpath(*parts[:depth]))
            if found is not None:
                yield found


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1  # it is gone, or cannot be read
    return status.st_size, status.st_mtime_ns


def _submodules(name: str) -> list[str]:
    return [] if name == "*" else [name]


def _module_file(stem: Path) -> Path | None:
    package = stem / "__init__.py"
    if package.is_file():
        return package
    module = stem.with_name(f"{stem.name}.py")
    return module if module.is_file() else None


def _siblings(package: Path) -> list[Path]:
    """A star import may take in any module of a package (`__all__` decides at run time): count them all."""
    return sorted(package.glob("*.py")) if package.is_dir() else []
