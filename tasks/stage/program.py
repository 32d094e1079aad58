"""The names of a recipe's modules, followed to what they mean: another piece, a module, or something from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tasks.stage.closure import OURS, Closure
from tasks.stage.definitions import Module, Piece, cut_modules
from tasks.stage.references import Chain, ImportTarget

_DEPTH = 40
"""A name that is imported from file to file more often than this counts as the whole file."""


@dataclass(frozen=True)
class Whole:
    """Everything in one file: the module itself is handed on, so any of its names may be used."""

    file: str


@dataclass
class Meaning:
    """What a chain of names means.

    Attributes:
        pieces: the pieces that it reads, imported names included.
        wholes: modules of the project of which anything may be read.
        runs: files of the project that the imports on the way execute.
        outside: the dotted name in an installed package or builtins, when it leads there; else empty.
        is_local: a name of a function or a class, which means nothing outside.
    """

    pieces: list[Piece] = field(default_factory=list)
    wholes: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)
    is_local: bool = False

    @property
    def pieces_here(self) -> list[Piece]:
        """The pieces that are not imported names."""
        return [piece for piece in self.pieces if piece.target is None]

    def add(self, other: Meaning) -> None:
        """Add another meaning of the same chain."""
        self.pieces += other.pieces
        self.wholes += other.wholes
        self.runs += other.runs
        self.outside |= other.outside


class Program:
    """The modules that a recipe consists of."""

    def __init__(self, closure: Closure) -> None:
        self.modules: dict[str, Module] = cut_modules(closure)
        # For code that reads its own source.
        self.texts = {name: _digest_file(path) for name, path in closure.paths.items()}

    def resolve(self, file: str, chain: Chain, aliases: dict[str, list[ImportTarget]] | None = None) -> Meaning:
        """What a chain of names in a file means.

        Args:
            aliases: names that imports inside of the function bind.
        """
        return self._resolve(file, chain, aliases or {}, _DEPTH)

    def imported(self, file: str, target: ImportTarget) -> tuple[str, ...]:
        """Files of the project that an import statement executes, packages first."""
        parts = self._parts(file, target)
        if parts is None:
            return ()
        if target.name not in (None, "*"):
            parts = (*parts, str(target.name))
        return tuple(self._files_on_the_way(parts))

    # -- names --------------------------------------------------------------------------------------------------------

    def _resolve(self, file: str, chain: Chain, aliases: dict[str, list[ImportTarget]], depth: int) -> Meaning:
        found = Meaning()
        head, rest = chain[0], chain[1:]
        for target in aliases.get(head, ()):
            found.add(self._follow(file, target, rest, depth))
        module = self.modules[file]
        for piece in module.by_name.get(head, ()):
            found.pieces.append(piece)
            # An import below a condition is part of the statement that holds it.
            for target in [piece.target] if piece.target is not None else piece.references.aliases.get(head, ()):
                found.add(self._follow(file, target, rest, depth))
        for piece in module.by_name.get("*", ()):
            # The name may come from a star import.
            if piece.target is not None:
                found.add(self._follow(file, ImportTarget(piece.target.level, piece.target.module, head), rest, depth))
        if not found.pieces and not aliases.get(head):
            found.outside.add(".".join(("builtins", *chain)))
        return found

    def _follow(self, file: str, target: ImportTarget, rest: Chain, depth: int) -> Meaning:
        """What the attributes `rest` of an imported name mean."""
        parts = self._parts(file, target)
        runs = self.imported(file, target)
        # Folders without an __init__ run nothing, and hold modules all the same.
        if parts is None or not (runs or self._has_below((*parts, *([target.name] if target.name else ())))):
            name = (target.module.partition(".")[0] if target.is_top else target.module, target.name or "", *rest)
            return Meaning(outside={".".join(part for part in name if part)})
        if target.is_top:
            parts = parts[:1]
        wanted = rest if target.name is None else (target.name, *rest)
        found = self._look_below(parts, wanted, depth)
        found.runs += runs
        return found

    def _look_below(self, parts: Chain, wanted: Chain, depth: int) -> Meaning:
        """What the attributes `wanted` of the module `parts` mean."""
        file = self._file(parts)
        if not wanted or depth == 0:
            # The module itself, and whatever is imported below it.
            return Meaning(wholes=self._all_below(parts))
        found = Meaning()
        module = self.modules[file] if file is not None else None
        if module is not None and file is not None and (wanted[0] in module.by_name or "*" in module.by_name):
            found.add(self._resolve(file, wanted, {}, depth - 1))
            found.outside = {name for name in found.outside if not name.startswith("builtins.")}
        deeper = (*parts, wanted[0])
        if self._file(deeper) is not None or self._has_below(deeper):
            found.add(self._look_below(deeper, wanted[1:], depth - 1))
        if not (found.pieces or found.wholes or found.outside):
            # A name that is nowhere defined: `__getattr__`, or set from outside.
            return Meaning(wholes=self._all_below(parts))
        if module is not None and file is not None and "__getattr__" in module.by_name:
            found.wholes.append(file)
        return found

    # -- files --------------------------------------------------------------------------------------------------------

    def _parts(self, file: str, target: ImportTarget) -> Chain | None:
        """The dotted name of an imported module, from the root; None for one that is not below it."""
        parts = tuple(target.module.split(".")) if target.module else ()
        if target.level == 0:
            return None if parts[0] in OURS else parts
        folder = PurePosixPath(file).parent
        for _ in range(target.level - 1):
            folder = folder.parent
        return (*(part for part in folder.parts if part != "."), *parts)

    def _file(self, parts: Chain) -> str | None:
        stem = "/".join(parts)
        package = f"{stem}/__init__.py" if stem else "__init__.py"
        names = (package, f"{stem}.py", f"src/{package}", f"src/{stem}.py")
        return next((name for name in names if name in self.modules), None)

    def _files_on_the_way(self, parts: Chain) -> Iterator[str]:
        for depth in range(1, len(parts) + 1):
            file = self._file(parts[:depth])
            if file is not None:
                yield file

    def _has_below(self, parts: Chain) -> bool:
        prefix = "/".join(parts) + "/"
        return any(name.startswith((prefix, f"src/{prefix}")) for name in self.modules)

    def _all_below(self, parts: Chain) -> list[str]:
        own = self._file(parts)
        prefix = "/".join(parts) + "/"
        found = [name for name in self.modules if name.startswith((prefix, f"src/{prefix}"))]
        return [*found, own] if own is not None and own not in found else found


def _digest_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
