"""Rules that no linter knows: nothing is unpickled or evaluated, files and functions stay short, words stay plain."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import repository
from tests.support.repository import HOUSES, ROOT, relative, sources, tree

FILE_LINES = 600
FUNCTION_LINES = 50
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "pandas.read_pickle"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
}
# Collectives that pickle what they send.
FORBIDDEN_ENDINGS = ("_object", "_object_list")
PARSERS = {"json.load", "json.loads", "json.JSONDecoder", "orjson.loads"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home|Users|work)/\w")
IN_DOCUMENTS = re.compile(
    r"\b(nobody|whoever|anew|begun|of ours|of theirs)\b|(?<!there )\bis no\b(?! longer| more\b)", re.IGNORECASE
)
WORDS = re.compile(rf"{IN_DOCUMENTS.pattern}|\b(told|said|hears?|heard|whom)\b", re.IGNORECASE)
FIRST_LINES = re.compile(r"(The same\b|See |Whether it does)")
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}
OURS = (*HOUSES, "examples", "benchmarks", "docs")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.lru_cache(1)
def _nodes(module: ast.Module) -> list[ast.AST]:
    """All nodes of a module, found once for all rules."""
    return list(ast.walk(module))


# ------------------------------------------------------------------------------------------ rules: what breaks each one
def forbidden(path: Path, module: ast.Module) -> Iterator[str]:
    """Nothing is unpickled, evaluated or handed to a shell."""
    for node in _nodes(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"imports {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in FORBIDDEN_CALLS or (name.startswith(("dist.", "torch.")) and name.endswith(FORBIDDEN_ENDINGS)):
                yield f"calls {name}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield "passes shell="


def started(path: Path, module: ast.Module) -> Iterator[str]:
    """`sys.executable, "-P"` or `-I`: else a `torch.py` in the working directory is imported in torch's place."""
    for node in _nodes(module):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        for program, option in pairwise(node.elts):
            if _dotted(program) == "sys.executable" and not (
                isinstance(option, ast.Constant) and option.value in ("-P", "-I")
            ):
                yield f"{node.lineno}: starts an interpreter with the working directory on its path"


def parsing(path: Path, module: ast.Module) -> Iterator[str]:
    """A deep or endless text ends a command, and with it all commands of a storage: only the bounded reader parses."""
    calls = (_dotted(node.func) for node in _nodes(module) if isinstance(node, ast.Call))
    yield from {f"calls {name}" for name in calls if name in PARSERS}


def budget(path: Path, module: ast.Module) -> Iterator[str]:
    """Files and functions stay short."""
    if len(path.read_text(encoding="utf-8").splitlines()) > FILE_LINES:
        yield "is longer than a file may be: split it"
    for node in _nodes(module):
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES:
            yield f"{node.name} is longer than a function may be: split it"


def unfinished(path: Path, module: ast.Module | None) -> Iterator[str]:
    """Nothing is left to do, and no path of somebody's machine is named."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if UNFINISHED.search(line) or MACHINE_PATH.search(line):
            yield f"{number}: {line.strip()}"


def wording(path: Path, module: ast.Module) -> Iterator[str]:
    """Docstrings, and what is raised or logged, use plain words, the subject first (CONTRIBUTING.md)."""
    for line, text in (*_docstrings(module), *_messages(module)):
        yield from (f"{line}: {match[0]}" for match in WORDS.finditer(text))
    for line, text in _docstrings(module):
        if match := FIRST_LINES.match(text):
            yield f"{line}: begins with {match[0].strip()!r}"


def _docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _nodes(module):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _nodes(module):
        logs = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGERS
        names = {part.id for part in getattr(node, "targets", []) if isinstance(part, ast.Name)}
        if logs or isinstance(node, ast.Raise) or names & {"what", "why", "remedy"}:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def shapes(path: Path, module: ast.Module) -> Iterator[str]:
    """The docstring of a public function of tensors says the shape of each, as in `[batch, sequence]`."""
    classes = (node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    for function in (node for body in (module.body, *classes) for node in body):
        if isinstance(function, ast.FunctionDef) and function.name[0] != "_" and _takes_tensors(function):
            overrides = any(ast.unparse(decorator) == "override" for decorator in function.decorator_list)
            if not overrides and not re.search(r"\[[^\]]*\]", ast.get_docstring(function) or ""):
                yield f"{function.lineno}: {function.name}"


def _takes_tensors(function: ast.FunctionDef) -> bool:
    given = function.args
    arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    annotations = (*(argument.annotation for argument in arguments if argument), function.returns)
    return any(re.search(r"\bTensor\b", ast.unparse(annotation)) for annotation in annotations if annotation)


def private(path: Path, module: ast.Module) -> Iterator[str]:
    """No private module is imported from another package."""
    for node in _nodes(module):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for package, _, name in (name.rpartition(".") for name in names):
            is_private = name.startswith("_") and not name.startswith("__")
            is_module = is_private and ROOT.joinpath(*package.split("."), f"{name}.py").exists()
            if is_module and package != relative(path.parent).replace("/", "."):
                yield f"imports {package}.{name}"


RULES: dict[Callable[[Path, ast.Module], Iterator[str]], tuple[str, ...]] = {
    forbidden: OURS,
    started: HOUSES,
    parsing: HOUSES,
    budget: (*OURS, "tests"),
    unfinished: OURS,
    wording: (*HOUSES, "tests/support", "examples", "benchmarks"),
    shapes: ("trainer_lib",),
    private: HOUSES,
}
_SCRIPT = "main is longer than a function may be: split it"  # it reads from top to bottom, as such scripts do
# A reason beats a rule; an exception that is not needed any more goes.
EXCEPTIONS = {
    # weights_only=True, on checkpoints of transformers, in the worker that imports them
    "forbidden": {"trainer_lib/checkpoint/transformers_checkpoint.py: calls torch.load"},
    "budget": {f"examples/{name}/train.py: {_SCRIPT}" for name in ("causal_lm_lora", "text_classification")},
    "parsing": {
        "trainer_lib/base/json_text.py: calls json.loads",
        "trainer_lib/data/rows/row_files.py: calls orjson.loads",  # it has a bound of its own, and rows are many
    },
}


@functools.cache
def _found() -> dict[str, set[str]]:
    """What breaks each rule; every file is parsed once."""
    found: dict[str, set[str]] = {rule.__name__: set() for rule in RULES}
    for path in sources(*OURS, "tests"):
        module, where = tree(path), relative(path)
        for rule, folders in RULES.items():
            if where.startswith(tuple(f"{folder}/" for folder in folders)):
                found[rule.__name__] |= {f"{where}: {what}" for what in rule(path, module)}
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_holds_for_every_file(rule: Callable[[Path, ast.Module], Iterator[str]]) -> None:
    assert _found()[rule.__name__] == EXCEPTIONS.get(rule.__name__, set()), rule.__doc__


@pytest.mark.parametrize(
    ("rule", "source", "found"),
    [
        (forbidden, "import pickle", 1),
        (forbidden, "from pickle import loads", 1),
        (forbidden, "eval('1')", 1),
        (forbidden, "torch.load(f)", 1),
        (forbidden, "dist.all_gather_object(a, b)", 1),
        (forbidden, "run(c, shell=True)", 1),
        (started, "run([sys.executable, '-m', 'x'])", 1),
        (started, "run([sys.executable, '-P', '-m', 'x'])", 0),
        (shapes, 'def f(x: torch.Tensor): "Doubles it."', 1),
        (shapes, 'def f(x: torch.Tensor): "Doubles `x`, [batch]."', 0),
        (wording, '"""What nobody reads."""', 1),
        (wording, '"""A folder is no file."""', 1),
        (wording, '"""A file of ours."""', 1),
        (wording, '"""A lease that is no longer held."""', 0),
        (wording, '"""Returns None where there is no lease."""', 0),
        (wording, '"""The same as `b`."""', 1),
        (wording, '"""Reads it.\n\nThe same holds for `b`."""', 0),
        (wording, 'raise ConfigError("The folder is no file.")', 1),
        (wording, 'what = "The folder is no file."', 1),
        (wording, 'logger.warning("The worker was told to stop.")', 1),
        (wording, 'name = "said"', 0),
    ],
)
def test_the_search_finds_what_it_looks_for(
    rule: Callable[[Path, ast.Module], Iterator[str]],
    source: str,
    found: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    path = tmp_path / "some.py"
    path.write_text(source)
    assert len(list(rule(path, tree(path)))) == found


def test_documents_are_finished_and_use_plain_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [f"{relative(page)}: {what}" for page in pages for what in unfinished(page, None)] == []
    plain = {page for page in pages if page.parent != ROOT and page.name != "log.md"}
    plain |= {ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")}
    found = [
        f"{relative(page)}: {match[0]}" for page in plain for match in IN_DOCUMENTS.finditer(page.read_text("utf-8"))
    ]
    assert found == [], "say it in plain words, the subject first (CONTRIBUTING.md)"


def test_no_two_modules_have_one_file_name() -> None:
    """Two modules of one name are two hits of a search and two tabs that look alike: rename one after what it holds.

    Free to repeat: the names that Python prescribes, `base` for the protocol of a room, and a stage's verb, which names
    a task and a file of the worker.
    """
    rooms: dict[str, set[str]] = {}
    for path in sources():
        rooms.setdefault(path.stem, set()).add(relative(path.parent))
    of_verbs = {"tasks", "trainer_lib/worker"}
    repeated = {name for name, found in rooms.items() if len(found) > 1 and found != of_verbs}
    assert repeated - {"__init__", "__main__", "base"} == set()
