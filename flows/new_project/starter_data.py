"""Small real data for a new project, out of packages that trainflow needs anyway: nothing is downloaded."""

from __future__ import annotations

import ast
import csv
import io
import json
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flows.new_project.code_words import tagged_lines


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
    for module in (
        "argparse",
        "ast",
        "configparser",
        "datetime",
        "doctest",
        "inspect",
        "pathlib",
        "tarfile",
        "zipfile",
    ):
        file = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        source = (file if file.is_file() else file.with_suffix("") / "__init__.py").read_text("utf-8")
        rows = ({"words": words, "tags": tags} for words, tags in tagged_lines(source))
        # Since Python 3.12 an f-string is several tokens.
        plain = (row for row in rows if not any(word.startswith(("f'", 'f"')) or "{{" in word for word in row["words"]))
        found |= dict.fromkeys(json.dumps(row) for row in plain)
    lines = list(found)
    return "".join(f"{lines[index * len(lines) // 1200]}\n" for index in range(1200))


FILES: dict[str, tuple[str, Callable[[], str | dict[str, bytes]]]] = {
    "causal-language-modeling": ("docstrings.jsonl", docstrings),
    "image-classification": ("digits", digits),
    "tabular-classification": ("wine.csv", wine),
    "tabular-regression": ("diabetes.csv", diabetes),
    "text-classification": ("lines.csv", modules),
    "time-series-forecasting": ("elnino.csv", elnino),
    "token-classification": ("lines.jsonl", code_lines),
}
"""Recipe -> the name of its data's file, and what makes its text; or of a folder, and what makes its files."""


def _short(number: Any) -> str:
    return f"{number:g}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
