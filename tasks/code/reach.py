"""The code that a stage's functions reach in a recipe, and the digests by which a key holds it.

A file is cut at its top level into pieces. A function, a class, an imported name and a constant made of literals belong
to the code that uses their names. Any other statement (a call, a loop, a condition, a changed global) may change what
others mean: it counts for every stage. The walk starts at the functions that a stage calls and follows names: through
helpers, classes, constants and imported files of the project. Where names are made at run time (`eval`, `globals()`,
unpickling), everything counts.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainflow.tasks.code.closure import OURS, Closure
from trainflow.tasks.code.program import Meaning, Piece, Program, assigned_targets, binds_names
from trainflow.tasks.code.syntax import Chain, Function, ImportTarget, chain_of

ORDER = "(order)"  # label of a digest of the order of statements, behind the file's name
SOURCE = "(text)"  # label of a digest of a whole file, where code reads its own source


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUILTINS = {"eval", "exec", "compile", "globals", "locals", "vars", "dir", "__import__", "breakpoint", "__builtins__"}
_MAKERS = (
    "builtins.__dict__", "cPickle", "cloudpickle", "code", "dill", "gc", "hydra.utils", "importlib", "joblib",
    "marshal", "pandas.read_pickle", "pickle", "pkgutil", "pydoc", "runpy", "shelve", "sys._getframe", "sys.modules",
    "torch.load", "inspect.getmembers", "inspect.getmodule", "inspect.stack", "inspect.currentframe", "inspect.trace",
)  # fmt: skip
"""Names outside of the project by which code reaches names that it does not spell out."""
_HARMLESS = (
    "importlib.metadata.version", "importlib.metadata.PackageNotFoundError", "importlib.resources",
    "importlib.util.find_spec", "pickle.HIGHEST_PROTOCOL", "pickle.PickleError", "pickle.dump", "pickle.dumps",
)  # fmt: skip
"""Those that only read facts or write."""
_SOURCE = {"getsource", "getsourcelines", "getsourcefile", "linecache", "co_firstlineno", "f_lineno", "tb_lineno"}
_ATTRIBUTES = _SOURCE | {
    "__globals__", "__subclasses__", "_getframe", "f_globals", "f_back", "__builtins__", "__loader__", "__spec__",
    "exec_module", "load_module", "tb_frame",
}  # fmt: skip
_READS_TEXTS = {"query", "eval", "evaluate", "sql"}
_REGISTERS = {"__class_getitem__", "__init_subclass__", "__set_name__"}
"""Methods by which the definition of one class changes another."""
_READ_BY = {"__get__", "__getattr__", "__getattribute__", "cached_property", "property"}
"""Code that a mere read of an attribute executes."""
_CLASS_KEYWORDS = {"total", "frozen", "slots", "kw_only"}
_PATCHERS = {"intel_extension_for_pytorch", "lovely_tensors", "sklearnex", "torch_xla", "unsloth"}
"""Packages that change others when they are imported."""
BASES = _split("""
    abc builtins collections dataclasses datasets enum keras lightning numpy peft pydantic sklearn tokenizers torch
    torchmetrics torchvision trainer_lib transformers typing typing_extensions
""")
"""Packages whose classes keep no list of the classes derived from them."""
_VALUES = _split("""
    builtins.bool builtins.bytes builtins.dict builtins.float builtins.frozenset builtins.int builtins.len
    builtins.list builtins.object builtins.range builtins.round builtins.set builtins.str builtins.sum
    builtins.tuple collections.OrderedDict collections.namedtuple dataclasses.field datetime.timedelta enum.auto
    functools.partial logging.getLogger operator.itemgetter os.environ.get os.getenv os.path.dirname os.path.join
    pathlib.Path re.compile torch.cuda.is_available torch.device typing.NamedTuple typing.NewType typing.ParamSpec
    typing.TypeVar typing.TypedDict
""")
"""Calls that do no more than make a value."""
_DECORATORS = _split("""
    abc.abstractmethod builtins.classmethod builtins.property builtins.staticmethod contextlib.asynccontextmanager
    contextlib.contextmanager dataclasses.dataclass enum.unique functools.cache functools.cached_property
    functools.lru_cache functools.total_ordering functools.wraps torch.compile torch.enable_grad
    torch.inference_mode torch.no_grad typing.final typing.overload typing.override typing.runtime_checkable
    typing_extensions.override
""")
"""Decorators that only wrap or mark what they decorate."""
_PARTS = (
    ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.ListComp, ast.SetComp, ast.DictComp, ast.Attribute,
    ast.comprehension,
)  # fmt: skip


class _Effects:
    """Whether executing a piece may change more than the names that it binds. In doubt it may."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[Piece, bool] = {}
        words = {word for piece in program.all_pieces() for word in piece.words}
        self._registers = bool(_REGISTERS & words)
        self._reads_act = bool(_READ_BY & words)
        # All of them now and in one order: the answer for names that are defined by each other depends on it.
        for _, pieces in sorted(program.modules.items()):
            for piece in pieces:
                self.has_effect(piece)

    def has_effect(self, piece: Piece) -> bool:
        """Whether the piece may change something else."""
        if piece not in self._known:
            # Two constants that are defined by each other count as effects.
            self._known[piece] = True
            if piece.target is None:
                self._known[piece] = not self._is_definition(piece.file, piece.node)
            else:
                self._known[piece] = self._import_has_effect(piece, piece.target)
        return self._known[piece]

    def _import_has_effect(self, piece: Piece, target: ImportTarget) -> bool:
        """Of an import from the project its files count by themselves."""
        if piece.names == ("*",) or target.top in _PATCHERS:
            return True
        if not target.top or target.top in OURS or target.top in sys.stdlib_module_names:
            return False
        # Imported and used nowhere in the file: for what the import does.
        used = {chain[0] for other in self._program.modules[piece.file] for chain in other.chains}
        return piece.names[0] not in used and not self._program.find_stems(piece.file, target)

    def _is_definition(self, file: str, node: ast.stmt) -> bool:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return True
        if isinstance(node, Function):
            annotations = [inner.annotation for inner in ast.walk(node.args) if isinstance(inner, ast.arg)]
            signature = [*node.args.defaults, *node.args.kw_defaults, *annotations, node.returns]
            return all(self._is_plain(file, part) for part in signature if part is not None) and all(
                self._is_quiet_decorator(file, decorator) for decorator in node.decorator_list
            )
        if isinstance(node, ast.ClassDef):
            return self._is_class(file, node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            parts = [node.value, node.annotation if isinstance(node, ast.AnnAssign) else None]
            named = all(binds_names(target) for target in assigned_targets(node))
            return named and all(self._is_plain(file, part) for part in parts if part is not None)
        return False

    def _is_class(self, file: str, node: ast.ClassDef) -> bool:
        return (
            all(
                keyword.arg in _CLASS_KEYWORDS or ast.unparse(keyword.value).rpartition(".")[2] == "ABCMeta"
                for keyword in node.keywords
            )
            and all(self._is_quiet_base(file, base) for base in node.bases)
            and all(self._is_quiet_decorator(file, decorator) for decorator in node.decorator_list)
            and all(self._is_definition(file, statement) for statement in node.body)
        )

    def _is_quiet_base(self, file: str, base: ast.expr) -> bool:
        """Whether deriving from a class runs no code that could register the new one."""
        if isinstance(base, ast.Subscript):
            return self._is_quiet_base(file, base.value) and self._is_plain(file, base.slice)
        chain = chain_of(base)
        if chain is None:
            return self._is_plain(file, base)
        meaning = self._program.resolve(file, chain)
        if any(name.partition(".")[0] not in BASES for name in meaning.outside):
            return False
        quiet = all(isinstance(piece.node, ast.ClassDef) and not self._registers for piece in meaning.pieces_here)
        return quiet and not any(self.has_effect(piece) for piece in meaning.pieces)

    def _is_quiet_decorator(self, file: str, node: ast.expr) -> bool:
        """Whether a decorator does no more than wrap or mark what it decorates."""
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Call) and not self._are_plain_arguments(file, node):
            return False
        if isinstance(called, ast.Attribute) and called.attr in ("setter", "getter", "deleter"):
            chain = chain_of(called)
            return chain is not None and not self._program.binding(file, chain[0])  # a property of the same class
        return self._leads_to(file, called, _DECORATORS)

    def _leads_to(self, file: str, node: ast.expr, names: Collection[str]) -> bool:
        """Whether an expression means nothing but some of these names outside of the project."""
        chain = chain_of(node)
        meaning = Meaning() if chain is None else self._program.resolve(file, chain)
        return not meaning.pieces_here and bool(meaning.outside) and meaning.outside <= set(names)

    def _are_plain_arguments(self, file: str, node: ast.Call) -> bool:
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        return all(self._is_plain(file, value, operated=True) for value in values)

    def _is_plain(self, file: str, node: ast.AST, *, operated: bool = False) -> bool:
        """Whether evaluating an expression changes nothing.

        `operated`: the value is an operand; that of a mere definition does nothing when it is operated on.
        """
        chain = chain_of(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if chain is not None:
            read = len(chain) > 1 and self._reads_act
            pieces = self._program.resolve(file, chain).pieces if operated or read else []
            return not any(self.has_effect(piece) for piece in pieces)
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Lambda):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return all(self._is_plain(file, value) for value in defaults)
        if isinstance(node, ast.Call):
            of_text = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant)
            return self._are_plain_arguments(file, node) and (of_text or self._leads_to(file, node.func, _VALUES))
        if not isinstance(node, _PARTS) or (self._registers and isinstance(node, ast.Subscript)):
            return False
        operated = operated or not isinstance(node, ast.List | ast.Tuple | ast.Dict)
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.comprehension)]
        return all(self._is_plain(file, child, operated=operated) for child in inner)


# -- reach ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The place of a piece of code."""

    line: int  # from 1; of a function the line with its name
    text: str = ""  # the statement's first line, where it has no name; else empty
    because: str = ""  # the code for which everything counts, where this counts for nothing else; else empty


@dataclass
class Reach:
    """The code that some functions of a recipe reach."""

    # Label of each piece ("recipe.py:build_model") -> digest of what it means.
    digests: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # label -> where it stands now
    named: dict[Piece, None] = field(default_factory=dict)  # the pieces that the functions lead to
    pieces: dict[Piece, None] = field(default_factory=dict)  # these, and what runs when the recipe is imported
    everything: str | None = None  # why all files count as a whole ("eval, recipe.py:12"); None where they do not
    # The dotted names in installed packages and builtins that they lead to.
    outside: set[str] = field(default_factory=set)


class Code:
    """The code of a recipe: `recipes` are its file and the one that has what the first does not define."""

    def __init__(self, closure: Closure, recipes: Sequence[Path]) -> None:
        self.closure = closure
        self.program = Program(closure)
        self.files = tuple(closure.name_of(recipe) for recipe in recipes)
        self._effects = _Effects(self.program)
        self._reached: dict[tuple[str, ...], Reach] = {}
        modules = [pieces for file, pieces in self.program.modules.items() if file not in closure.swept]
        self.at_import = self._walk(
            [piece for pieces in modules for piece in pieces if self._effects.has_effect(piece)]
        )

    def defines(self, name: str) -> bool:
        """Whether the recipe may define the function `name`."""
        return bool(self._homes(name))

    def functions(self, name: str) -> list[tuple[str, ast.FunctionDef]]:
        """The definitions of a function of the recipe, which it may import, each with its file."""
        pieces = [piece for file in self._homes(name) for piece in self.program.resolve(file, (name,)).pieces_here]
        return [(piece.file, piece.node) for piece in pieces if isinstance(piece.node, ast.FunctionDef)]

    def reach(self, functions: Sequence[str]) -> Reach:
        """Everything that these functions of the recipe reach, and that runs when it is imported."""
        key = tuple(sorted(functions))
        if key not in self._reached:
            self._reached.setdefault(key, self._reach(key))
        return self._reached[key]

    def _homes(self, name: str) -> list[str]:
        """The files that a function may come from: up to the first that defines it for certain."""
        found: list[str] = []
        for file in self.files:
            if self.program.may_define(file, name):
                found.append(file)
            # Bound for certain, and not only under a condition.
            if any(piece.is_simple for piece in self.program.binding(file, name)):
                break
        return found

    def _reach(self, functions: Sequence[str]) -> Reach:
        found = self._walk([], [(file, name) for name in functions for file in self._homes(name)])
        found.named = found.pieces
        found.pieces = {**self.at_import.pieces, **found.named}
        found.everything = found.everything or self.at_import.everything
        found.outside |= self.at_import.outside
        for file, pieces in sorted(self.program.modules.items()):
            everything = found.everything is not None
            self._add_module(found, file, [piece for piece in pieces if everything or piece in found.pieces])
        return found

    def _add_module(self, found: Reach, file: str, pieces: list[Piece]) -> None:
        digests: dict[str, list[str]] = {}
        for piece in pieces:
            digests.setdefault(piece.label, []).append(piece.digest)
            because = "" if piece in found.pieces else found.everything or ""
            text = "" if piece.is_simple else piece.text
            found.places.setdefault(piece.label, Place(piece.node.lineno, text, because))
        # A name that is bound several times is one entry.
        found.digests |= {label: same[0] if len(same) == 1 else _combine(same) for label, same in digests.items()}
        several = any(len(self.program.binding(file, name)) > 1 for piece in pieces for name in piece.names)
        if pieces and (several or found.everything is not None or any(map(self._effects.has_effect, pieces))):
            # Statements with effects mean something else in another order.
            found.digests[f"{file}:{ORDER}"] = _combine([piece.label for piece in pieces])
            found.places[f"{file}:{ORDER}"] = Place(pieces[0].node.lineno)
        if found.everything is not None and any(_SOURCE & piece.words for piece in self.program.all_pieces()):
            found.digests[f"{file}:{SOURCE}"] = _digest_file(self.closure.paths[file])

    def _walk(self, first: Iterable[Piece], names: Iterable[tuple[str, str]] = ()) -> Reach:
        """Follow the names of pieces, and names that are used from outside."""
        found, waiting, wholes = Reach(), list(first), set[str]()

        def take(file: str, chain: Chain, piece: Piece | None = None) -> set[str]:
            meaning = self.program.resolve(file, chain, piece.aliases if piece is not None else None)
            waiting.extend(meaning.pieces)
            for whole in meaning.wholes:
                if whole not in wholes:
                    wholes.add(whole)
                    waiting.extend(self.program.modules[whole])
                    # What the file imports can be read from it by name.
                    imports = [part for part in self.program.modules[whole] if part.target is not None]
                    for name in {name for part in imports for name in part.names}:
                        note(take(whole, (name,)), whole, name)
            found.outside |= meaning.outside
            return meaning.outside

        def note(outside: set[str], file: str, place: int | str, words: Collection[str] = ()) -> None:
            maker = _maker_of_names(outside, words)
            if maker is not None and found.everything is None:
                found.everything = f"{maker}, {file}:{place}"

        for file, name in names:
            note(take(file, (name,)), file, name)
        while waiting:
            piece = waiting.pop()
            if piece not in found.pieces:
                found.pieces[piece] = None
                outside = {name for chain in self._chains(piece) for name in take(piece.file, chain, piece)}
                note(outside, piece.file, piece.node.lineno, piece.words)
        return found

    def _chains(self, piece: Piece) -> Iterable[Chain]:
        """The names that a piece refers to, those in texts that are read as code included."""
        if not _READS_TEXTS & piece.words:
            return piece.chains
        texts = [node.value for node in ast.walk(piece.node) if isinstance(node, ast.Constant)]
        names = {name for text in texts if isinstance(text, str) for name in re.findall(r"[^\W\d]\w*", text)}
        return {*piece.chains, *((name,) for name in names if self.program.binding(piece.file, name))}


def _maker_of_names(outside: Iterable[str], words: Collection[str]) -> str | None:
    """The construct by which code reaches names that it does not spell out; None: there is none.

    `outside` are dotted names in installed packages and builtins, `words` the attributes that the code reads.
    """
    for name in sorted(outside):
        head, _, rest = name.partition(".")
        if head == "builtins" and rest.partition(".")[0] in _BUILTINS:
            return rest
        if name == "numpy.load" and "allow_pickle" in words:
            return name
        if _is_below(name, _MAKERS) and not _is_below(name, _HARMLESS) and name not in ("importlib", "pickle"):
            return name
    return next(iter(sorted(_ATTRIBUTES.intersection(words))), None)


def _is_below(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _combine(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _digest_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
