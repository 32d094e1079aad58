"""Python files as syntax trees: digests of what they mean, the names that they bind, and those that they read."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_lib.errors import ConfigError

Chain = tuple[str, ...]
"""A name and the attributes read from it: ``helpers.scale.factor`` is ``("helpers", "scale", "factor")``."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_READS_DOCSTRINGS = {"__doc__", "getdoc"}
_MAX_BYTES = 16 << 20
KEPT_FILES = 64  # number of files whose trees a process caches


def parse_file(path: Path, field: str) -> ast.Module:
    """The syntax tree of a file. Raises ConfigError, about `field`, if it cannot be read or is not Python."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            what = "The file is too large for Python source."
            raise ConfigError(what, field=field, value=str(path), remedy="Check the path.")
        return _parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        what = f"The file is not valid Python: {error.msg} (line {error.lineno})."
        raise ConfigError(what, field=field, value=str(path), remedy="Correct the file.") from error
    # A null byte, and an expression nested deeper than the parser goes.
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"The file is not valid Python: {error}."
        raise ConfigError(what, field=field, value=str(path), remedy="Correct it.") from error
    except OSError as error:
        what = f"The file cannot be read: {error.strerror}."
        raise ConfigError(what, field=field, value=str(path), remedy="Check its permissions.") from error


# Stages and commands of one process read the same files. Trees are never changed, so what follows from one is cached.
@functools.lru_cache(KEPT_FILES)
def _parse(source: bytes, name: str) -> ast.Module:
    return ast.parse(source, filename=name)


def top_level_names(path: Path) -> set[str] | None:
    """Names that a file defines or imports at its top level; None when a star import hides some of them."""
    names = bound_names(parse_file(path, "recipe").body)
    return None if "*" in names else names


@functools.lru_cache(KEPT_FILES)
def reads_docstrings(tree: ast.AST) -> bool:
    """Whether code in the tree reads docstrings, so that they count."""
    return any(getattr(node, "id", getattr(node, "attr", None)) in _READS_DOCSTRINGS for node in ast.walk(tree))


def digest_syntax(nodes: Iterable[ast.AST], *, keep_docstrings: bool) -> str:
    """SHA-256 in hex of syntax trees, without their positions."""
    digest = hashlib.sha256()
    for node in nodes:
        for part in _canonical(node, keep_docstrings):
            # A string literal may hold a lone surrogate.
            digest.update(part.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _canonical(value: object, keep_docstrings: bool) -> Iterator[str]:
    """The tree as text without positions. Not `ast.dump`: its text differs between Python versions."""
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, inner in ast.iter_fields(value):
            # Absent fields are left out, because newer Pythons add some; in a Constant, None is the value.
            if inner is None and not isinstance(value, ast.Constant):
                continue
            if inner == [] or name in ("kind", "type_comment", "type_ignores"):
                continue
            yield f" {name}="
            if name == "body" and isinstance(inner, list) and not keep_docstrings and _has_docstring(value, inner):
                inner = inner[1:]
            yield from _canonical(inner, keep_docstrings)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _canonical(item, keep_docstrings)
            yield ","
        yield "]"
    else:
        yield repr(value)


def _has_docstring(owner: ast.AST, body: list[ast.stmt]) -> bool:
    first = body[0]
    return (
        isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


@dataclass(frozen=True)
class ImportTarget:
    """One name of an import statement."""

    level: int  # leading dots of a relative import
    module: str  # the dotted name after ``from`` or ``import``; empty for ``from . import x``
    name: str | None = None  # the name after ``import`` of a from-import, "*" for all; None: the module itself is bound
    is_top: bool = False  # ``import a.b`` binds ``a``, and ``import a.b as c`` binds the module ``a.b``

    @property
    def top(self) -> str:
        """The package that is imported; empty for a relative import."""
        return "" if self.level else self.module.partition(".")[0]


def import_targets(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, ImportTarget]]:
    """The names that an import statement binds ("*" for all), and what each means."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, ImportTarget(node.level, node.module or "", alias.name)
        elif alias.asname:
            yield alias.asname, ImportTarget(0, alias.name)
        else:
            yield alias.name.partition(".")[0], ImportTarget(0, alias.name, is_top=True)


def bound_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that statements bind in their own scope: bodies of functions, lambdas and classes are left out."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
            # Decorators and defaults run in this scope, and may hold a `:=`.
            waiting.extend(node.decorator_list)
            if not isinstance(node, ast.ClassDef):
                waiting.extend([*node.args.defaults, *filter(None, node.args.kw_defaults)])
        elif isinstance(node, Comprehension):
            # Its targets are its own; a `:=` inside binds here.
            names |= {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {name for name, _ in import_targets(node)}
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                names.add(node.name)
            elif isinstance(node, ast.MatchMapping) and node.rest:
                names.add(node.rest)
            waiting.extend(ast.iter_child_nodes(node))
    return names


def chain_of(node: ast.expr) -> Chain | None:
    """A name with its attributes; None for any other expression."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else None


def module_names(node: ast.AST, hidden: frozenset[str] = frozenset(), *, in_class: bool = False) -> Iterator[Chain]:
    """The names of the module (or builtins) that code refers to. Where scopes are doubtful, a name counts.

    `hidden` are names that the functions around the node hold themselves. `in_class`: the node belongs to the body of a
    class, whose imports are read as its attributes.
    """
    if isinstance(node, Function | ast.Lambda | Comprehension):
        yield from _names_of_scope(node, hidden)
        return
    if isinstance(node, ast.Name | ast.Attribute) and (chain := chain_of(node)) is not None:
        if chain[0] not in hidden:
            yield chain
        return
    if isinstance(node, ast.Global):
        yield from ((name,) for name in node.names)
    elif isinstance(node, ast.Import | ast.ImportFrom) and in_class:
        yield from ((name,) for name, _ in import_targets(node))
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield from _names_in_texts(node.annotation)
    for child in ast.iter_child_nodes(node):
        yield from module_names(child, hidden, in_class=in_class or isinstance(node, ast.ClassDef))


def _names_of_scope(node: Function | ast.Lambda | Comprehension, hidden: frozenset[str]) -> Iterator[Chain]:
    if isinstance(node, Comprehension):
        # The first iterable is evaluated outside.
        yield from module_names(node.generators[0].iter, hidden)
        inner = hidden | bound_names([generator.target for generator in node.generators])
        for child in ast.iter_child_nodes(node):
            yield from module_names(child, inner)
        return
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    for child in ast.iter_child_nodes(node):
        if child not in body:
            yield from module_names(child, hidden)
    if not isinstance(node, ast.Lambda) and node.returns is not None:
        yield from _names_in_texts(node.returns)
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    parameters = {argument.arg for argument in listed if argument is not None}
    seen_through: set[str] = set()
    for child in _own_nodes(body):
        if isinstance(child, ast.Global):
            seen_through.update(child.names)
        elif isinstance(child, ast.Import | ast.ImportFrom):  # an imported name is followed by its alias
            seen_through.update(name for name, _ in import_targets(child))
    inner = (hidden | bound_names(body) | parameters) - seen_through
    for child in body:
        yield from module_names(child, inner)


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's own scope."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def _names_in_texts(annotation: ast.expr) -> Iterator[Chain]:
    """Names in annotations that are written as texts."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((name,) for name in re.findall(r"[^\W\d]\w*", node.value))
