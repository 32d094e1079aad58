"""Which names of the Trainer a client used while it ran: the column "tried with" of tests/data/compatibility.md.

The lines of the client's files that ran are recorded, and read as syntax: a method that was overridden and called, an
attribute of the trainer, its accelerator, arguments or state, a class that was imported, an argument that was given.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: Objects whose attributes have rows, under the names that clients give them.
_OWNERS = {"training_args": "args"} | {name: name for name in ("trainer", "accelerator", "args", "state", "control")}
_ARGUMENTS = ("Config", "Arguments")
_LIBRARIES = ("transformers", "trainer_lib")


class Recorder:
    """Records which lines of some folders run, from `start` on.

    Args:
        folders: absolute paths; files elsewhere are not looked at.
    """

    def __init__(self, *folders: str) -> None:
        self._folders = folders
        self._wanted: dict[str, bool] = {}
        self._lines: dict[str, set[int]] = defaultdict(set)

    def start(self) -> None:
        """Trace this thread until the process ends."""
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = self._wanted[name] = name.startswith(self._folders)
        return self._record if wanted else None

    def _record(self, frame: FrameType, event: str, _: Any) -> Any:
        self._lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._record

    def names(self) -> list[str]:
        """Return what the lines that ran name, as `uses` writes it."""
        found: set[str] = set()
        for name, lines in self._lines.items():
            tree = ast.parse(Path(name).read_text(encoding="utf-8"))
            found.update(use for line, use in uses(tree, in_cases=name.endswith("_cases.py")) if line in lines)
        return sorted(found)


def uses(tree: ast.Module, *, in_cases: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, use) of a file: ``trainer.log``, ``args.fp16``, ``import Trainer``, ``given max_steps`` …

    `in_cases`: the file is a module of cases, whose dictionaries hold arguments.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Trainer", "Callback")):
            yield from _members(node)
        elif isinstance(node, ast.ClassDef) and node.name.endswith(_ARGUMENTS):
            # A field of arguments that the client declares itself has a default of its own.
            fields = (
                each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
            yield from ((each.lineno, f"given {_last_name(each.target)}") for each in fields)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _LIBRARIES:
            yield from ((node.lineno, f"import {alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (owner := _OWNERS.get(_last_name(node.value))):
            yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and (kind := _kind_of_call(_last_name(node.func))):
            yield from ((each.value.lineno, f"{kind} {each.arg}") for each in node.keywords if each.arg)
        elif isinstance(node, ast.Dict) and in_cases:
            yield from ((key.lineno, f"given {key.value!s}") for key in node.keys if isinstance(key, ast.Constant))


def _kind_of_call(name: str) -> str | None:
    return (
        "passed" if name == "__init__" or name.endswith("Trainer") else "given" if name.endswith(_ARGUMENTS) else None
    )


def _members(cls: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Yield the methods of a trainer or callback, with each of their lines, and the attributes of the trainer."""
    for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
        yield from ((statement.lineno, f"override {method.name}") for statement in method.body)
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and _last_name(node.value) in ("self", "super"):
            yield node.lineno, f"trainer.{node.attr}"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


#: Section of tests/data/compatibility.md -> the uses that try the name of a row. Other sections are about arguments.
_USES: dict[str, tuple[str, ...]] = {
    "Trainer, arguments, results": ("import {}",),
    "Callbacks": ("import {}",),
    "Data collators": ("import {}",),
    "Constructor": ("passed {}",),
    "Public methods": ("override {}", "trainer.{}"),
    "Private hooks that subclasses override": ("override {}", "trainer.{}"),
    "Callback events": ("override {}",),
    "Attributes": ("{}",),
    "Members of the arguments": ("{}",),
    "TrainerState": ("{}",),
    "TrainerControl": ("{}",),
}


def tries(section: str, name: str, used: set[str]) -> bool:
    """Whether these uses try the name of a row in a section."""
    forms = _USES.get(section, ("given {}", "args.{}"))
    return any(form.format(name) in used for form in forms)
