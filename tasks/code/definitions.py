"""The modules of a recipe as definitions: each function, class, constant and imported name by itself.

A module is cut at its top level. A piece that only defines a name belongs to the code that uses the name. Any other
piece (a call, a loop, a condition, a changed global) may change what the others mean: it runs at import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trainflow.tasks.code.closure import Closure
from trainflow.tasks.code.references import ImportTarget, References, bound_names, find_references, import_targets
from trainflow.tasks.code.syntax import digest_syntax, reads_any

_READS_ANNOTATIONS = {"get_type_hints", "__annotations__", "get_annotations", "signature", "getfullargspec"}


@dataclass(eq=False)
class Piece:
    """One statement of a module's top level, or one name of an import statement.

    Attributes:
        file: path of the module below the root.
        label: what a key calls it: the file, and the names that it binds.
        names: those names.
        target: what an imported name means; None for a statement of another kind.
        is_simple: a function, a class, an assignment to names, or an imported name.
        is_unconditional: it is not below `if TYPE_CHECKING`.
    """

    file: str
    node: ast.stmt
    names: tuple[str, ...]
    digest: str
    references: References
    target: ImportTarget | None = None
    is_unconditional: bool = True

    @property
    def line(self) -> int:
        """Its first line; of a function the line with its name."""
        return self.node.lineno

    @property
    def is_simple(self) -> bool:
        """Whether it can be a mere definition."""
        node = self.node
        if isinstance(node, ast.Assign):
            return all(is_names(target) for target in node.targets)
        if isinstance(node, ast.AnnAssign):
            return isinstance(node.target, ast.Name)
        if self.names == ("__doc__",):
            return True
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        return isinstance(node, kinds) and self.names != ("*",)

    @property
    def label(self) -> str:
        """What a key calls it. A statement without a name goes by its digest, so that moving it renames nothing."""
        if not self.is_simple:
            return f"{self.file}:#{self.digest[:12]}"
        return f"{self.file}:{'import ' if self.target else ''}{','.join(self.names)}"

    @property
    def text(self) -> str:
        """Its first line of source, at most 60 characters, as Python would print it."""
        line = ast.unparse(self.node).partition("\n")[0]
        return line if len(line) <= 60 else line[:57] + "..."


def is_names(target: ast.expr) -> bool:
    """Whether an assignment binds names only, no attribute or item."""
    if isinstance(target, ast.Tuple | ast.List):
        return all(is_names(each) for each in target.elts)
    return isinstance(target, ast.Name)


@dataclass
class Module:
    """One file, cut into its pieces.

    Attributes:
        name: its path below the root.
        pieces: in the order of the file.
        by_name: name -> the pieces that bind it.
    """

    name: str
    pieces: list[Piece] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, list[Piece]]:
        """Name -> the pieces that bind it."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            for name in piece.names:
                found.setdefault(name, []).append(piece)
        return found

    @property
    def rebinds(self) -> bool:
        """Whether some name is bound twice, so that the order of the pieces counts."""
        # `import a.b` and `import a.c` both bind `a`, to one module.
        several = (pieces for pieces in self.by_name.values() if len(pieces) > 1)
        return any(not all(each.target is not None and each.target.is_top for each in pieces) for pieces in several)


def cut_modules(closure: Closure) -> dict[str, Module]:
    """Each file of a closure, cut into pieces."""
    trees = closure.trees
    # Code of one file may read the docstrings and annotations of another.
    docstrings = any(reads_any(tree) for tree in trees.values())
    hints = any(reads_any(tree, _READS_ANNOTATIONS) for tree in trees.values())
    return {name: _cut(name, tree, docstrings, hints or not _is_deferred(tree)) for name, tree in trees.items()}


def _cut(file: str, tree: ast.Module, docstrings: bool, annotations: bool) -> Module:
    module = Module(file)
    if docstrings and ast.get_docstring(tree, clean=False) is not None:
        digest = digest_syntax(tree.body[:1], keep_docstrings=True)
        module.pieces.append(Piece(file, tree.body[0], ("__doc__",), digest, References()))
    deferred = [ast.Constant("annotations are deferred")] if _is_deferred(tree) else []
    for node, unconditional in _statements(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, target in import_targets(node):
                digest = digest_syntax([ast.Constant(f"{target} as {name}")], keep_docstrings=True)
                module.pieces.append(Piece(file, node, (name,), digest, References(), target, unconditional))
            continue
        names = tuple(sorted(bound_names([node])))
        found = find_references(node, annotations=annotations)
        # Dataclasses and the like read the annotations of a class, which are texts when they are deferred.
        marks = deferred if annotations or isinstance(node, ast.ClassDef) else []
        digest = digest_syntax([node, *marks], keep_docstrings=docstrings)
        module.pieces.append(Piece(file, node, names, digest, found, None, unconditional))
    return module


def _statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements that count, and whether each runs; those below `if TYPE_CHECKING` only name types."""
    own_switch = "TYPE_CHECKING" in bound_names([node for node in body if not isinstance(node, ast.ImportFrom)])
    for node in body:
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or isinstance(node, ast.Pass):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            # It changes how the whole file is compiled, but not what a definition reads as.
            if any(alias.name != "annotations" for alias in node.names):
                yield node, True
            continue
        if isinstance(node, ast.If) and not node.orelse:
            if _is_main(node.test):
                continue
            if _is_type_checking(node.test) and not own_switch:
                yield from ((inner, False) for inner in node.body)
                continue
        yield node, True


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_deferred(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )
