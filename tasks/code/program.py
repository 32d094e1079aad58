"""The modules of a recipe, cut into pieces, and their names followed to pieces, modules, or something outside."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainflow.tasks.code.closure import OURS, Closure, recipe_module
from trainflow.tasks.code.syntax import (
    KEPT_FILES,
    Chain,
    Function,
    ImportTarget,
    bound_names,
    digest_syntax,
    import_targets,
    module_names,
    reads_docstrings,
)

_DEPTH = 40  # a name that is imported from file to file more often than this counts as the whole file


@dataclass(eq=False)
class Piece:
    """One statement of a module's top level, or one name of an import statement."""

    file: str  # path of the module below the root
    node: ast.stmt
    names: tuple[str, ...]  # the names that it binds
    digest: str
    target: ImportTarget | None = None  # what an imported name means; None for a statement of another kind
    chains: frozenset[Chain] = frozenset()  # names of the module, or builtins, that it refers to
    # Names that import statements inside of it bind -> what they mean.
    aliases: Mapping[str, list[ImportTarget]] = field(default_factory=dict)
    # Every identifier, attribute, keyword and parameter, but the names that an assignment binds; of an import the name
    # that it takes.
    words: frozenset[str] = frozenset()

    @property
    def is_simple(self) -> bool:
        """Whether it can be a mere definition."""
        node = self.node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return all(binds_names(target) for target in assigned_targets(node))
        return self.names == ("__doc__",) or (
            isinstance(node, Function | ast.ClassDef | ast.Import | ast.ImportFrom) and self.names != ("*",)
        )

    @property
    def label(self) -> str:
        """Its name in a key. A statement without a name goes by its digest, so that moving it renames nothing."""
        if not self.is_simple and self.target is None:
            return f"{self.file}:#{self.digest[:12]}"
        return f"{self.file}:{'import ' if self.target else ''}{','.join(self.names)}"

    @property
    def text(self) -> str:
        """Its first line of source, at most 60 characters, as Python would print it."""
        line = ast.unparse(self.node).partition("\n")[0]
        return line if len(line) <= 60 else line[:57] + "..."


def assigned_targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """The targets of an assignment."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def binds_names(target: ast.expr) -> bool:
    """Whether an assignment binds names only, no attribute or item."""
    if isinstance(target, ast.Tuple | ast.List):
        return all(binds_names(element) for element in target.elts)
    return isinstance(target, ast.Name)


@functools.lru_cache(KEPT_FILES)
def _cut(file: str, tree: ast.Module, docstrings: bool) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    if docstrings and ast.get_docstring(tree, clean=False) is not None:
        digest = digest_syntax(tree.body[:1], keep_docstrings=True)
        pieces.append(Piece(file, tree.body[0], ("__doc__",), digest))
    for node in _statements(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, target in import_targets(node):
                digest = digest_syntax([ast.Constant(f"{target} as {name}")], keep_docstrings=True)
                words = frozenset([target.name] if target.name else [])
                pieces.append(Piece(file, node, (name,), digest, target, words=words))
            continue
        aliases: dict[str, list[ImportTarget]] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                for name, target in import_targets(inner):
                    aliases.setdefault(name, []).append(target)
        names, chains = tuple(sorted(bound_names([node]))), frozenset(module_names(node))
        digest = digest_syntax([node], keep_docstrings=docstrings)
        pieces.append(Piece(file, node, names, digest, None, chains, aliases, _words(node)))
    return tuple(pieces)


def _statements(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """The statements that count; those below `if TYPE_CHECKING` as if they were not."""
    own_switch = "TYPE_CHECKING" in bound_names([node for node in body if not isinstance(node, ast.ImportFrom)])
    for node in body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        test = ast.unparse(node.test) if isinstance(node, ast.If) and not node.orelse else ""
        if test in ("__name__ == '__main__'", "'__main__' == __name__"):
            continue
        if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not own_switch and isinstance(node, ast.If):
            yield from node.body
        else:
            yield node


def _words(node: ast.stmt) -> frozenset[str]:
    parts: list[ast.AST] = [node]
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        parts = [node.value, *(target for target in assigned_targets(node) if not binds_names(target))]
    words = (
        getattr(inner, name, None)
        for part in parts
        for inner in ast.walk(part)
        for name in ("id", "attr", "arg", "name")
    )
    return frozenset(word for word in words if isinstance(word, str))


@dataclass
class Meaning:
    """The meaning of a chain of names."""

    pieces: list[Piece] = field(default_factory=list)  # the pieces that it reads, imported names included
    wholes: list[str] = field(default_factory=list)  # modules of the project of which anything may be read
    # The dotted names in installed packages or builtins that it leads to.
    outside: set[str] = field(default_factory=set)

    @property
    def pieces_here(self) -> list[Piece]:
        """The pieces that are not imported names."""
        return [piece for piece in self.pieces if piece.target is None]

    def add(self, other: Meaning) -> None:
        """Add another meaning of the same chain."""
        self.pieces += other.pieces
        self.wholes += other.wholes
        self.outside |= other.outside


class Program:
    """The modules that a recipe consists of."""

    def __init__(self, closure: Closure) -> None:
        docstrings = any(reads_docstrings(tree) for tree in closure.trees.values())
        self.modules = {name: _cut(name, tree, docstrings) for name, tree in closure.trees.items()}
        self.closure = closure
        self._by_name: dict[str, dict[str, list[Piece]]] = {}
        for file, pieces in self.modules.items():
            names = self._by_name.setdefault(file, {})
            for piece in pieces:
                for name in piece.names:
                    names.setdefault(name, []).append(piece)
        self._places = [str(place) for place in closure.places]
        self._at: dict[str, list[str]] = {}
        self._below: dict[str, list[str]] = {}
        for name, path in closure.paths.items():
            stem = path.parent if path.name == "__init__.py" else path.with_suffix("")
            self._at.setdefault(str(stem), []).append(name)
            for folder in path.parents:
                self._below.setdefault(str(folder), []).append(name)

    def binding(self, file: str, name: str) -> list[Piece]:
        """The pieces of a file that bind a name."""
        return self._by_name[file].get(name, [])

    def all_pieces(self) -> list[Piece]:
        """The pieces of all files."""
        return [piece for pieces in self.modules.values() for piece in pieces]

    def resolve(
        self, file: str, chain: Chain, aliases: Mapping[str, list[ImportTarget]] | None = None, depth: int = _DEPTH
    ) -> Meaning:
        """The meaning of a chain of names in a file; `aliases` are the names that imports inside of the code bind."""
        found, aliases, (head, *rest) = Meaning(), aliases or {}, chain
        for target in aliases.get(head, ()):
            found.add(self._follow(file, target, rest, depth))
        for piece in self.binding(file, head):
            found.pieces.append(piece)
            # An import below a condition is part of the statement that holds it.
            for target in [piece.target] if piece.target is not None else piece.aliases.get(head, ()):
                found.add(self._follow(file, target, rest, depth))
        for star in self._stars(file, head):
            if self._may_bind(file, star, head, frozenset()):
                found.add(self._follow(file, replace(star, name=head), rest, depth))
        if not found.pieces and not aliases.get(head):
            found.outside.add(".".join(("builtins", *chain)))
        return found

    def may_define(self, file: str, name: str, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a file may have a name, also by a star import."""
        if self.binding(file, name) or self.binding(file, "__getattr__"):
            return True
        stars = self._stars(file, name) if file not in seen else []
        return any(self._may_bind(file, star, name, seen | {file}) for star in stars)

    def _stars(self, file: str, name: str) -> list[ImportTarget]:
        """The star imports by which a name may come into a file."""
        stars = [(piece.node.lineno, piece.target) for piece in self.binding(file, "*") if piece.target is not None]
        # A definition below takes the place of one that comes from a recipe of trainflow's own.
        last = max((piece.node.lineno for piece in self.binding(file, name) if piece.is_simple), default=0)
        return [star for line, star in stars if last < line or recipe_module(star.module.split(".")) is None]

    def _may_bind(self, file: str, star: ImportTarget, name: str, seen: frozenset[str]) -> bool:
        stems = self.find_stems(file, star)
        # Of a package outside of the project the names are unknown; a submodule may be a name of its package.
        return (
            not stems
            or bool(self._known(f"{stem}/{name}" for stem in stems))
            or any(self.may_define(other, name, seen) for other in self._files(stems))
        )

    def _follow(self, file: str, target: ImportTarget, rest: Sequence[str], depth: int) -> Meaning:
        """The meaning of the attributes `rest` of an imported name."""
        stems = self.find_stems(file, target)
        submodules = self._known(f"{stem}/{target.name}" for stem in stems)
        # A folder without an __init__ holds modules and no other names; neither do our own recipes' package.
        if not stems or not (self._files(stems) or submodules or target.name in (None, "*")):
            name = (target.top if target.is_top else target.module, target.name or "", *rest)
            return Meaning(outside={".".join(part for part in name if part)})
        return self._look(stems, rest if target.name is None else [target.name, *rest], depth)

    def _look(self, stems: Sequence[str], wanted: Sequence[str], depth: int) -> Meaning:
        """The meaning of the attributes `wanted` of a module."""
        files = self._files(stems)
        everything = [name for stem in stems for name in self._below.get(stem, ())]
        if not wanted or depth == 0 or wanted[0] == "*":
            # The module itself, and whatever is imported below it.
            return Meaning(wholes=list(dict.fromkeys((*everything, *files))))
        found = Meaning()
        for file in files:
            if self.binding(file, wanted[0]) or self.binding(file, "*"):
                found.add(self.resolve(file, tuple(wanted), depth=depth - 1))
                found.outside = {name for name in found.outside if not name.startswith("builtins.")}
            if self.binding(file, "__getattr__"):
                found.wholes.append(file)
        deeper = self._known([f"{stem}/{wanted[0]}" for stem in stems])
        if deeper:
            found.add(self._look(deeper, wanted[1:], depth - 1))
        if not (found.pieces or found.wholes or found.outside):
            # A name that is nowhere defined: it is set from outside.
            return Meaning(wholes=list(dict.fromkeys((*everything, *files))))
        return found

    def find_stems(self, file: str, target: ImportTarget) -> list[str]:
        """Paths without an ending of the project's modules that an import may mean; empty for any other module."""
        parts = target.module.split(".") if target.module else []
        if target.level:
            folder = self.closure.paths[file].parents[target.level - 1]
            return self._known(["/".join((str(folder), *parts))])
        if (ours := recipe_module(parts)) is not None:
            return self._known([str(ours.parents[len(parts) - 2] if target.is_top else ours)])
        if parts[0] in OURS:
            return []
        return self._known("/".join((place, *(parts[:1] if target.is_top else parts))) for place in self._places)

    def _known(self, stems: Iterable[str]) -> list[str]:
        return [stem for stem in stems if stem in self._at or stem in self._below]

    def _files(self, stems: Iterable[str]) -> list[str]:
        return [name for stem in stems for name in self._at.get(stem, ())]
