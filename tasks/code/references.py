"""What a statement of a module refers to: names of the module with the attributes behind them, imports, and more.

Only names that a function does not hold itself count, as Python's scopes have it: parameters, assigned names, and
targets of comprehensions hide names of the module. Where scopes are doubtful, a name counts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Chain = tuple[str, ...]
"""A name and the attributes read from it: ``helpers.scale.factor`` is ``("helpers", "scale", "factor")``."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_OWN_NAMES = {"locals", "vars", "dir"}
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class ImportTarget:
    """One name of an import statement.

    Attributes:
        level: leading dots of a relative import.
        module: the dotted name after ``from`` or ``import``; empty for ``from . import x``.
        name: the name after ``import`` of a from-import, "*" for all; None: the module itself is bound.
        is_top: ``import a.b`` binds ``a``, and ``import a.b as c`` binds the module ``a.b``.
    """

    level: int
    module: str
    name: str | None = None
    is_top: bool = False


@dataclass
class References:
    """What a piece of code refers to.

    Attributes:
        chains: names of the module (or builtins) with the attributes behind them.
        aliases: names that import statements inside of functions, classes and conditions bind -> what they mean.
        imports: what those statements import.
        words: every identifier, attribute, keyword and parameter.
        texts: every string literal.
        changes: it sets or deletes an attribute or item of something that it does not hold itself.
    """

    chains: set[Chain] = field(default_factory=set)
    aliases: dict[str, list[ImportTarget]] = field(default_factory=dict)
    imports: list[ImportTarget] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    changes: bool = False


def find_references(node: ast.AST, *, annotations: bool) -> References:
    """Find what a statement refers to.

    Args:
        annotations: the annotations of functions are evaluated, or other code reads them.
    """
    visitor = _Visitor(annotations)
    visitor.visit(node)
    return visitor.found


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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            # Decorators and defaults run in this scope, and may hold a `:=`.
            waiting.extend(node.decorator_list)
            if not isinstance(node, ast.ClassDef):
                waiting.extend([*node.args.defaults, *filter(None, node.args.kw_defaults)])
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, _Comprehension):
            # Its targets are its own; a `:=` inside binds here.
            names |= {each.target.id for each in ast.walk(node) if isinstance(each, ast.NamedExpr)}
            continue
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


@dataclass(frozen=True)
class _Scope:
    """The names of one function, or of one comprehension.

    Attributes:
        local: names that it holds itself.
        seen_through: names that it declares global or imports.
        is_function: it is not a comprehension.
    """

    local: set[str]
    seen_through: set[str] = field(default_factory=set)
    is_function: bool = True


class _Visitor(ast.NodeVisitor):
    """Collects references; `_scopes` are the names of the functions around the present node."""

    def __init__(self, annotations: bool) -> None:
        self.found = References()
        self._annotations = annotations
        self._scopes: list[_Scope] = []
        self._in_class = False

    # -- names --------------------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        self.found.words.add(node.id)
        self._refer((node.id,))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._note_change(node)
        self.generic_visit(node)

    def _note_change(self, node: ast.Attribute | ast.Subscript) -> None:
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        own = isinstance(inner, ast.Name) and any(inner.id in scope.local for scope in self._scopes)
        if not isinstance(node.ctx, ast.Load) and not own:
            self.found.changes = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note_change(node)
        attributes: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
            inner = inner.value
        self.found.words.update(attributes)
        if isinstance(inner, ast.Name):
            self.found.words.add(inner.id)
            self._refer((inner.id, *reversed(attributes)))
        else:
            self.visit(inner)

    def visit_Global(self, node: ast.Global) -> None:
        self.found.words.add("global")
        for name in node.names:
            self.found.chains.add((name,))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.texts.add(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        alone = not (node.args or node.keywords)
        # Outside of functions these are the names of the module.
        if name in _OWN_NAMES and alone and not any(scope.is_function for scope in self._scopes):
            self.found.words.add(f"{name}()")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg:
            self.found.words.add(node.arg)
        self.generic_visit(node)

    def _refer(self, chain: Chain) -> None:
        for scope in reversed(self._scopes):
            if chain[0] in scope.seen_through:
                break
            if chain[0] in scope.local:
                return
        self.found.chains.add(chain)

    # -- imports inside of functions ----------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        self._import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, target in import_targets(node):
            self.found.imports.append(target)
            self.found.aliases.setdefault(name, []).append(target)
            if self._in_class:
                # An attribute of the class, which code reads without naming the import.
                self.found.chains.add((name,))

    # -- scopes -------------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: _Function) -> None:
        for each in (*node.decorator_list, *getattr(node, "type_params", ())):
            self.visit(each)
        # A decorator may read the annotations of its function.
        self._arguments(node.args, annotations=self._annotations or bool(node.decorator_list))
        if node.returns is not None and (self._annotations or node.decorator_list):
            self._annotation(node.returns)
        self.found.words.add(node.name)
        self._enter(node.args, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._arguments(node.args, annotations=False)
        self._enter(node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.found.words.add(node.name)
        for each in (*node.decorator_list, *node.bases, *node.keywords, *getattr(node, "type_params", ())):
            self.visit(each)
        # The body of a class hides nothing from its methods, and its own names may be the module's before they are set.
        outer, self._in_class = self._in_class, True
        for statement in node.body:
            self.visit(statement)
        self._in_class = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        # Those of a class are evaluated, and read by dataclasses and pydantic.
        self._annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def _arguments(self, arguments: ast.arguments, *, annotations: bool) -> None:
        for default in (*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)):
            self.visit(default)
        for argument in _parameters(arguments):
            self.found.words.add(argument.arg)
            if annotations and argument.annotation is not None:
                self._annotation(argument.annotation)

    def _annotation(self, node: ast.expr) -> None:
        self.visit(node)
        for text in [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]:
            if not isinstance(text, str):
                continue
            try:
                self.visit(ast.parse(text, mode="eval").body)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue

    def _enter(self, arguments: ast.arguments, body: Sequence[ast.AST]) -> None:
        inner = list(_own_nodes(body))
        outside = {name for node in inner if isinstance(node, ast.Global) for name in node.names}
        imported = {
            name for node in inner if isinstance(node, ast.Import | ast.ImportFrom) for name, _ in import_targets(node)
        }
        parameters = {argument.arg for argument in _parameters(arguments)}
        # An imported name is found by its alias, a global one in the module.
        self._scopes.append(_Scope(bound_names(body) | parameters, outside | imported))
        outer, self._in_class = self._in_class, False
        for node in body:
            self.visit(node)
        self._in_class = outer
        self._scopes.pop()

    def _comprehend(self, node: _Comprehension) -> None:
        # The first iterable is evaluated outside.
        self.visit(node.generators[0].iter)
        targets = {name for each in node.generators for name in bound_names([each.target])}
        self._scopes.append(_Scope(targets, is_function=False))
        for number, each in enumerate(node.generators):
            self.visit(each.target)
            if number:
                self.visit(each.iter)
            for condition in each.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self._scopes.pop()

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehend(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehend(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehend(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehend(node)


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*listed, *(each for each in (arguments.vararg, arguments.kwarg) if each is not None)]


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's own scope."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
