"""Python files as syntax trees, and the digest of what a piece of one means, whatever its comments and formatting."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from trainer_lib.errors import ConfigError

_READS_DOCSTRINGS = frozenset({"__doc__", "getdoc"})
_MAX_BYTES = 16 << 20


def parse_file(path: Path, field: str) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        ConfigError: about `field`: the file cannot be read, or is not Python.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                "The file is too large for Python source.", field=field, value=str(path), remedy="Check the path."
            )
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"The file is not valid Python: {error.msg} (line {error.lineno}).",
            field=field,
            value=str(path),
            remedy="Correct the file.",
        ) from error
    # A null byte, and an expression nested deeper than the parser goes.
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"The file is not valid Python: {error}.", field=field, value=str(path), remedy="Correct it."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"The file cannot be read: {error.strerror}.", field=field, value=str(path), remedy="Check its permissions."
        ) from error


def reads_any(tree: ast.AST, names: Set[str] = _READS_DOCSTRINGS) -> bool:
    """Whether code in the tree uses one of these names; by default those that read docstrings, so that they count."""
    return any(getattr(node, "id", getattr(node, "attr", None)) in names for node in ast.walk(tree))


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
    if not isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first = body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
