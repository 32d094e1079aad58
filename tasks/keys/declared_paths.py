"""The options that a recipe declares to be paths, and those that it never reads, found on the syntax tree.

    class Options(TypedDict):
        images: Path
        masks: list[Path] | None

    def prepare(options: Options, out): ...

The annotation of the parameter that takes the options names a `TypedDict`; its fields that are a `Path`, or lists,
mappings and further `TypedDict`s of them, are paths. Of an `Annotated[Path, ".jinja"]` values with this ending are.

An option that no function reads is most often misspelt. It is named only where the tree shows all that is read: a
function that hands its options on as a whole (``Net(**options)``, ``json.dumps(options)``) may read any of them.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.paths import PathOptions, absolute_path, map_paths
from trainer_lib.base.suggestions import nearest
from trainflow.tasks.code.program import Piece
from trainflow.tasks.code.reach import Code
from trainflow.tasks.code.syntax import chain_of
from trainflow.tasks.keys.sources import memory
from trainflow.tasks.keys.stage_code import code_of

if TYPE_CHECKING:
    from trainflow.tasks.configs import StageSettings
    from trainflow.tasks.stage.context import StageContext

READERS: dict[str, dict[str, dict[str, int]]] = {
    "prepare-data": {"options": {"prepare": 0, "list_sources": 0, "prepare_shard": 1}},
    "train": {"model": {"build_model": 0}, "options": {"callbacks": 0}},
    "evaluate": {"options": {"callbacks": 0, "after_evaluate": 2}},
    "predict": {"options": {"callbacks": 0}},
}
"""Stage -> setting -> functions of the recipe that take it, each with the position of its parameter."""

Paths = dict[str, Any] | bool | str
"""True: a path, or something made of paths; an ending: only of values with it; else the options below, by name."""

_PATHS = {f"pathlib.{name}" for name in ("Path", "PurePath", "PosixPath", "PurePosixPath")} | {"os.PathLike"}
_READ = {"get", "pop", "setdefault"}
_BUILD_MODEL = {"build_model": 0}
_DEPTH = 20  # types that are nested deeper than this, or in a circle, do not count as paths


def path_options(stage: str, config: StageSettings, context: StageContext) -> PathOptions:
    """The options of a stage that its recipe declares to be paths, and where relative ones start."""
    code = code_of(config, context)
    return PathOptions(
        spec_folder(context),
        declared_paths(code, READERS.get(stage, {}).get("options", {})),
        declared_paths(code, _BUILD_MODEL) if stage != "prepare-data" else {},
    )


def spec_folder(context: StageContext) -> str:
    """The folder where relative paths of the spec start."""
    return context.folder or str(Path(context.recipe).absolute().parent)


def keyed_options(
    values: Mapping[str, Any], declared: Mapping[str, Any], folder: str, context: StageContext
) -> dict[str, Any]:
    """The values as a key holds them: paths by their text from the spec's folder, those of declared sources by content.

    No absolute path of this machine's folder is in them.
    """

    return map_paths(values, declared, lambda text: _keyed_path(text, folder, context))


def _keyed_path(text: str, folder: str, context: StageContext) -> dict[str, str]:
    path = Path(absolute_path(text, folder))
    for source in context.sources:
        if not path.is_relative_to(source):
            continue
        [found] = context.resolver.sources([source], root=context.root, memory=memory(context.storage))
        below = path.relative_to(source).as_posix()
        return {**found, "below": below} if below != "." else dict(found)
    # A template is a part of the settings: what it says decides, as if it stood there.
    is_template = path.suffix == ".jinja" and path.is_file()
    content = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if is_template else {}
    if path.is_relative_to(folder):
        return {"path": path.relative_to(folder).as_posix(), **content}
    # An absolute path stays what was written; so does one above the folder, which names the same place elsewhere.
    return {"path": Path(text).as_posix(), **content}


def declared_paths(code: Code, functions: Mapping[str, int]) -> dict[str, Any]:
    """The options that are paths by the annotations of these functions, which take them at the given position."""
    found: Paths = False
    for name, position in functions.items():
        for file, node in code.functions(name):
            parameters = [*node.args.posonlyargs, *node.args.args]
            if position < len(parameters) and parameters[position].annotation is not None:
                found = _merge(found, _Types(code).paths_in(file, parameters[position].annotation))
    return found if isinstance(found, dict) else {}


class _Types:
    """Annotations of a recipe, followed to the paths in them."""

    def __init__(self, code: Code) -> None:
        self._program = code.program

    def paths_in(self, file: str, node: ast.expr | None, depth: int = _DEPTH) -> Paths:
        """The paths that a type holds: those of the names in it."""
        if node is None or depth == 0:
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.paths_in(file, _parsed(node.value), depth - 1)
        if chain := chain_of(node):
            return self._paths_of_name(file, chain, depth)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        head = (chain_of(node.value) or ())[-1:] if isinstance(node, ast.Subscript) else ()
        if head == ("Literal",):
            return False
        if head == ("Annotated",) and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            parts, marks = node.slice.elts[:1], node.slice.elts[1:]
            ending = marks[0].value if marks and isinstance(marks[0], ast.Constant) else None
            if isinstance(ending, str) and ending.startswith(".") and self.paths_in(file, parts[0], depth - 1) is True:
                return ending
        found: Paths = False
        for part in parts:
            found = _merge(found, self.paths_in(file, part, depth - 1))
        return found

    def _paths_of_name(self, file: str, chain: tuple[str, ...], depth: int) -> Paths:
        meaning = self._program.resolve(file, chain)
        found: Paths = bool(_PATHS & meaning.outside)
        for piece in meaning.pieces_here:
            if isinstance(piece.node, ast.ClassDef):
                found = _merge(found, self._paths_of_class(piece.file, piece.node, depth))
            elif isinstance(piece.node, ast.Assign | ast.AnnAssign):
                found = _merge(found, self.paths_in(piece.file, piece.node.value, depth - 1))
        return found

    def _paths_of_class(self, file: str, node: ast.ClassDef, depth: int) -> Paths:
        found: Paths = False
        if not self._is_typed_dict(file, node, depth):
            return False
        for base in node.bases:
            found = _merge(found, self.paths_in(file, base, depth - 1))
        paths = {
            statement.target.id: self.paths_in(file, statement.annotation, depth - 1)
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        return _merge(found, {name: held for name, held in paths.items() if held})

    def _is_typed_dict(self, file: str, node: ast.ClassDef, depth: int) -> bool:
        for chain in filter(None, map(chain_of, node.bases)) if depth > 0 else ():
            meaning = self._program.resolve(file, chain)
            classes = [(piece.file, piece.node) for piece in meaning.pieces_here]
            if any(name.endswith(".TypedDict") for name in meaning.outside) or any(
                self._is_typed_dict(at, base, depth - 1) for at, base in classes if isinstance(base, ast.ClassDef)
            ):
                return True
        return False


def _merge(one: Paths, other: Paths) -> Paths:
    if one is True or other is True:
        return True
    if isinstance(one, str) or isinstance(other, str):
        return one or other
    left, right = one or {}, other or {}
    return {name: _merge(left.get(name, False), right.get(name, False)) for name in (*left, *right)} or False


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def warn_of_unread(stage: str, section: str, config: object, code: Code) -> Iterator[str]:
    """A sentence for each option of a stage that no function of the recipe reads."""
    for setting, functions in READERS.get(stage, {}).items():
        for name, known in unread_options(code, functions, getattr(config, setting)):
            close = nearest(name, sorted(known))
            hint = f" Did you mean '{close}'?" if close else ""
            yield f"The recipe never reads {section}.{setting}.{name}.{hint}"


def unread_options(code: Code, functions: Mapping[str, int], options: Iterable[str]) -> list[tuple[str, set[str]]]:
    """The options that none of the recipe's functions reads, each with the names that they do read."""
    names = [name for name in functions if code.defines(name)]
    reached = code.reach(names)
    if reached.everything is not None:
        return []
    known: set[str] = set()
    for piece in reached.pieces:
        for name in names:
            if name in piece.names:
                read = _names_read(piece, functions[name])
                if read is None:
                    return []
                known |= read
    return [(name, known) for name in options if name not in known]


def _names_read(piece: Piece, position: int) -> set[str] | None:
    """The options that a function reads; None where it may read others than those that stand in its own code."""
    node = piece.node
    parameters = [*node.args.posonlyargs, *node.args.args] if isinstance(node, ast.FunctionDef) else []
    if position >= len(parameters):
        return None
    parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    uses = [name for name in ast.walk(node) if isinstance(name, ast.Name) and name.id == parameters[position].arg]
    read = [_name_read(use, parents[use], parents) for use in uses]
    return None if None in read else {name for name in read if name is not None}


def _name_read(use: ast.Name, parent: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str | None:
    found: ast.expr | None = None
    if isinstance(parent, ast.Subscript) and parent.value is use:
        found = parent.slice
    elif isinstance(parent, ast.Attribute) and parent.attr in _READ:
        call = parents[parent]
        found = call.args[0] if isinstance(call, ast.Call) and call.func is parent and call.args else None
    elif isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.In | ast.NotIn):
        found = parent.left
    return found.value if isinstance(found, ast.Constant) and isinstance(found.value, str) else None
