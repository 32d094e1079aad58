"""Words of Python code with the part that each plays, which the syntax tree knows: data to learn tags from."""

from __future__ import annotations

import ast
import io
import keyword
import token
import tokenize
from collections.abc import Iterator

_MOST_WORDS = 40
_FEWEST_WORDS = 5
_LONGEST = 24
_LEFT_OUT = {token.NEWLINE, token.NL, token.INDENT, token.DEDENT, token.ENDMARKER, token.ENCODING, token.COMMENT}
_DEFINED: dict[type[ast.AST], tuple[str, int]] = {
    ast.arg: ("parameter", 0),
    ast.keyword: ("argument", 0),
    ast.alias: ("import", 0),
    ast.FunctionDef: ("function", len("def ")),
    ast.ClassDef: ("class", len("class ")),
}
_KINDS = {token.NUMBER: "number", token.STRING: "text", token.OP: "operator"}


def tagged_lines(source: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words and tags of each logical line of 5 to 40 words, none longer than 24 characters; no comments."""
    parts = _parts(ast.parse(source))
    words: list[str] = []
    tags: list[str] = []
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        if each.type == token.NEWLINE:
            if _FEWEST_WORDS <= len(words) <= _MOST_WORDS and max(map(len, words)) <= _LONGEST:
                yield words, tags
            words, tags = [], []
        elif each.type not in _LEFT_OUT:
            words.append(each.string)
            tags.append(_tag(each, parts))


def _tag(each: tokenize.TokenInfo, parts: dict[tuple[int, int], str]) -> str:
    if each.type != token.NAME:
        return _KINDS.get(each.type, "text")
    if keyword.iskeyword(each.string):
        return "keyword"
    return parts.get((each.start[0], len(each.line[: each.start[1]].encode())), "name")


def _parts(tree: ast.Module) -> dict[tuple[int, int], str]:
    """Line and byte of a name -> the part that it plays."""
    found: dict[tuple[int, int], str] = {}
    for node in ast.walk(tree):
        start = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if isinstance(node, ast.Call):  # stands before the names of which it consists
            function = node.func
            found[_last_name(function)] = "method" if isinstance(function, ast.Attribute) else "called"
        elif isinstance(node, ast.Attribute):
            found.setdefault(_last_name(node), "attribute")
        elif isinstance(node, ast.Name):
            found.setdefault(start, "name" if isinstance(node.ctx, ast.Load) else "assigned")
        elif type(node) in _DEFINED:
            name, offset = _DEFINED[type(node)]
            found[start[0], start[1] + offset] = name
    return found


def _last_name(node: ast.expr) -> tuple[int, int]:
    """Line and byte of a name, or of that behind the last dot."""
    if not isinstance(node, ast.Attribute):
        return node.lineno, node.col_offset
    return node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr.encode())
