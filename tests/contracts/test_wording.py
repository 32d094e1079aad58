"""Rules of wording that a machine can check: plain words in docstrings and errors, and the shapes of tensors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT, relative, sources, tree

FOLDERS = ("trainflow", "flows", "tasks", "trainer_lib", "tests/support", "examples", "benchmarks")
IN_DOCUMENTS = re.compile(
    r"\b(nobody|whoever|anew|begun|of ours|of theirs)\b|(?<!there )\bis no\b(?! longer| more\b)", re.IGNORECASE
)
WORDS = re.compile(rf"{IN_DOCUMENTS.pattern}|\b(told|said|hears?|heard|whom)\b", re.IGNORECASE)
FIRST_LINES = re.compile(r"(The same\b|See |Whether it does)")
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}

#: Rooms with such words left. The table only shrinks: the room that is rewritten loses its line.
STILL_WORDED: set[str] = set()

#: Rooms with public functions of tensors whose docstring says no shape. The table only shrinks.
STILL_SHAPELESS: set[str] = set()


def _docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """What is raised and what is logged."""
    for node in ast.walk(module):
        logs = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGERS
        if logs or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def _wording(path: Path) -> Iterator[str]:
    module = tree(path)
    docstrings = list(_docstrings(module))
    for line, text in (*docstrings, *_messages(module)):
        yield from (f"{relative(path)}:{line}: {match[0]}" for match in WORDS.finditer(text))
    for line, text in docstrings:
        if match := FIRST_LINES.match(text):
            yield f"{relative(path)}:{line}: begins with {match[0].strip()!r}"


def _room(where: str) -> str:
    return where.partition(":")[0].rpartition("/")[0]


def _check(found: list[str], still: set[str], remedy: str) -> None:
    new = [one for one in found if _room(one) not in still]
    assert new == [], remedy
    done = still - {_room(one) for one in found}
    assert done == set(), "these rooms are done: remove their lines from the table"


def test_docstrings_and_messages_use_plain_words() -> None:
    found = [one for path in sources(*FOLDERS) for one in _wording(path)]
    _check(found, STILL_WORDED, "say it in plain words, the subject first (CONTRIBUTING.md)")


def test_documents_use_plain_words() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    pages += [path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"]
    found = [
        f"{relative(path)}: {match[0]}" for path in pages for match in IN_DOCUMENTS.finditer(path.read_text("utf-8"))
    ]
    assert found == [], "say it in plain words, the subject first (CONTRIBUTING.md)"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What nobody reads."""', 1),
        ('"""A folder is no file."""', 1),
        ('"""A file of ours."""', 1),
        ('"""A lease that is no longer held."""', 0),
        ('"""Returns None where there is no lease."""', 0),
        ('"""The same as `b`."""', 1),
        ('"""Reads it.\n\nThe same holds for `b`."""', 0),
        ('raise ConfigError("The folder is no file.")', 1),
        ('logger.warning("The worker was told to stop.")', 1),
        ('"said"', 0),
    ],
)
def test_the_search_for_words_finds_them(
    source: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.repository.ROOT", tmp_path)
    path = tmp_path / "some.py"
    path.write_text(f"{source}\n" if source != '"said"' else f"name = {source}\n")
    assert len(list(_wording(path))) == found


def _of_tensors(function: ast.FunctionDef) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    annotations = [each.annotation for each in (*arguments, function.args.vararg, function.args.kwarg) if each]
    texts = [ast.unparse(each) for each in (*annotations, function.returns) if each is not None]
    return any(re.search(r"\bTensor\b", text) for text in texts)


def _public_functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    bodies = [
        module.body,
        *(node.body for node in module.body if isinstance(node, ast.ClassDef) and _public(node.name)),
    ]
    for body in bodies:
        yield from (node for node in body if isinstance(node, ast.FunctionDef) and _public(node.name))


def _public(name: str) -> bool:
    return not name.startswith("_")


def _shapeless(path: Path) -> Iterator[str]:
    for function in _public_functions(tree(path)):
        overrides = any(ast.unparse(decorator) == "override" for decorator in function.decorator_list)
        text = ast.get_docstring(function) or ""
        if _of_tensors(function) and not overrides and not re.search(r"\[[^\]]*\]", text):
            yield f"{relative(path)}:{function.lineno}: {function.name}"


def test_public_functions_of_tensors_say_their_shapes() -> None:
    found = [one for path in sources("trainer_lib") for one in _shapeless(path)]
    _check(found, STILL_SHAPELESS, "say the shape of each tensor in the docstring, as in `[batch, sequence]`")


def _imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_no_private_module_is_imported_from_another_package() -> None:
    found = []
    for path in sources():
        for line, name in _imports(tree(path)):
            package, _, module = name.rpartition(".")
            private = module.startswith("_") and not module.startswith("__") and _file(package, module).exists()
            if private and package != relative(path.parent).replace("/", "."):
                found.append(f"{relative(path)}:{line}: {name}")
    assert found == []


def _file(package: str, module: str) -> Path:
    return ROOT.joinpath(*package.split("."), f"{module}.py")


def test_the_tables_name_rooms_that_exist() -> None:
    rooms = {relative(path.parent) for path in sources(*FOLDERS)}
    assert rooms >= STILL_WORDED | STILL_SHAPELESS
