"""The names of a recipe's modules, followed to what they mean: another piece, a module, or something from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainflow.tasks.code.closure import Closure
from trainflow.tasks.code.definitions import Module, Piece, cut_modules
from trainflow.tasks.code.project_files import OURS, is_covered, recipe_module
from trainflow.tasks.code.references import Chain, ImportTarget

Stems = tuple[str, ...]
"""Where a module may lie: absolute paths without an ending."""

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
        # Changes of the module path by folders that are known only at run time.
        self.unattributed = closure.unattributed
        self._paths = {name: str(path) for name, path in closure.paths.items()}
        self._names = {path: name for name, path in self._paths.items()}
        self._places = [str(place) for place in closure.places]
        self._below: dict[str, list[str]] = {}
        for name, path in self._paths.items():
            for folder in Path(path).parents:
                self._below.setdefault(str(folder), []).append(name)

    def resolve(self, file: str, chain: Chain, aliases: dict[str, list[ImportTarget]] | None = None) -> Meaning:
        """What a chain of names in a file means.

        Args:
            aliases: names that imports inside of the function bind.
        """
        return self._resolve(file, chain, aliases or {}, _DEPTH)

    def imported(self, file: str, target: ImportTarget) -> tuple[str, ...]:
        """Files of the project that an import statement executes, packages first."""
        more = () if target.name in (None, "*") else (str(target.name),)
        return tuple(dict.fromkeys(self._files_on_the_way(file, target, more)))

    def may_bind(self, star: Piece, name: str) -> bool:
        """Whether a star import may bind `name`.

        Of a recipe of trainflow's own it binds what that file defines, unless the file that imports defines it below.
        """
        if not self.is_known(star):
            return True
        own = self.modules[star.file].by_name.get(name, ())
        if any(each.is_simple and each.is_unconditional and each.line > star.line for each in own):
            return False
        files = self.imported(star.file, star.target) if star.target is not None else ()
        return not name.startswith("_") and any(name in self.modules[file].by_name for file in files)

    def is_known(self, star: Piece) -> bool:
        """Whether all that a star import binds is known: it takes the names of a recipe of trainflow's own."""
        parts = star.target.module.split(".") if star.target is not None else []
        return recipe_module(parts) is not None and is_covered(parts)

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
            if piece.target is not None and self.may_bind(piece, head):
                found.add(self._follow(file, ImportTarget(piece.target.level, piece.target.module, head), rest, depth))
        if not found.pieces and not aliases.get(head):
            found.outside.add(".".join(("builtins", *chain)))
        return found

    def _follow(self, file: str, target: ImportTarget, rest: Chain, depth: int) -> Meaning:
        """What the attributes `rest` of an imported name mean."""
        runs = self.imported(file, target)
        stems = self._stems(file, target)
        deeper = stems if target.name is None else _join(stems, (target.name,))
        # Folders without an __init__ run nothing, and hold modules all the same.
        if not runs and not any(stem in self._below for stem in deeper):
            name = (target.module.partition(".")[0] if target.is_top else target.module, target.name or "", *rest)
            return Meaning(outside={".".join(part for part in name if part)})
        if target.is_top:
            stems = _join(self._places, (target.module.partition(".")[0],))
        wanted = rest if target.name is None else (target.name, *rest)
        found = self._look_below(stems, wanted, depth)
        found.runs += runs
        return found

    def _look_below(self, stems: Stems, wanted: Chain, depth: int) -> Meaning:
        """What the attributes `wanted` of a module mean."""
        if not wanted or depth == 0:
            # The module itself, and whatever is imported below it.
            return Meaning(wholes=self._all_below(stems))
        found = Meaning()
        for file in self._files(stems):
            module = self.modules[file]
            if wanted[0] in module.by_name or "*" in module.by_name:
                found.add(self._resolve(file, wanted, {}, depth - 1))
                found.outside = {name for name in found.outside if not name.startswith("builtins.")}
        deeper = _join(stems, wanted[:1])
        if self._files(deeper) or any(stem in self._below for stem in deeper):
            found.add(self._look_below(deeper, wanted[1:], depth - 1))
        if not (found.pieces or found.wholes or found.outside):
            # A name that is nowhere defined: `__getattr__`, or set from outside.
            return Meaning(wholes=self._all_below(stems))
        found.wholes += [file for file in self._files(stems) if "__getattr__" in self.modules[file].by_name]
        return found

    # -- files --------------------------------------------------------------------------------------------------------

    def _stems(self, file: str, target: ImportTarget) -> Stems:
        """Where an imported module may lie: paths without an ending; none for a module of trainflow."""
        parts = tuple(target.module.split(".")) if target.module else ()
        if target.level == 0:
            own = recipe_module(parts)
            if own is not None:
                return (str(own),)
            return () if parts[0] in OURS else _join(self._places, parts)
        # One dot is the file's own folder.
        return _join((self._paths[file].rsplit("/", target.level)[0],), parts)

    def _files(self, stems: Stems) -> list[str]:
        paths = [path for stem in stems for path in (f"{stem}/__init__.py", f"{stem}.py")]
        return [self._names[path] for path in paths if path in self._names]

    def _files_on_the_way(self, file: str, target: ImportTarget, more: Chain) -> Iterator[str]:
        if target.level == 0:
            parts = (*target.module.split("."), *more)
            own = recipe_module(parts[:3])  # what is behind that is a name in it
            if own is not None and is_covered(parts):
                yield from self._files((str(own),))
                return
            for depth in range(1, len(parts) + 1) if parts[0] not in OURS else ():
                yield from self._files(_join(self._places, parts[:depth]))
            return
        [stem] = _join(self._stems(file, target), more)
        # The packages around a file that imports from its own package run before it.
        places = [place for place in self._places if stem.startswith(f"{place}/")]
        start = min(places, key=len, default=stem.rpartition("/")[0])
        parts = tuple(stem.removeprefix(start).strip("/").split("/"))
        for depth in range(1, len(parts) + 1):
            yield from self._files(_join((start,), parts[:depth]))

    def _all_below(self, stems: Stems) -> list[str]:
        below = [name for stem in stems for name in self._below.get(stem, ())]
        return list(dict.fromkeys((*below, *self._files(stems))))


def _join(stems: Iterable[str], parts: Chain) -> Stems:
    return tuple("/".join((stem, *parts)) for stem in stems)


def _digest_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
