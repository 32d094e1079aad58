"""The recipe's source closure: every project file that it imports, found without running anything.

The walk starts at the recipe's file and follows import statements through the project's root. Installed packages and
our own are not followed: their versions stand in the keys instead. Each file counts as the digest of its normalised
syntax tree, so comments, formatting and docstrings do not retrain; a docstring counts in a file that reads docstrings.

What it cannot see: modules named at run time (`import_module(variable)`) and files that the code opens. Declare such
files as `prepare.sources`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.stage.syntax import digest_syntax, parse_file, reads_docstrings
from trainer_lib.errors import ConfigError

# A change of trainer_lib that changes numbers raises `keys.NUMERICS` instead.
OURS = {"flows", "tasks", "trainer_lib"}


@dataclass(frozen=True)
class Closure:
    """The files a recipe consists of: path relative to the root -> digest of what the file means."""

    files: dict[str, str]
    unseen: tuple[str, ...] = field(default=())
    """Places where a module is named only at run time, as ``file:line``."""
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """Size in bytes and time of change (ns) of each file, taken before it was read."""
    trees: dict[str, ast.Module] = field(default_factory=dict, compare=False, repr=False)
    """The syntax tree of each file."""
    paths: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)
    """Where each file lies on this machine."""
    root: Path = field(default_factory=Path, compare=False)
    """The folder that absolute imports start from."""

    def name_of(self, path: Path) -> str:
        """What a file is called in `files`."""
        absolute = path.absolute()
        return next((name for name, known in self.paths.items() if known == absolute), path.name)

    def joined(self, other: Closure) -> Closure:
        """The files of both."""
        return Closure(
            {**self.files, **other.files},
            tuple(sorted({*self.unseen, *other.unseen})),
            {**self.marks, **other.marks},
            {**self.trees, **other.trees},
            {**self.paths, **other.paths},
            self.root,
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
    walk = _Walk(Path(root).absolute() if root is not None else find_root(recipe), field)
    walk.visit(recipe)
    found = dict(sorted(walk.digests.items()))
    return Closure(found, tuple(sorted(walk.unseen)), walk.marks, walk.trees, walk.paths, walk.root)


def find_root(recipe: str | Path, spec_folder: Path | None = None) -> Path:
    """Where the recipe's imports start: the nearest with a pyproject.toml, else the spec folder, else its own."""
    folder = Path(recipe).absolute().parent
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
    """A depth-first walk over files; cycles end at files already seen."""

    def __init__(self, root: Path, field: str) -> None:
        self.root = root
        self.field = field
        self.digests: dict[str, str] = {}
        self.unseen: list[str] = []
        self.marks: dict[Path, tuple[int, int]] = {}
        self.trees: dict[str, ast.Module] = {}
        self.paths: dict[str, Path] = {}

    def visit(self, first: Path) -> None:
        waiting = [first]
        while waiting:
            path = waiting.pop()
            name = self._name(path)
            if name in self.digests:
                continue
            # Before the read: a change in between then makes the closure stale, not wrong.
            self.marks[path] = _mark(path)
            tree = parse_file(path, self.field)
            self.digests[name] = digest_syntax([tree], keep_docstrings=reads_docstrings(tree))
            self.trees[name] = tree
            self.paths[name] = path
            waiting.extend(self._imports(path, tree))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name

    def _imports(self, path: Path, tree: ast.Module) -> Iterator[Path]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._absolute(alias.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                yield from self._from(path, node)
            elif isinstance(node, ast.Call) and _is_dynamic(node.func):
                yield from self._dynamic(path, node)

    def _from(self, path: Path, node: ast.ImportFrom) -> Iterator[Path]:
        parts = node.module.split(".") if node.module else []
        names = [alias.name for alias in node.names]
        if node.level == 0:
            for name in names:
                yield from self._absolute([*parts, *_submodules(name)])
            if "*" in names and parts[0] not in OURS:
                yield from _siblings(self.root.joinpath(*parts))
                yield from _siblings(self.root.joinpath("src", *parts))
            return
        package = path.parent
        for _ in range(node.level - 1):
            package = package.parent
        for name in names:
            yield from self._below(package, [*parts, *_submodules(name)])
        if "*" in names:
            yield from _siblings(package.joinpath(*parts))

    def _absolute(self, parts: list[str]) -> Iterator[Path]:
        if not parts or parts[0] in OURS:
            return
        yield from self._below(self.root, parts)
        # A package that is installed in place from a src folder.
        yield from self._below(self.root / "src", parts)

    def _below(self, place: Path, parts: list[str]) -> Iterator[Path]:
        """The files that importing `parts` from `place` runs: every package's __init__ on the way, then the module."""
        own = place / "__init__.py"
        # A relative import runs the package's __init__ as well; the root itself is not a package.
        if place not in (self.root, self.root / "src") and own.is_file():
            yield own
        for depth in range(1, len(parts) + 1):
            found = _module_file(place.joinpath(*parts[:depth]))
            if found is not None:
                yield found

    def _dynamic(self, path: Path, node: ast.Call) -> Iterator[Path]:
        named = node.args[0] if node.args else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str) and not named.value.startswith("."):
            yield from self._absolute(named.value.split("."))
        else:
            self.unseen.append(f"{self._name(path)}:{node.lineno}")


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1  # it is gone, or cannot be read
    return status.st_size, status.st_mtime_ns


def _submodules(name: str) -> list[str]:
    return [] if name == "*" else [name]


def _is_dynamic(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ("import_module", "__import__")


def _module_file(stem: Path) -> Path | None:
    package = stem / "__init__.py"
    if package.is_file():
        return package
    module = stem.with_name(f"{stem.name}.py")
    return module if module.is_file() else None


def _siblings(package: Path) -> list[Path]:
    """A star import may take in any module of a package (`__all__` decides at run time): count them all."""
    return sorted(package.glob("*.py")) if package.is_dir() else []
