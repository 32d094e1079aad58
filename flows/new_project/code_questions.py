"""Questions about functions of Python code, whose answers its syntax tree knows: data to learn reading from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

_SHORTEST, _LONGEST = 120, 800
_LONGEST_ANSWER = 60


def questions_about(source: str) -> Iterator[list[dict[str, Any]]]:
    """Up to three questions about each function of 120 to 800 characters, in SQuAD's form; some have no answer."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not _SHORTEST <= len(text) <= _LONGEST or not text.isascii() or "{{" in text:
            continue
        asked = [(question, answer) for question, answer in _ask(node) if answer is None or _is_plain(answer)]
        yield [
            {"question": question, "context": text, "answers": _find(answer, lines, node.lineno)}
            for question, answer in asked
        ]


def _ask(node: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | ast.arg | None]]:
    arguments = [each for each in node.args.args if each.arg not in ("self", "cls")]
    own = [each for each in ast.walk(node) if isinstance(each, ast.Return | ast.Raise)]
    own.sort(key=lambda each: (each.lineno, each.col_offset))
    returned = (each.value for each in own if isinstance(each, ast.Return) and each.value is not None)
    raised = (each.exc for each in own if isinstance(each, ast.Raise) and each.exc is not None)
    error = next(raised, None)
    yield "Which parameter comes first?", arguments[0] if arguments else None
    yield "What does it return first?", next(returned, None)
    yield "Which error does it raise first?", error.func if isinstance(error, ast.Call) else error


def _is_plain(node: ast.expr | ast.arg) -> bool:
    return node.lineno == node.end_lineno and (node.end_col_offset or 0) - node.col_offset <= _LONGEST_ANSWER


def _find(node: ast.expr | ast.arg | None, lines: list[str], first: int) -> dict[str, Any]:
    """The text of a node, and where it is among the lines from the first one on; nothing for None."""
    if node is None:
        return {"text": [], "answer_start": []}
    end = node.col_offset + len(node.arg) if isinstance(node, ast.arg) else node.end_col_offset
    before = sum(len(line) + 1 for line in lines[first - 1 : node.lineno - 1])
    return {"text": [lines[node.lineno - 1][node.col_offset : end]], "answer_start": [before + node.col_offset]}
