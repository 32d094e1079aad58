"""What code adds to the places that Python imports from, and the files that it loads by path, found on the syntax tree.

::

    sys.path.insert(0, str(Path(__file__).parent / "lib"))
    spec = importlib.util.spec_from_file_location("nets", os.path.join(HERE, "nets.py"))

Paths are worked out from constants, ``__file__``, variables of the environment, and the usual functions of pathlib and
os.path. Nothing is executed. What cannot be worked out is listed by its line.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

_MOST = 16
"""A value with more possibilities counts as unknown."""
# Functions and methods that leave a path the same, but for its form.
_SAME = {"Path", "PosixPath", "PurePath", "PurePosixPath", "abspath", "absolute", "as_posix", "fspath", "normcase",
         "normpath", "realpath", "resolve", "str"}  # fmt: skip
_HERE = {"getcwd", "cwd"}
_CHANGES: dict[str, Callable[[str], str]] = {
    "dirname": os.path.dirname,
    "expanduser": os.path.expanduser,
    "expandvars": os.path.expandvars,
}
_Values = frozenset[str]


class PathValues:
    """Works out the texts and paths of a file's expressions.

    Args:
        path: the file.
        tree: its syntax tree.
    """

    def __init__(self, path: Path, tree: ast.Module) -> None:
        # Workers load the recipe by its resolved path, and other modules by the path that finds them.
        self._file = frozenset({str(path), os.path.realpath(path)})
        self._bound: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(tree):
            self._bind(node)
        self._open: set[str] = set()

    def of(self, node: ast.expr) -> _Values | None:
        """The values that an expression may have; None where they are not known before the code runs."""
        found = self._value(node)
        return found if found is not None and len(found) <= _MOST else None

    # -- names --------------------------------------------------------------------------------------------------------

    def _bind(self, node: ast.AST) -> None:
        """Note what a node gives names; names of all scopes are looked at as one."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                self._bind_target(node.target, node.value)
        elif isinstance(node, ast.For):
            listed = isinstance(node.iter, ast.List | ast.Tuple | ast.Set)
            for each in ast.iter_child_nodes(node.iter) if listed else ():
                if isinstance(each, ast.expr):
                    self._bind_target(node.target, each)
            if not listed:
                self._bind_target(node.target, None)
        else:
            self._bind_unknown(node)

    def _bind_unknown(self, node: ast.AST) -> None:
        if isinstance(node, ast.AugAssign | ast.comprehension | ast.withitem):
            target = node.optional_vars if isinstance(node, ast.withitem) else node.target
            if target is not None:
                self._bind_target(target, None)
        elif isinstance(node, ast.arg):
            self._bound.setdefault(node.arg, []).append(None)

    def _bind_target(self, target: ast.expr, value: ast.expr | None) -> None:
        names = [each for each in ast.walk(target) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        for name in names:
            self._bound.setdefault(name.id, []).append(value if name is target else None)

    def _name(self, name: str) -> _Values | None:
        if name == "__file__":
            return self._file
        # A name that is made from itself has no end.
        if name not in self._bound or name in self._open:
            return None
        self._open.add(name)
        try:
            return _union(None if each is None else self._value(each) for each in self._bound[name])
        finally:
            self._open.discard(name)

    # -- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> _Values | None:
        if isinstance(node, ast.Constant):
            return frozenset({node.value}) if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            return _each(self._value(node.value), _parent) if node.attr == "parent" else None
        if isinstance(node, ast.Subscript):
            return self._item(node)
        return self._composed(node)

    def _composed(self, node: ast.expr) -> _Values | None:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            parts = [self._value(node.left), self._value(node.right)]
            return _combine(parts, os.path.join if isinstance(node.op, ast.Div) else _concatenate)
        if isinstance(node, ast.JoinedStr):
            return _combine([self._value(each) for each in node.values], _concatenate)
        if isinstance(node, ast.FormattedValue):
            return self._value(node.value) if node.format_spec is None else None
        if isinstance(node, ast.IfExp):
            return _union(self._value(each) for each in (node.body, node.orelse))
        if isinstance(node, ast.BoolOp):
            return _union(self._value(each) for each in node.values)
        return None

    def _call(self, node: ast.Call) -> _Values | None:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _HERE:
            return frozenset({os.curdir})
        if name == "home":
            return frozenset({str(Path.home())})
        if name == "getenv" or (name == "get" and owner is not None and _is_environment(owner)):
            return self._variable(node.args)
        # A method of a path has its value in front of the dot, a function as its first argument.
        given = [self._value(each) for each in node.args]
        if owner is not None and (not given or name in ("joinpath", "with_name")):
            given.insert(0, self._value(owner))
        if name in _CHANGES and len(given) == 1:
            return _each(given[0], _CHANGES[name])
        if name == "with_name" and len(given) == 2:
            return _combine([_each(given[0], _parent), given[1]], os.path.join)
        if name == "join" and isinstance(owner, ast.Constant):
            return None
        joins = name in ("join", "joinpath") or (name in _SAME and bool(given))
        return _combine(given, os.path.join) if joins else None

    def _item(self, node: ast.Subscript) -> _Values | None:
        if _is_environment(node.value):
            return self._variable([node.slice])
        parents = isinstance(node.value, ast.Attribute) and node.value.attr == "parents"
        if parents and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            found = self._value(node.value.value)  # type: ignore[attr-defined]  # an attribute, as the line above sees
            for _ in range(node.slice.value + 1):
                found = _each(found, _parent)
            return found
        return None

    def _variable(self, given: list[ast.expr]) -> _Values | None:
        """A variable of the environment, which workers inherit, or its default."""
        names = self._value(given[0]) if given else None
        if names is None or len(names) != 1:
            return None
        here = os.environ.get(next(iter(names)))
        if here is not None:
            return frozenset({here})
        return self._value(given[1]) if len(given) > 1 else None


def _is_environment(node: ast.expr) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "environ"


def _parent(path: str) -> str:
    # As pathlib has it: the folder of "lib" is ".".
    return str(Path(path).parent)


def _concatenate(*parts: str) -> str:
    return "".join(parts)


def _each(values: _Values | None, change: Callable[[str], str]) -> _Values | None:
    return None if values is None else frozenset(change(value) for value in values)


def _union(parts: Iterable[_Values | None]) -> _Values | None:
    found: set[str] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return frozenset(found)


def _combine(parts: Iterable[_Values | None], join: Callable[..., str]) -> _Values | None:
    """Each combination of the parts' values."""
    known = list(parts)
    if any(part is None or len(part) > _MOST for part in known) or not known:
        return None
    combined = frozenset(join(*each) for each in product(*(part for part in known if part is not None)))
    return combined if len(combined) <= _MOST else None


_ADDS = {"insert": 1, "append": 0, "extend": 0}
# Of these methods none adds a folder.
_KEEPS = {"clear", "copy", "count", "index", "pop", "remove", "reverse", "sort"}
_READERS = {"enumerate", "frozenset", "join", "len", "list", "print", "reversed", "set", "sorted", "str", "tuple"}
_IMPORTERS = {"import_module": 0, "__import__": 0, "find_spec": 0, "run_module": 0}
_FILE_LOADERS = {"spec_from_file_location": 1, "SourceFileLoader": 1, "load_source": 1, "run_path": 0}
_KEYWORDS = {"name", "location", "path", "pathname", "path_name", "mod_name"}


@dataclass
class Additions:
    """What one file adds to what its project imports.

    Attributes:
        folders: places that it adds to the module path; relative ones are as they are written.
        files: Python files that it loads by path.
        modules: dotted names that it imports by a function.
        below: packages of which it imports modules whose names are put together at run time.
        unknown_folders: lines that change the module path by folders that cannot be worked out.
        unknown_modules: lines that import something that cannot be worked out.
    """

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    unknown_folders: list[int] = field(default_factory=list)
    unknown_modules: list[int] = field(default_factory=list)


def find_additions(path: Path, tree: ast.Module) -> Additions:
    """Find what a file adds to what its project imports."""
    finder = _Finder(path, tree)
    for node in ast.walk(tree):
        finder.look(node)
    return finder.found


class _Finder:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.found = Additions()
        self._values = PathValues(path, tree)
        self._systems, self._lists = _names_of_sys(tree)
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def look(self, node: ast.AST) -> None:
        """Note what a node adds."""
        if isinstance(node, ast.Call):
            self._look_at_call(node)
        elif isinstance(node, ast.expr) and self._is_module_path(node):
            self._look_at_use(node)

    # -- functions that import ----------------------------------------------------------------------------------------

    def _look_at_call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in _FILE_LOADERS:
            argument = _argument(node, _FILE_LOADERS[name])
            files = self._values.of(argument) if argument is not None else None
            if files is None:
                self.found.unknown_modules.append(node.lineno)
            self.found.files.extend(files or ())
        elif name in _IMPORTERS:
            self._look_at_name(node, _argument(node, _IMPORTERS[name]), only_looks=name == "find_spec")
        elif name == "addsitedir":
            self._add(node.lineno, _argument(node, 0))
        elif name in ("exec", "compile", "open", "read_text"):
            self._look_at_source(node)

    def _look_at_name(self, node: ast.Call, named: ast.expr | None, *, only_looks: bool) -> None:
        names = self._values.of(named) if named is not None else None
        if names is not None and not any(name.startswith(".") for name in names):
            self.found.modules.extend(names)
            return
        head = _head(named)
        if "." in head.lstrip(".") and not head.startswith("."):
            self.found.below.append(head.rpartition(".")[0])
        elif not only_looks:
            self.found.unknown_modules.append(node.lineno)

    def _look_at_source(self, node: ast.Call) -> None:
        """Note a Python file that is read, perhaps to be executed."""
        values = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        for value in values:
            self.found.files.extend(each for each in self._values.of(value) or () if each.endswith(".py"))

    # -- the module path ----------------------------------------------------------------------------------------------

    def _is_module_path(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._lists or node.id == "__path__"
        return isinstance(node, ast.Attribute) and (
            node.attr in ("path", "meta_path", "path_hooks")
            and isinstance(node.value, ast.Name)
            and node.value.id in self._systems
        )

    def _look_at_use(self, node: ast.expr) -> None:
        parent = self._parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node:
            # `sys.path[0] = …` and `sys.path[:0] = […]` change it.
            if isinstance(parent.ctx, ast.Load | ast.Del):
                return
            node, parent = parent, self._parents[parent]
        if isinstance(parent, ast.Attribute):
            call = self._parents[parent]
            if parent.attr in _KEEPS:
                return
            if isinstance(call, ast.Call) and call.func is parent and parent.attr in _ADDS:
                self._add(call.lineno, _argument(call, _ADDS[parent.attr]))
                return
        elif isinstance(parent, ast.Assign | ast.AugAssign) and parent.value is not node:
            self._add(parent.lineno, parent.value)
            return
        elif self._only_reads(node, parent):
            return
        self.found.unknown_folders.append(node.lineno)

    def _only_reads(self, node: ast.expr, parent: ast.AST) -> bool:
        if isinstance(parent, ast.Call):
            return _name(parent.func) in _READERS
        # A sum and a star stand in a list that is looked at as a whole.
        kinds = (ast.Compare, ast.comprehension, ast.Starred, ast.BinOp, ast.FormattedValue, ast.Expr, ast.Delete)
        return isinstance(parent, kinds) or (isinstance(parent, ast.For) and parent.iter is node)

    def _add(self, line: int, value: ast.expr | None) -> None:
        folders = self._folders(value) if value is not None else None
        if folders is None:
            self.found.unknown_folders.append(line)
        self.found.folders.extend(folders or ())

    def _folders(self, value: ast.expr) -> list[str] | None:
        """The folders in a value that becomes part of the module path: one, or a list of them."""
        inner = value.value if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice) else value
        if isinstance(inner, ast.Call) and _name(inner.func) in ("list", "tuple") and len(inner.args) == 1:
            inner = inner.args[0]
        if self._is_module_path(inner):
            return []
        if isinstance(value, ast.List | ast.Tuple):
            parts = [each.value if isinstance(each, ast.Starred) else each for each in value.elts]
            return _joined(self._folders(each) for each in parts)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            both = _joined(self._folders(each) for each in (value.left, value.right))
            if both is not None and (self._is_list(value.left) or self._is_list(value.right)):
                return both
        found = self._values.of(value)
        return None if found is None else sorted(found)

    def _is_list(self, node: ast.expr) -> bool:
        inner = node.value if isinstance(node, ast.Subscript) else node
        return isinstance(node, ast.List | ast.Tuple) or self._is_module_path(inner)


def _names_of_sys(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names by which a file calls the module sys, and the module path itself."""
    systems, lists = {"sys"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            systems |= {alias.asname or alias.name for alias in node.names if alias.name == "sys"}
        elif isinstance(node, ast.ImportFrom) and node.module == "sys" and node.level == 0:
            lists |= {each.asname or each.name for each in node.names if each.name in ("path", "meta_path")}
    return systems, lists


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _argument(node: ast.Call, position: int) -> ast.expr | None:
    """The argument at a position, or the one that is given by name."""
    named = [each.value for each in node.keywords if each.arg in _KEYWORDS]
    if any(isinstance(each, ast.Starred) for each in node.args):
        return None
    # `spec_from_file_location(name="x", location=path)`: the last one is the file.
    return node.args[position] if len(node.args) > position else named[-1] if named else None


def _head(node: ast.expr | None) -> str:
    """The constant text that an expression begins with."""
    if isinstance(node, ast.BinOp):
        return _head(node.left)
    if isinstance(node, ast.JoinedStr) and node.values:
        return _head(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _joined(parts: Iterator[list[str] | None]) -> list[str] | None:
    found: list[str] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found
