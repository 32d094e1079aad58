"""Which statements only define a name, and which may change something else when their module is imported.

A definition belongs to the code that uses its name; anything else counts for every stage. In doubt a statement has
an effect: only literals, operators, and calls that are known to change nothing are definitions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

from trainflow.tasks.code.definitions import Piece, is_names
from trainflow.tasks.code.known_calls import (
    BASES,
    CONSUMERS,
    DECORATORS,
    HOLDERS,
    ITERATORS,
    METHODS,
    PATCHERS,
    PURE,
    QUIET_PACKAGES,
)
from trainflow.tasks.code.program import Meaning, Program
from trainflow.tasks.code.references import Chain, ImportTarget, bound_names

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CLASS_KEYWORDS = {"total", "frozen", "slots", "kw_only"}
_PARTS = (
    ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        # The parts of `for x in y` belong to the comprehension, a keyword's value to the call.
        yield from ast.iter_child_nodes(each) if isinstance(each, ast.comprehension | ast.keyword) else (each,)


class ImportEffects:
    """Answers whether a piece of a program may change more than the names that it binds."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[Piece, bool] = {}
        self._used: dict[str, set[str]] = {}
        # All of them now and in one order: the answer for names that are defined by each other depends on it.
        for _, module in sorted(program.modules.items()):
            for piece in module.pieces:
                self.has_effect(piece)

    def has_effect(self, piece: Piece) -> bool:
        """Whether executing the piece may change more than the names that it binds."""
        if piece not in self._known:
            # Two constants that are defined by each other count as effects.
            self._known[piece] = True
            self._known[piece] = self._find(piece)
        return self._known[piece]

    def _find(self, piece: Piece) -> bool:
        if not piece.is_unconditional:
            return False
        if piece.target is not None:
            return self._import_has_effect(piece, piece.target)
        return not piece.is_simple or not self._is_definition(piece.file, piece.node, frozenset())

    # -- imports ------------------------------------------------------------------------------------------------------

    def _import_has_effect(self, piece: Piece, target: ImportTarget) -> bool:
        files = self._program.imported(piece.file, target)
        if piece.names == ("*",) and not self._program.is_known(piece):
            return True
        if files:
            return any(self._file_has_effect(file) for file in self._all_imported(files))
        package = target.module.partition(".")[0]
        if package in PATCHERS:
            return True
        quiet = package in sys.stdlib_module_names or package in QUIET_PACKAGES or target.level > 0
        # Imported and used nowhere: for what the import does.
        return not quiet and piece.names[0] not in self._names_used(piece.file)

    def _all_imported(self, files: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(files)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            for piece in self._program.modules[name].pieces:
                if piece.target is not None and piece.is_unconditional:
                    waiting.extend(self._program.imported(name, piece.target))
        return found

    def _file_has_effect(self, file: str) -> bool:
        """Whether a file's own statements have effects; imports of project files are looked at one by one."""
        return any(
            self.has_effect(piece)
            for piece in self._program.modules[file].pieces
            if piece.target is None or not self._program.imported(file, piece.target) or piece.names == ("*",)
        )

    def _names_used(self, file: str) -> set[str]:
        if file not in self._used:
            pieces = self._program.modules[file].pieces
            # Another file may read it from here (`helpers.np`).
            elsewhere = {name for module in self._program.modules.values() for each in module.pieces
                         if each.target is not None and self._program.imported(each.file, each.target)
                         for name in (each.target.name,) if name}  # fmt: skip
            self._used[file] = {chain[0] for piece in pieces for chain in piece.references.chains} | elsewhere
        return self._used[file]

    # -- statements ---------------------------------------------------------------------------------------------------

    def _is_definition(self, file: str, node: ast.stmt, local: frozenset[str]) -> bool:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return True
        if isinstance(node, _Function):
            return self._is_function_definition(file, node, local)
        if isinstance(node, ast.ClassDef):
            return self._is_class_definition(file, node, local)
        if isinstance(node, ast.Assign):
            named = all(is_names(each) for each in node.targets)
            # Unpacking reads an iterator to its end.
            unpacks = all(isinstance(each, ast.Tuple | ast.List) for each in node.targets)
            kept = self._keeps_iterator(file, node.value, consumed=unpacks)
            return named and not kept and self._is_plain(file, node.value, local)
        if isinstance(node, ast.AnnAssign):
            value = node.value is None or (
                self._is_plain(file, node.value, local) and not self._keeps_iterator(file, node.value)
            )
            return isinstance(node.target, ast.Name) and value and self._is_plain(file, node.annotation, local)
        return False

    def _is_function_definition(self, file: str, node: _Function, local: frozenset[str]) -> bool:
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        annotations = [each.annotation for each in (*listed, arguments.vararg, arguments.kwarg) if each is not None]
        parts = [*arguments.defaults, *arguments.kw_defaults, *annotations, node.returns]
        defaults = [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
        if any(self._keeps_iterator(file, each) for each in defaults):
            return False
        return all(self._is_plain(file, part, local) for part in parts if part is not None) and all(
            self._is_quiet_decorator(file, each, local) for each in node.decorator_list
        )

    def _is_class_definition(self, file: str, node: ast.ClassDef, local: frozenset[str]) -> bool:
        for keyword in node.keywords:
            if keyword.arg not in _CLASS_KEYWORDS and ast.unparse(keyword.value).rpartition(".")[2] != "ABCMeta":
                return False
        inside = local | bound_names(node.body)
        if "__class_getitem__" in inside:
            return False
        return (
            all(self._is_quiet_base(file, base, local) for base in node.bases)
            and all(self._is_quiet_decorator(file, each, local) for each in node.decorator_list)
            and all(self._is_definition(file, each, inside) for each in node.body)
        )

    def _is_quiet_base(self, file: str, base: ast.expr, local: frozenset[str]) -> bool:
        """Whether deriving from a class runs no code that could register the new one."""
        if isinstance(base, ast.Subscript):
            return self._is_quiet_base(file, base.value, local) and self._is_plain(file, base.slice, local)
        meaning = self._meaning(file, base, local)
        if meaning is None:
            return False
        classes = [piece.node for piece in meaning.pieces if piece.target is None]
        own = all(
            isinstance(each, ast.ClassDef) and not {"__init_subclass__", "__set_name__"} & bound_names(each.body)
            for each in classes
        )
        outside = all(name.partition(".")[0] in BASES or name in PURE for name in meaning.outside)
        return own and outside and not any(self.has_effect(piece) for piece in meaning.pieces)

    def _is_quiet_decorator(self, file: str, node: ast.expr, local: frozenset[str]) -> bool:
        """Whether a decorator does no more than wrap what it decorates."""
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Call):
            values = [*node.args, *(each.value for each in node.keywords)]
            if not all(self._is_plain(file, value, local) for value in values):
                return False
        if isinstance(called, ast.Attribute) and called.attr in ("setter", "getter", "deleter"):
            # Of a property of the same class.
            return isinstance(called.value, ast.Name) and called.value.id in local
        meaning = self._meaning(file, called, local)
        if meaning is None or meaning.wholes:
            return False
        own = [piece for piece in meaning.pieces if piece.target is None]
        if own:
            return not isinstance(node, ast.Call) and all(self._only_wraps(piece) for piece in own)
        return bool(meaning.outside) and meaning.outside <= DECORATORS

    # -- expressions --------------------------------------------------------------------------------------------------

    def _is_plain(self, file: str, node: ast.expr, local: frozenset[str]) -> bool:
        """Whether evaluating an expression changes nothing, and gives a value whose operators change nothing."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            meaning = self._meaning(file, node, local)
            if meaning is None:
                return self._is_plain(file, node.value, local) if isinstance(node, ast.Attribute) else False
            return not any(self.has_effect(piece) for piece in meaning.pieces)
        if isinstance(node, ast.Lambda):
            defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
            return all(self._is_plain(file, each, local) for each in defaults)
        if isinstance(node, _COMPREHENSIONS):
            inside = local | bound_names([each.target for each in node.generators])
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            parts += [part for each in node.generators for part in (each.iter, *each.ifs)]
            return all(self._is_plain(file, part, inside) for part in parts)
        if isinstance(node, ast.Call):
            return self._is_plain_call(file, node, local)
        if isinstance(node, _PARTS):
            return all(
                self._is_plain(file, part, local) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)
            )
        return False

    def _is_plain_call(self, file: str, node: ast.Call, local: frozenset[str]) -> bool:
        values = [*node.args, *(each.value for each in node.keywords)]
        if any(each.arg == "key" for each in node.keywords):
            return False
        if not all(self._is_plain(file, value, local) for value in values):
            return False
        meaning = self._meaning(file, node.func, local)
        if meaning is not None and meaning.outside and not meaning.pieces_here:
            holds = meaning.outside <= HOLDERS
            return meaning.outside <= PURE and (holds or not any(self._is_callable(file, each) for each in values))
        if any(self._is_callable(file, value) for value in values):
            return False
        own = [piece for piece in meaning.pieces if piece.target is None] if meaning is not None else []
        if own and all(len(self._chain(node.func) or ()) == 1 or piece.file != file for piece in own):
            return all(self._only_wraps(piece) or self._only_holds(piece) for piece in own)
        # A method of a plain value, such as "a b".split().
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in METHODS:
            return False
        value = node.func.value
        return self._is_plain(file, value, local) and not self._is_callable(file, value)

    def _keeps_iterator(self, file: str, node: ast.AST, *, consumed: bool = False) -> bool:
        """Whether a value may hold an iterator, which another statement would use up.

        Args:
            consumed: what reads the value here reads it to its end.
        """
        if isinstance(node, ast.Lambda):
            return False
        inner = isinstance(node, ast.Starred)
        if isinstance(node, ast.GeneratorExp) and not consumed:
            return True
        if isinstance(node, ast.Call):
            meaning = self._meaning(file, node.func, frozenset())
            outside = meaning.outside if meaning is not None else set()
            makes = any(name in ITERATORS or name.startswith("itertools.") for name in outside)
            if makes and not consumed:
                return True
            joins = isinstance(node.func, ast.Attribute) and node.func.attr == "join"
            inner = makes or joins or (bool(outside) and outside <= CONSUMERS)
        iterated = {id(each.iter) for each in node.generators} if isinstance(node, _COMPREHENSIONS) else set()
        return any(self._keeps_iterator(file, each, consumed=inner or id(each) in iterated) for each in _children(node))

    def _is_callable(self, file: str, node: ast.expr) -> bool:
        """Whether a value is code of the project, which the called function might call."""
        if isinstance(node, ast.Lambda):
            return True
        meaning = self._meaning(file, node, frozenset())
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        return meaning is not None and any(isinstance(piece.node, kinds) for piece in meaning.pieces)

    def _only_wraps(self, piece: Piece) -> bool:
        """Whether calling a function of the project does no more than define functions and return plain values."""
        node = piece.node
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or self.has_effect(piece):
            return False
        names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        local = frozenset(bound_names(node.body) | {each.arg for each in names if each is not None})
        return all(self._is_quiet_line(piece.file, line, local) for line in node.body)

    def _is_quiet_line(self, file: str, line: ast.stmt, local: frozenset[str]) -> bool:
        if isinstance(line, ast.Return):
            return line.value is None or (
                self._is_plain(file, line.value, local) and not self._keeps_iterator(file, line.value)
            )
        if isinstance(line, ast.Assign):
            return all(isinstance(each, ast.Name) for each in line.targets) and self._is_plain(file, line.value, local)
        if isinstance(line, _Function):
            return self._is_definition(file, line, local)
        return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)

    def _only_holds(self, piece: Piece) -> bool:
        """Whether calling a class of the project makes a mere holder of values: a dataclass without code of its own."""
        node = piece.node
        if not isinstance(node, ast.ClassDef) or self.has_effect(piece):
            return False
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        if not bases <= {"NamedTuple", "object"}:
            return False
        for decorator in node.decorator_list:
            meaning = self._meaning(
                piece.file, decorator.func if isinstance(decorator, ast.Call) else decorator, frozenset()
            )
            # One of the project may change what calling the class does.
            if meaning is None or meaning.pieces_here or not meaning.outside <= DECORATORS:
                return False
        for each in node.body:
            if isinstance(each, _Function):
                special = each.name.startswith("__") or each.name in METHODS or each.decorator_list
                if special:
                    return False
        # A factory of a field is called for each new object.
        factories = [
            keyword.value
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            for keyword in call.keywords
            if keyword.arg == "default_factory"
        ]
        return all(ast.unparse(each) in ("list", "dict", "set", "tuple") for each in factories)

    def _meaning(self, file: str, node: ast.expr, local: frozenset[str]) -> Meaning | None:
        """What names with attributes mean; None for another expression."""
        chain = self._chain(node)
        if chain is None:
            return None
        if chain[0] in local:
            return Meaning(is_local=True)
        return self._program.resolve(file, chain)

    @staticmethod
    def _chain(node: ast.expr) -> Chain | None:
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else None
