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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainflow.tasks.code.closure import OURS, Closure, recipe_module
from trainflow.tasks.code.syntax import (
    Chain,
    Function,
    ImportTarget,
    bound_names,
    chain_of,
    digest_syntax,
    import_targets,
    module_names,
    reads_docstrings,
)

ORDER = "(order)"
"""Label of a digest of the order of statements, behind the file's name."""
SOURCE = "(text)"
"""Label of a digest of a whole file, where code reads its own source."""


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- tables of names --------------------------------------------------------------------------------------------------
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
"""What of these only reads facts or writes."""
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
_DEPTH = 40
"""A name that is imported from file to file more often than this counts as the whole file."""


# -- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Piece:
    """One statement of a module's top level, or one name of an import statement.

    Attributes:
        file: path of the module below the root.
        names: the names that it binds.
        target: what an imported name means; None for a statement of another kind.
        chains: names of the module, or builtins, that it refers to.
        aliases: names that import statements inside of it bind -> what they mean.
        words: every identifier, attribute, keyword and parameter, but the names that an assignment binds; of an
            import the name that it takes.
    """

    file: str
    node: ast.stmt
    names: tuple[str, ...]
    digest: str
    target: ImportTarget | None = None
    chains: frozenset[Chain] = frozenset()
    aliases: Mapping[str, list[ImportTarget]] = field(default_factory=dict)
    words: frozenset[str] = frozenset()

    @property
    def is_simple(self) -> bool:
        """Whether it can be a mere definition."""
        node = self.node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return all(_is_names(target) for target in _targets(node))
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


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_names(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(_is_names(element) for element in target.elts)
    return isinstance(target, ast.Name)


def _cut(file: str, tree: ast.Module, docstrings: bool) -> list[Piece]:
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
    return pieces


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
        parts = [node.value, *(target for target in _targets(node) if not _is_names(target))]
    words = (
        getattr(inner, name, None)
        for part in parts
        for inner in ast.walk(part)
        for name in ("id", "attr", "arg", "name")
    )
    return frozenset(word for word in words if isinstance(word, str))


# -- names ------------------------------------------------------------------------------------------------------------


@dataclass
class Meaning:
    """The meaning of a chain of names.

    Attributes:
        pieces: the pieces that it reads, imported names included.
        wholes: modules of the project of which anything may be read.
        outside: the dotted names in installed packages or builtins that it leads to.
    """

    pieces: list[Piece] = field(default_factory=list)
    wholes: list[str] = field(default_factory=list)
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

    def is_project(self, file: str, target: ImportTarget) -> bool:
        """Whether an import leads to a module of the project."""
        return bool(self._stems(file, target))

    def resolve(self, file: str, chain: Chain, aliases: Mapping[str, list[ImportTarget]] | None = None) -> Meaning:
        """The meaning of a chain of names in a file.

        Args:
            aliases: names that imports inside of the code bind.
        """
        return self._resolve(file, chain, aliases or {}, _DEPTH)

    def _resolve(self, file: str, chain: Chain, aliases: Mapping[str, list[ImportTarget]], depth: int) -> Meaning:
        found, (head, *rest) = Meaning(), chain
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
        stems = self._stems(file, star)
        # Of a package outside of the project the names are unknown; a submodule may be a name of its package.
        return (
            not stems
            or bool(self._known(f"{stem}/{name}" for stem in stems))
            or any(self.may_define(other, name, seen) for other in self._files(stems))
        )

    def _follow(self, file: str, target: ImportTarget, rest: Sequence[str], depth: int) -> Meaning:
        """The meaning of the attributes `rest` of an imported name."""
        stems = self._stems(file, target)
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
                found.add(self._resolve(file, tuple(wanted), {}, depth - 1))
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

    def _stems(self, file: str, target: ImportTarget) -> list[str]:
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


# -- effects of imports -----------------------------------------------------------------------------------------------


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
        return piece.names[0] not in used and not self._program.is_project(piece.file, target)

    def _is_definition(self, file: str, node: ast.stmt) -> bool:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return True
        if isinstance(node, Function):
            return self._is_function(file, node)
        if isinstance(node, ast.ClassDef):
            return self._is_class(file, node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            parts = [node.value, node.annotation if isinstance(node, ast.AnnAssign) else None]
            named = all(_is_names(target) for target in _targets(node))
            return named and all(self._is_plain(file, part) for part in parts if part is not None)
        return False

    def _is_function(self, file: str, node: Function) -> bool:
        annotations = [inner.annotation for inner in ast.walk(node.args) if isinstance(inner, ast.arg)]
        parts = [*node.args.defaults, *node.args.kw_defaults, *annotations, node.returns]
        return all(self._is_plain(file, part) for part in parts if part is not None) and all(
            self._is_quiet_decorator(file, decorator) for decorator in node.decorator_list
        )

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

        Args:
            operated: the value is an operand; that of a mere definition does nothing when it is operated on.
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
    """The place of a piece of code.

    Attributes:
        line: from 1; of a function the line with its name.
        text: the statement's first line, where it has no name; else empty.
        because: the code for which everything counts, where this counts for nothing else; else empty.
    """

    line: int
    text: str = ""
    because: str = ""


@dataclass
class Reach:
    """The code that some functions of a recipe reach.

    Attributes:
        digests: label of each piece ("recipe.py:build_model") -> digest of what it means.
        places: label -> where it stands now.
        named: the pieces that the functions lead to.
        pieces: these, and what runs when the recipe is imported.
        everything: why all files count as a whole ("eval, recipe.py:12"); None where they do not.
        outside: the dotted names in installed packages and builtins that they lead to.
    """

    digests: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    named: dict[Piece, None] = field(default_factory=dict)
    pieces: dict[Piece, None] = field(default_factory=dict)
    everything: str | None = None
    outside: set[str] = field(default_factory=set)


class Code:
    """The code of a recipe: its file, the file that it falls back to, and what they import.

    Args:
        closure: all of the files.
        recipes: the recipe's file, then the one that has what the first does not define.
    """

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
        """What these functions of the recipe reach, and what runs when it is imported."""
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
    """What of these lets code reach names that it does not spell out; None for nothing.

    Args:
        outside: dotted names in installed packages and builtins.
        words: attributes that the code reads, of whatever object.
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
