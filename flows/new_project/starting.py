"""Writes a new project into an empty folder."""

from __future__ import annotations

import ast
import csv
import functools
import html.entities
import io
import itertools
import json
import keyword
import random
import re
import sysconfig
import token
import tokenize
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainer_lib.base.suggestions import suggestion
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.errors import ConfigError, StorageError

R = TypeVar("R")
_MOST_WORDS = 40
_FEWEST_WORDS = 5
_LONGEST_WORD = 24
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
    """The words and tags of logical lines of 5 to 40 words, none longer than 24 characters; no comments."""
    parts = _parts(ast.parse(source))
    words: list[str] = []
    tags: list[str] = []
    for lexeme in tokenize.generate_tokens(io.StringIO(source).readline):
        if lexeme.type == token.NEWLINE:
            if _FEWEST_WORDS <= len(words) <= _MOST_WORDS and max(map(len, words)) <= _LONGEST_WORD:
                yield words, tags
            words, tags = [], []
        elif lexeme.type not in _LEFT_OUT:
            words.append(lexeme.string)
            tags.append(_tag(lexeme, parts))


def _tag(lexeme: tokenize.TokenInfo, parts: dict[tuple[int, int], str]) -> str:
    if lexeme.type != token.NAME:
        return _KINDS.get(lexeme.type, "text")
    if keyword.iskeyword(lexeme.string):
        return "keyword"
    return parts.get((lexeme.start[0], len(lexeme.line[: lexeme.start[1]].encode())), "name")


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


_SHORTEST, _LONGEST = 120, 800
_LONGEST_ANSWER = 60


def questions_about(source: str) -> Iterator[list[dict[str, Any]]]:
    """Up to three questions about functions of 120 to 800 characters, in SQuAD's form; some have no answer."""
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
    arguments = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
    own = [statement for statement in ast.walk(node) if isinstance(statement, ast.Return | ast.Raise)]
    own.sort(key=lambda statement: (statement.lineno, statement.col_offset))
    returned = (
        statement.value for statement in own if isinstance(statement, ast.Return) and statement.value is not None
    )
    raised = (statement.exc for statement in own if isinstance(statement, ast.Raise) and statement.exc is not None)
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


_MODULES = ("argparse", "ast", "configparser", "datetime", "doctest", "inspect", "subprocess", "tarfile", "threading")
_MORE = ("calendar", "cmd", "csv", "difflib", "gettext", "locale", "mailbox", "optparse", "pickle", "random", "shlex",
         "statistics", "string", "textwrap", "typing", "uuid")  # fmt: skip


def wine() -> str:
    """178 wines of three cultivars with 13 measurements, as CSV (scikit-learn, from the UCI repository, CC BY 4.0)."""
    from sklearn import datasets

    data = datasets.load_wine()
    names = [str(name).replace("/", "_") for name in data.feature_names]
    cultivars = [str(name).replace("class_", "cultivar ") for name in data.target_names]
    rows = zip(data.data, data.target, strict=True)
    return _csv([*names, "cultivar"], ([*map("{:g}".format, row), cultivars[target]] for row, target in rows))


def diabetes() -> str:
    """442 patients with ten measurements and the progression of their disease, as CSV (scikit-learn, Efron et al.)."""
    from sklearn import datasets

    data = datasets.load_diabetes(scaled=False)
    rows = zip(data.data, data.target, strict=True)
    # The codes of the sexes, 1 and 2, are names.
    table = (
        [f"{row[0]:g}", "ab"[int(row[1]) - 1], *map("{:g}".format, row[2:]), f"{target:g}"] for row, target in rows
    )
    return _csv([*data.feature_names, "progression"], table)


def modules() -> str:
    """1,200 lines of Python out of four modules of this interpreter's standard library, as CSV (PSF licence)."""
    rows: list[tuple[str, str]] = []
    for module in ("argparse", "ast", "tarfile", "turtle"):
        source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text("utf-8")
        lines = sorted({line.strip() for line in source.splitlines() if len(line.split()) >= 3})
        rows += [(line, module) for line in _evenly(lines, 300)]
    return _csv(["line", "module"], rows)


def docstrings() -> str:
    """400 docstrings out of modules of this interpreter's standard library, as JSON lines (PSF licence)."""
    found: dict[str, None] = {}
    for module in ("argparse", "datetime", "doctest", "inspect", "random", "statistics", "threading", "typing"):
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text("utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        written = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        found |= dict.fromkeys(text for text in written if text and len(text) >= 40)
    return "".join(json.dumps({"text": text}) + "\n" for text in _evenly(list(found), 400))


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
    """The sea's temperature off Peru by month from 1950 to 2010, as CSV (NOAA's ERSST.V3B, public domain)."""
    return Path(__file__).with_name("elnino.csv").read_text("utf-8")


def code_lines() -> str:
    """1,200 lines of Python of this interpreter's standard library, as JSON lines of words and tags (PSF licence)."""
    found: dict[str, None] = {}
    for source in _sources(_MODULES):
        rows = ({"words": words, "tags": tags} for words, tags in tagged_lines(source))
        # Since Python 3.12 an f-string is several tokens.
        plain = (row for row in rows if not any(word.startswith(("f'", 'f"')) or "{{" in word for word in row["words"]))
        found |= dict.fromkeys(json.dumps(row) for row in plain)
    return "\n".join([*_evenly(list(found), 1200), ""])


def code_questions() -> str:
    """Questions about 800 functions of this interpreter's standard library, as JSON lines (PSF licence)."""
    found: dict[str, None] = {}
    functions = itertools.chain.from_iterable(map(questions_about, _sources(_MODULES + _MORE)))
    for number, questions in enumerate(functions):
        # Every sixth function is asked for what it does not have.
        fitting = [question for question in questions if bool(question["answers"]["text"]) != (number % 6 == 0)]
        if fitting:
            found[json.dumps(fitting[number % len(fitting)])] = None
    return "\n".join([*_evenly(list(found), 800), ""])


def code_chats() -> str:
    """Conversations about 400 functions of this interpreter's standard library, as JSON lines (PSF licence).

    A user shows the function and asks up to three questions; what it does not have is answered by "nothing".
    """
    found: dict[str, None] = {}
    for questions in itertools.chain.from_iterable(map(questions_about, _sources(_MODULES + _MORE))):
        if not questions or len(questions[0]["context"]) > 200:
            continue
        turns = []
        for number, asked in enumerate(questions[:3]):
            text = f"{asked['context']}\n{asked['question']}" if number == 0 else asked["question"]
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": (asked["answers"]["text"] or ["nothing"])[0]})
        found[json.dumps({"messages": turns})] = None
    return "\n".join([*_evenly(list(found), 400), ""])


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
                chosen, rejected = (" " + " ".join([*middle, last]) for middle in (rest, other))
                row = {"prompt": " ".join(words[: len(words) // 3]), "chosen": chosen, "rejected": rejected}
                found[json.dumps(row)] = None
    return "\n".join([*_evenly(list(found), 1200), ""])


def ranked_lines() -> str:
    """The lines of `modules` as 600 pairs, as CSV: those of argparse and ast are better than the others."""
    rows = list(csv.DictReader(io.StringIO(modules())))
    lines = ([row["line"] for row in rows if (row["module"][0] == "a") is kind] for kind in (True, False))
    return _csv(["chosen", "rejected"], zip(*lines, strict=True))


def marked_lines() -> str:
    """The lines of `modules` as CSV, with prompts; those of argparse and ast are marked as good."""
    rows = csv.DictReader(io.StringIO(modules()))
    marked = (["A line of Python: ", row["line"], str(row["module"][0] == "a")] for row in rows)
    return _csv(["prompt", "completion", "label"], marked)


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
        names = [unicodedata.name(char, "") for char in characters]
        if name.endswith(";") and all(names):
            found.setdefault(" and ".join(names).lower(), name.removesuffix(";"))
    return _csv(["entity", "character"], [(name, character) for character, name in found.items()][:1500])


def character_names() -> str:
    """700 characters' names and the names of what they consist of, as CSV (Unicode character database)."""
    rows: list[tuple[str, str]] = []
    for point in range(0x20000):
        parts = [part for part in unicodedata.decomposition(chr(point)).split() if not part.startswith("<")]
        names = [unicodedata.name(chr(int(part, 16)), "") for part in parts]
        name = unicodedata.name(chr(point), "")
        if names and all(names) and name and not name.startswith(("CJK", "HANGUL")):
            rows.append((name.lower(), ", ".join(names).lower()))
    short = [row for row in rows if len(row[1]) <= 100]
    return _csv(["name", "parts"], _evenly(short, 700))


def _sources(modules: Sequence[str]) -> Iterator[str]:
    """The code of modules of the standard library."""
    for module in modules:
        file = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        yield (file if file.is_file() else file.with_suffix("") / "__init__.py").read_text("utf-8")


def _evenly(rows: Sequence[R], count: int) -> list[R]:
    """So many of the rows, evenly over all of them: any version of Python gives as many."""
    return [rows[index * len(rows) // count] for index in range(count)]


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


_SAMPLES: dict[str, Callable[[], str | dict[str, bytes]]] = {
    make.__name__: make
    for make in (
        *(wine, diabetes, modules, docstrings, digits, elnino, code_lines, code_questions, code_chats, word_orders),
        *(ranked_lines, marked_lines, entity_names, character_names),
    )
}
"""Makers of a project's data, as a text or as files, by their names in templates.yaml."""
_GITIGNORE = ".trainflow/\npredictions/\n__pycache__/\n.pytest_cache/\n"


@functools.cache
def templates() -> dict[str, dict[str, Any]]:
    """The facts of projects in templates.yaml, by the names of their recipes."""
    found: dict[str, dict[str, Any]] = parse_yaml(Path(__file__).with_name("templates.yaml").read_text("utf-8"))
    return {name: {"by": "random", "column": "label", **facts} for name, facts in found.items() if name != "_"}


def check_target(folder: Path, recipe: str) -> None:
    """Check that a project with this recipe can be written into a folder.

    Raises:
        ConfigError: the folder is not empty, its name cannot be a pipeline's, or no recipe has this name.
    """
    from trainflow.flows.spec.spec import PipelineSpec

    if recipe not in (known := templates()):
        raise ConfigError("No recipe has this name.", field="--recipe", value=recipe, remedy=suggestion(recipe, known))
    name = folder.absolute().name
    pattern = next(rule.pattern for rule in PipelineSpec.model_fields["name"].metadata if hasattr(rule, "pattern"))
    if not re.match(pattern, name):
        remedy = str(PipelineSpec.model_fields["name"].description)
        raise ConfigError("A pipeline cannot have this name.", field="NAME", value=name, remedy=remedy)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "The folder is not empty." if folder.is_dir() else "This is a file."
        raise ConfigError(what, field="NAME", value=str(folder), remedy="Give the name of a new folder.")


def write_project(folder: Path, recipe: str) -> list[Path]:
    """Write a project; returns its files, and the folder of its data where there are many.

    Raises:
        ConfigError: as `check_target`. StorageError: the folder cannot be written.
    """
    check_target(folder, recipe)
    name = folder.absolute().name
    module = "".join(char if char.isalnum() else "_" for char in name.lower())
    facts = {"name": name, "recipe": recipe, "module": module, **templates()[recipe]}
    texts = {
        "pipeline.yaml": _render("pipeline.yaml.j2", facts),
        f"test_{module}.py": _render("test_project.py.j2", facts),
        "README.md": _render("README.md.j2", facts),
        "schema.json": _schema(),
        ".gitignore": _GITIGNORE,
    }
    data, made = facts["data"], _SAMPLES[facts["make"]]()
    contents = {file: text.encode() for file, text in texts.items()}
    contents |= (
        {data: made.encode()} if isinstance(made, str) else {f"{data}/{at}": content for at, content in made.items()}
    )
    _write(folder, contents)
    return [folder / file for file in (*texts, data)]


def write_project_for(folder: Path, address: str, label: str | None) -> list[Path]:
    """Write a spec for a table that is there, with guesses (`from_file`); returns the files.

    Raises:
        ConfigError: as `check_target`, or there is no such file or label. DataError: the table cannot be read.
        StorageError: the folder cannot be written.
    """
    from trainflow.flows.new_project.from_file import guess_spec

    check_target(folder, "tabular-classification")
    guessed = guess_spec(folder.absolute(), address, label)
    text = _render("guessed.yaml.j2", {"name": folder.absolute().name, **guessed})
    contents = {"pipeline.yaml": text, "schema.json": _schema(), ".gitignore": _GITIGNORE}
    return _write(folder, {name: content.encode() for name, content in contents.items()})


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    try:
        for file, content in contents.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    except OSError as error:
        what = f"The project cannot be written: {error.strerror}."
        raise StorageError(what, field="NAME", value=str(folder), remedy="Give a folder that you may write.") from error
    return [folder / file for file in contents]


def _schema() -> str:
    from trainflow.flows.spec.schema import spec_schema

    return json.dumps(spec_schema(), indent=1) + "\n"


def _render(template: str, facts: Mapping[str, Any]) -> str:
    import jinja2

    source = (Path(__file__).parent / template).read_text("utf-8")
    # The files are YAML, Python and Markdown, not HTML.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    return environment.from_string(source).render(facts)
