"""Options of a spec that no function of the recipe reads: most of them are misspelt.

Found on the syntax tree, and only where it shows everything that is read: a function that hands its options on as a
whole (``Net(**options)``, ``json.dumps(options)``) may read any of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from trainer_lib.base.suggestions import nearest
from trainflow.tasks.code.program import Piece
from trainflow.tasks.code.reach import Code

READERS: dict[str, dict[str, dict[str, int]]] = {
    "prepare-data": {"options": {"prepare": 0, "list_sources": 0, "prepare_shard": 1}},
    "train": {"model": {"build_model": 0}, "options": {"callbacks": 0}},
    "evaluate": {"options": {"callbacks": 0, "after_evaluate": 2}},
    "predict": {"options": {"callbacks": 0}},
}
"""Stage -> setting -> functions of the recipe that take it, each with the position of its parameter."""

_READ = {"get", "pop", "setdefault"}


def warn_of_unread(stage: str, section: str, config: object, code: Code) -> Iterator[str]:
    """A sentence for each option of a stage that no function of the recipe reads."""
    for setting, functions in READERS.get(stage, {}).items():
        for name, known in unread_options(code, functions, getattr(config, setting)):
            close = nearest(name, sorted(known))
            hint = f" Did you mean '{close}'?" if close else ""
            yield f"The recipe never reads {section}.{setting}.{name}.{hint}"


def unread_options(code: Code, functions: Mapping[str, int], options: Iterable[str]) -> list[tuple[str, set[str]]]:
    """The options that none of the functions reads, each with the names that they do read.

    Args:
        functions: function of the recipe -> position of its parameter that takes the options.
        options: names of the options in the spec.
    """
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
    uses = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == parameters[position].arg]
    read = [_name_read(use, parents[use], parents) for use in uses]
    return None if None in read else {each for each in read if each is not None}


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
