"""Paths and names that code puts together from what is known before it runs."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable
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
