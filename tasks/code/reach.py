"""What a stage's functions reach in a recipe, and the digests by which a key holds it.

The walk starts at the functions that a stage calls and follows names: through helpers, classes, constants and imported
files of the project. Whatever runs at import and may change more than the name that it defines counts for every
stage; so does everything where names are made at run time (`eval`, `globals()`, unpickling).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from trainflow.tasks.code.closure import Closure
from trainflow.tasks.code.definitions import Module, Piece
from trainflow.tasks.code.import_effects import ImportEffects
from trainflow.tasks.code.program import Meaning, Program

_BUILTINS = {"eval", "exec", "compile", "globals", "__import__", "breakpoint", "__builtins__", "__loader__", "__spec__"}
_MODULES = {
    "builtins.__dict__", "cPickle", "cloudpickle", "code", "dill", "gc", "hydra.utils", "importlib", "joblib",
    "marshal", "pandas.read_pickle", "pickle", "pkgutil", "pydoc", "runpy", "shelve", "sys._getframe", "sys.modules",
    "torch.load",
}  # fmt: skip
_LOADERS = {"importlib.metadata.EntryPoint", "importlib.metadata.distribution", "importlib.metadata.entry_points"}
# Of the modules above, what only reads facts or writes.
_HARMLESS = {
    "importlib.metadata", "importlib.resources", "importlib.util.find_spec", "pickle.HIGHEST_PROTOCOL",
    "pickle.PickleError", "pickle.dump", "pickle.dumps",
}  # fmt: skip
_INSPECT = {"getmembers", "getmodule", "stack", "currentframe", "trace", "getsource", "getsourcelines", "getsourcefile"}
_ATTRIBUTES = {
    "locals()",
    "vars()",
    "dir()",
    "__globals__",
    "__subclasses__",
    "_getframe",
    "f_globals",
    "f_back",
    "__builtins__",
    "exec_module",
    "load_module",
    "tb_frame",
}
_READS_TEXTS = {"query", "eval", "evaluate", "sql"}
_SOURCE = {"getsource", "getsourcelines", "getsourcefile", "linecache", "co_firstlineno", "f_lineno", "tb_lineno"}


def names_made_at_run_time(outside: Iterable[str], *, words: Collection[str] = ()) -> str | None:
    """What of these lets code reach names that it does not spell out; None for nothing.

    Args:
        outside: dotted names in installed packages and builtins.
        words: attributes that the code reads, of whatever object.
    """
    for name in sorted(outside):
        head, _, rest = name.partition(".")
        if head == "builtins" and rest.partition(".")[0] in _BUILTINS:
            return rest
        if head == "inspect" and rest.partition(".")[0] in _INSPECT:
            return name
        if name in _LOADERS or (name == "numpy.load" and "allow_pickle" in words):
            return name
        if _is_below(name, _MODULES) and not _is_below(name, _HARMLESS) and name not in ("importlib", "pickle"):
            return name
    return next(iter(sorted(_ATTRIBUTES.intersection(words) | (_SOURCE.intersection(words)))), None)


def names_in_texts(words: Collection[str], texts: Iterable[str]) -> set[str]:
    """Names that code may read by its texts: `frame.query("n < @LIMIT")`, and tables that SQL names."""
    if not _READS_TEXTS.intersection(words):
        return set()
    return {name for text in texts for name in re.findall(r"[^\W\d]\w*", text)}


def reads_source(words: Iterable[str]) -> bool:
    """Whether code reads its own source or line numbers, so that even comments count."""
    return bool(_SOURCE.intersection(words))


def _is_below(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


ORDER = "(order)"
"""Label of a digest of the order of statements, behind the file's name."""
SOURCE = "(text)"
"""Label of a digest of a whole file, where code reads its own source."""


@dataclass(frozen=True)
class Place:
    """Where a piece of code stands.

    Attributes:
        line: from 1.
        text: the statement's first line, where it has no name; else empty.
        because: the code for which everything counts, where this counts for nothing else; else empty.
    """

    line: int
    text: str = ""
    because: str = ""


@dataclass
class Reach:
    """What some functions of a recipe reach.

    Attributes:
        digests: label of each piece ("recipe.py:build_model") -> digest of what it means.
        places: label -> where it stands now.
        pieces: the pieces themselves.
        everything: why all files count as a whole ("eval, recipe.py:12"); None where they do not.
        outside: the dotted names in installed packages and builtins that they lead to.
    """

    digests: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    everything: str | None = None
    outside: set[str] = field(default_factory=set)


class _Walk:
    """A walk over the pieces of a program; each is visited once."""

    def __init__(self, program: Program, effects: ImportEffects) -> None:
        self._program = program
        self._effects = effects
        self.pieces: dict[Piece, None] = {}
        self._ran: set[str] = set()
        self._whole: set[str] = set()
        self.everything: str | None = None
        self.outside: set[str] = set()
        self._waiting: list[Piece] = []

    def run(self, file: str) -> None:
        """Execute a file: its statements with effects, and the files that it imports."""
        waiting = [file]
        while waiting:
            name = waiting.pop()
            if name in self._ran:
                continue
            self._ran.add(name)
            for piece in self._program.modules[name].pieces:
                if not piece.is_unconditional:
                    continue
                if piece.target is not None:
                    waiting.extend(self._program.imported(name, piece.target))
                if self._effects.has_effect(piece):
                    self._waiting.append(piece)

    def enter(self, file: str, name: str) -> None:
        """Use a name of a file from outside."""
        module = self._program.modules[file]
        self._waiting.extend(module.by_name.get(name, ()))
        if name not in module.by_name and "__getattr__" in module.by_name:
            self._take_whole(file)
        # An imported function counts as well, not only the statement that imports it.
        self._note_maker(self._take(self._program.resolve(file, (name,))), file, name)
        self.finish()

    def finish(self) -> None:
        """Visit what is waiting, and what that reaches."""
        while self._waiting:
            piece = self._waiting.pop()
            if piece not in self.pieces:
                self.pieces[piece] = None
                self._visit(piece)

    def take_everything(self) -> None:
        """Count every file as a whole."""
        for file in self._program.modules:
            self._take_whole(file)
        self.finish()

    def _visit(self, piece: Piece) -> None:
        program, found = self._program, piece.references
        if piece.target is not None:
            self._visit_import(piece, program.imported(piece.file, piece.target))
            return
        for target in found.imports:
            for file in program.imported(piece.file, target):
                self.run(file)
        outside: set[str] = set()
        named = names_in_texts(found.words, found.texts) & program.modules[piece.file].by_name.keys()
        for chain in found.chains | {(name,) for name in named}:
            outside |= self._take(program.resolve(piece.file, chain, found.aliases))
        self._note_maker(outside, piece.file, piece.line, words=found.words)

    def _take(self, meaning: Meaning) -> set[str]:
        """Count what a name means; returns the names outside of the project that it leads to."""
        self._waiting.extend(meaning.pieces)
        for file in meaning.runs:
            self.run(file)
        for file in meaning.wholes:
            self._take_whole(file)
        self.outside |= meaning.outside
        return meaning.outside

    def _note_maker(self, outside: set[str], file: str, place: int | str, *, words: Collection[str] = ()) -> None:
        maker = names_made_at_run_time(outside, words=words)
        if maker is not None and self.everything is None:
            self.everything = f"{maker}, {file}:{place}"

    def _visit_import(self, piece: Piece, files: Sequence[str]) -> None:
        for file in files:
            if piece.is_unconditional:
                self.run(file)
            if piece.names == ("*",) and not self._program.is_known(piece):
                self._take_whole(file)

    def _take_whole(self, file: str) -> None:
        if file in self._whole:
            return
        self._whole.add(file)
        self.run(file)
        for piece in self._program.modules[file].pieces:
            self._waiting.append(piece)
            # What the file imports can be read from it by name; below `if TYPE_CHECKING` it imports nothing.
            names = piece.names if piece.target is not None else piece.references.aliases.keys() & set(piece.names)
            for name in sorted(names) if piece.is_unconditional else ():
                if name != "*":
                    self._note_maker(self._take(self._program.resolve(file, (name,))), file, piece.line)


class Code:
    """The code of a recipe: its file, the file that it falls back to, and what they import.

    Args:
        program: the modules.
        files: the recipe's file, then the one that has what the first does not define.
    """

    def __init__(self, program: Program, files: Sequence[str]) -> None:
        self.program = program
        self.files = tuple(files)
        self._effects = ImportEffects(program)
        self._reached: dict[tuple[str, ...], Reach] = {}

    @classmethod
    def of(cls, paths: Sequence[Path], closures: Sequence[Closure]) -> Code:
        """The code of recipe files, given the closure of each."""
        joined = reduce(Closure.joined, closures)
        names = [closure.name_of(path) for path, closure in zip(paths, closures, strict=True)]
        return cls(Program(joined), names)

    def defines(self, name: str) -> bool:
        """Whether the recipe may define the function `name`."""
        return bool(self._homes(name))

    def functions(self, name: str) -> list[tuple[str, ast.FunctionDef]]:
        """The definitions of a function of the recipe, which it may import, each with its file."""
        pieces = [piece for file in self._homes(name) for piece in self.program.resolve(file, (name,)).pieces_here]
        return [(piece.file, piece.node) for piece in pieces if isinstance(piece.node, ast.FunctionDef)]

    def reach(self, functions: Sequence[str]) -> Reach:
        """What these functions of the recipe reach, and what runs when it is imported."""
        key = tuple(sorted(functions))
        if key not in self._reached:
            self._reached.setdefault(key, self._reach(key))
        return self._reached[key]

    def _homes(self, name: str) -> list[str]:
        """The files that a function may come from: up to the first that defines it for certain."""
        found: list[str] = []
        for file in self.files:
            names = self.program.modules[file].by_name
            pieces = names.get(name, [])
            starred = any(self.program.may_bind(piece, name) for piece in names.get("*", ()))
            if pieces or starred or "__getattr__" in names:
                found.append(file)
            # Bound for certain, and not only under a condition.
            if any(piece.is_simple and piece.is_unconditional for piece in pieces):
                break
        return found

    def _reach(self, functions: Sequence[str]) -> Reach:
        walk = _Walk(self.program, self._effects)
        for file in self.files:
            walk.run(file)
        walk.finish()
        for name in functions:
            for file in self._homes(name):
                walk.enter(file, name)
        if self.program.unattributed and walk.everything is None:
            walk.everything = f"sys.path, {self.program.unattributed[0]}"
        named = set(walk.pieces)
        if walk.everything is not None:
            walk.take_everything()
        found = Reach(pieces=list(walk.pieces), everything=walk.everything, outside=walk.outside)
        for _, module in sorted(self.program.modules.items()):
            self._add_module(found, module, walk.pieces, named)
        return found

    def _add_module(self, found: Reach, module: Module, reached: dict[Piece, None], named: set[Piece]) -> None:
        pieces = [piece for piece in module.pieces if piece in reached]
        grouped: dict[str, list[str]] = {}
        for piece in pieces:
            grouped.setdefault(piece.label, []).append(piece.digest)
            text = "" if piece.is_simple else piece.text
            because = "" if piece in named else found.everything or ""
            found.places.setdefault(piece.label, Place(piece.line, text, because))
        # A name that is bound several times is one entry.
        found.digests |= {
            label: digests[0] if len(digests) == 1 else _combine(digests) for label, digests in grouped.items()
        }
        counts = module.rebinds or any(self._effects.has_effect(piece) for piece in module.pieces)
        if pieces and (counts or found.everything is not None):
            # Statements with effects mean something else in another order.
            found.digests[f"{module.name}:{ORDER}"] = _combine([piece.label for piece in pieces])
            found.places[f"{module.name}:{ORDER}"] = Place(pieces[0].line)
        if found.everything is not None and any(reads_source(piece.references.words) for piece in reached):
            found.digests[f"{module.name}:{SOURCE}"] = self.program.texts[module.name]


def _combine(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
