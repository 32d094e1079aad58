"""Small real data for a new project, out of packages that trainflow needs anyway: nothing is downloaded."""

from __future__ import annotations

import ast
import csv
import html.entities
import io
import json
import random
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flows.new_project.code_words import tagged_lines

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


_MODULES = ("argparse", "ast", "configparser", "datetime", "doctest", "inspect", "pathlib", "tarfile", "zipfile")
_MORE = ("calendar", "cmd", "csv", "difflib", "gettext", "locale", "mailbox", "optparse", "pickle", "random", "shlex",
         "statistics", "string", "textwrap", "typing", "uuid")  # fmt: skip


def wine() -> str:
    """178 wines of three cultivars with 13 measurements, as CSV (scikit-learn, from the UCI repository, CC BY 4.0)."""
    from sklearn import datasets

    data = datasets.load_wine()
    names = [str(name).replace("/", "_") for name in data.feature_names]
    cultivars = [str(name).replace("class_", "cultivar ") for name in data.target_names]
    rows = zip(data.data, data.target, strict=True)
    return _csv([*names, "cultivar"], ([*map(_short, row), cultivars[target]] for row, target in rows))


def diabetes() -> str:
    """442 patients with ten measurements and the progression of their disease, as CSV (scikit-learn, Efron et al.)."""
    from sklearn import datasets

    data = datasets.load_diabetes(scaled=False)
    rows = zip(data.data, data.target, strict=True)
    # The codes of the sexes, 1 and 2, are names.
    table = ([_short(row[0]), "ab"[int(row[1]) - 1], *map(_short, row[2:]), _short(target)] for row, target in rows)
    return _csv([*data.feature_names, "progression"], table)


def modules() -> str:
    """1,200 lines of Python out of four modules of this interpreter's standard library, as CSV (PSF licence)."""
    rows: list[tuple[str, str]] = []
    for module in ("argparse", "ast", "tarfile", "turtle"):
        source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text("utf-8")
        lines = sorted({line.strip() for line in source.splitlines() if len(line.split()) >= 3})
        # Evenly over the sorted lines, so that any version of Python gives as many.
        rows += [(lines[index * len(lines) // 300], module) for index in range(300)]
    return _csv(["line", "module"], rows)


def docstrings() -> str:
    """400 docstrings out of modules of this interpreter's standard library, as JSON lines (PSF licence)."""
    found: dict[str, None] = {}
    for module in ("argparse", "datetime", "doctest", "inspect", "pathlib", "random", "statistics", "typing"):
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text("utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        written = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        found |= dict.fromkeys(text for text in written if text and len(text) >= 40)
    texts = list(found)
    # Evenly over all of them, so that any version of Python gives as many.
    chosen = [texts[index * len(texts) // 400] for index in range(400)]
    return "".join(json.dumps({"text": text}) + "\n" for text in chosen)


def digits() -> dict[str, bytes]:
    """600 scans of handwritten digits of 8 x 8 pixels, as PNG files by class (scikit-learn, from UCI, CC BY 4.0)."""
    from PIL import Image
    from sklearn import datasets

    data = datasets.load_digits()
    files: dict[str, bytes] = {}
    for number, (scan, target) in enumerate(zip(data.images[:600], data.target, strict=False)):
        written = io.BytesIO()
        Image.fromarray((scan * (255 / 16)).astype("uint8")).save(written, "PNG")
        files[f"{target}/{number:04}.png"] = written.getvalue()
    return files


def elnino() -> str:
    """The sea's temperature off Peru in each month from 1950 to 2010, as CSV (NOAA's ERSST.V3B, public domain)."""
    return Path(__file__).with_name("elnino.csv").read_text("utf-8")


def code_lines() -> str:
    """1,200 lines of Python of this interpreter's standard library, as JSON lines of words and tags (PSF licence)."""
    found: dict[str, None] = {}
    for source in _sources(_MODULES):
        rows = ({"words": words, "tags": tags} for words, tags in tagged_lines(source))
        # Since Python 3.12 an f-string is several tokens.
        plain = (row for row in rows if not any(word.startswith(("f'", 'f"')) or "{{" in word for word in row["words"]))
        found |= dict.fromkeys(json.dumps(row) for row in plain)
    lines = list(found)
    return "".join(f"{lines[index * len(lines) // 1200]}\n" for index in range(1200))


def code_questions() -> str:
    """A question about each of 800 functions of this interpreter's standard library, as JSON lines (PSF licence)."""
    found: dict[str, None] = {}
    functions = (each for source in _sources(_MODULES + _MORE) for each in questions_about(source))
    for number, questions in enumerate(functions):
        # Each sixth function is asked for what it does not have.
        fitting = [each for each in questions if bool(each["answers"]["text"]) != (number % 6 == 0)]
        if fitting:
            found[json.dumps(fitting[number % len(fitting)])] = None
    rows = list(found)
    return "".join(f"{rows[index * len(rows) // 800]}\n" for index in range(800))


def word_orders() -> str:
    """1,200 sentences of docstrings of this interpreter's standard library, as JSON lines (PSF licence).

    The prompt is a sentence's beginning; of the two answers one is its rest, in the other one all words but the last
    are in an order that was drawn. So both have the same length, the same words, and a point at the end.
    """
    draw = random.Random(0)
    found: dict[str, None] = {}
    for source in _sources(_MODULES + _MORE):
        for words in map(str.split, _sentences(ast.parse(source))):
            *rest, last = words[len(words) // 3 :]
            other = draw.sample(rest, len(rest))
            if other != rest:
                chosen, rejected = (" " + " ".join([*each, last]) for each in (rest, other))
                row = {"prompt": " ".join(words[: len(words) // 3]), "chosen": chosen, "rejected": rejected}
                found[json.dumps(row)] = None
    rows = list(found)
    return "".join(f"{rows[index * len(rows) // 1200]}\n" for index in range(1200))


def _sentences(tree: ast.Module) -> Iterator[str]:
    """The sentences of 9 to 30 words in the docstrings of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for text in (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)):
        for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text or ""):
            words = sentence.split()
            plain = sum(word.strip(".,;:()'\"").isalpha() for word in words)
            if 9 <= len(words) <= 30 and plain >= 0.8 * len(words) and "{{" not in sentence:
                yield sentence


def entity_names() -> str:
    """HTML's names of 1,500 characters and Unicode's names of them, as CSV (WHATWG and Unicode licences)."""
    found: dict[str, str] = {}
    for name, characters in sorted(html.entities.html5.items()):
        names = [unicodedata.name(each, "") for each in characters]
        if name.endswith(";") and all(names):
            found.setdefault(" and ".join(names).lower(), name.removesuffix(";"))
    return _csv(["entity", "character"], [(name, character) for character, name in found.items()][:1500])


def character_names() -> str:
    """1,200 characters' names and the names of what they consist of, as CSV (Unicode character database)."""
    rows: list[tuple[str, str]] = []
    for point in range(0x20000):
        parts = [part for part in unicodedata.decomposition(chr(point)).split() if not part.startswith("<")]
        names = [unicodedata.name(chr(int(part, 16)), "") for part in parts]
        name = unicodedata.name(chr(point), "")
        if names and all(names) and name and not name.startswith(("CJK", "HANGUL")):
            rows.append((name.lower(), ", ".join(names).lower()))
    short = [row for row in rows if len(row[1]) <= 100]
    return _csv(["name", "parts"], (short[index * len(short) // 1200] for index in range(1200)))


FILES: dict[str, tuple[str, Callable[[], str | dict[str, bytes]]]] = {
    "causal-language-modeling": ("docstrings.jsonl", docstrings),
    "embeddings": ("entities.csv", entity_names),
    "image-classification": ("digits", digits),
    "preference-optimization": ("sentences.jsonl", word_orders),
    "question-answering": ("questions.jsonl", code_questions),
    "sequence-to-sequence": ("characters.csv", character_names),
    "tabular-classification": ("wine.csv", wine),
    "tabular-regression": ("diabetes.csv", diabetes),
    "text-classification": ("lines.csv", modules),
    "time-series-forecasting": ("elnino.csv", elnino),
    "token-classification": ("lines.jsonl", code_lines),
}
"""Recipe -> the name of its data's file, and what makes its text; or of a folder, and what makes its files."""


def _sources(modules: Sequence[str]) -> Iterator[str]:
    """The code of modules of the standard library."""
    for module in modules:
        file = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        yield (file if file.is_file() else file.with_suffix("") / "__init__.py").read_text("utf-8")


def _short(number: Any) -> str:
    return f"{number:g}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
