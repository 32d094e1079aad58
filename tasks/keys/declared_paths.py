"""Which options a recipe declares to be paths, found on the syntax tree.

    class Options(TypedDict):
        images: Path
        masks: list[Path] | None

    def prepare(options: Options, out): ...

The annotation of the parameter that takes the options names a `TypedDict`; its fields that are a `Path`, or lists,
mappings and further `TypedDict`s of them, are paths.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.path_options import PathOptions, absolute_path, map_paths
from trainflow.tasks.code.reach import Code
from trainflow.tasks.code.syntax import chain_of
from trainflow.tasks.keys.options_read import READERS
from trainflow.tasks.keys.sources import memory
from trainflow.tasks.keys.stage_code import code_of

if TYPE_CHECKING:
    from trainflow.tasks.configs import StageSettings
    from trainflow.tasks.stage.context import StageContext

Paths = dict[str, Any] | bool
"""True: a path, or something made of paths; else the options below that are paths, by name."""

_PATHS = {f"pathlib.{name}" for name in ("Path", "PurePath", "PosixPath", "PurePosixPath")} | {"os.PathLike"}
_BUILD_MODEL = {"build_model": 0}
_DEPTH = 20
"""Types that are nested deeper than this, or in a circle, do not count as paths."""


def path_options(stage: str, config: StageSettings, context: StageContext) -> PathOptions:
    """The options of a stage that its recipe declares to be paths, and where relative ones start."""
    code = code_of(config, context)
    return PathOptions(
        context.folder or str(Path(context.recipe).absolute().parent),
        declared_paths(code, READERS.get(stage, {}).get("options", {})),
        declared_paths(code, _BUILD_MODEL) if stage != "prepare-data" else {},
    )


def keyed_options(
    values: Mapping[str, Any], declared: Mapping[str, Any], folder: str, context: StageContext
) -> dict[str, Any]:
    """The values as a key holds them: paths by their text from the spec's folder, those of declared sources by content.

    No absolute path of this machine's folder is in them.
    """

    def convert(text: str) -> dict[str, str]:
        return _keyed_path(text, folder, context)

    return map_paths(values, declared, convert)


def _keyed_path(text: str, folder: str, context: StageContext) -> dict[str, str]:
    path = Path(absolute_path(text, folder))
    for source in context.sources:
        if not path.is_relative_to(source):
            continue
        [found] = context.resolver.sources([source], root=context.root, memory=memory(context.storage))
        below = path.relative_to(source).as_posix()
        return {**found, "below": below} if below != "." else dict(found)
    if path.is_relative_to(folder):
        return {"path": path.relative_to(folder).as_posix()}
    # An absolute path stays what was written; so does one above the folder, which names the same place elsewhere.
    return {"path": Path(text).as_posix()}


def declared_paths(code: Code, functions: Mapping[str, int]) -> dict[str, Any]:
    """The options that are paths by the annotations of these functions.

    Args:
        functions: function of the recipe -> position of its parameter that takes the options.
    """
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
        """The paths that a type holds."""
        if node is None or depth == 0:
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.paths_in(file, _parsed(node.value), depth - 1)
        if isinstance(node, ast.BinOp):
            return _merge(self.paths_in(file, node.left, depth - 1), self.paths_in(file, node.right, depth - 1))
        if isinstance(node, ast.Subscript):
            return self._paths_in_generic(file, node, depth)
        if isinstance(node, ast.Call):
            return self._paths_in_call(file, node, depth)
        chain = chain_of(node)
        return self._paths_of_name(file, chain, depth) if chain else False

    def _paths_in_generic(self, file: str, node: ast.Subscript, depth: int) -> Paths:
        head = (chain_of(node.value) or ())[-1:]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if head == ("Literal",):
            return False
        if head == ("Annotated",):
            inner = inner[:1]
        found: Paths = False
        for each in inner:
            found = _merge(found, self.paths_in(file, each, depth - 1))
        return found

    def _paths_in_call(self, file: str, node: ast.Call, depth: int) -> Paths:
        """``TypedDict("Options", {"images": Path})``."""
        if not self._is_typed_dict(file, node.func, depth) or len(node.args) < 2:
            return False
        fields = node.args[1]
        if not isinstance(fields, ast.Dict):
            return False
        pairs = zip(fields.keys, fields.values, strict=True)
        names = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
        return self._fields(file, names, depth)

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
        if not self._is_typed_dict_class(file, node, depth):
            return False
        for base in node.bases:
            found = _merge(found, self.paths_in(file, base, depth - 1))
        fields = {
            each.target.id: each.annotation
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        return _merge(found, self._fields(file, fields, depth))

    def _fields(self, file: str, annotations: Mapping[Any, ast.expr], depth: int) -> Paths:
        paths = {str(name): self.paths_in(file, node, depth - 1) for name, node in annotations.items()}
        return {name: each for name, each in paths.items() if each}

    def _is_typed_dict_class(self, file: str, node: ast.ClassDef, depth: int) -> bool:
        return depth > 0 and any(self._is_typed_dict(file, base, depth - 1) for base in node.bases)

    def _is_typed_dict(self, file: str, node: ast.expr, depth: int) -> bool:
        chain = chain_of(node)
        if not chain:
            return False
        meaning = self._program.resolve(file, chain)
        if any(name.endswith(".TypedDict") for name in meaning.outside):
            return True
        classes = [(each.file, each.node) for each in meaning.pieces_here]
        return any(self._is_typed_dict_class(at, each, depth) for at, each in classes if isinstance(each, ast.ClassDef))


def _merge(one: Paths, other: Paths) -> Paths:
    if one is True or other is True:
        return True
    left, right = one or {}, other or {}
    return {name: _merge(left.get(name, False), right.get(name, False)) for name in (*left, *right)} or False


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
