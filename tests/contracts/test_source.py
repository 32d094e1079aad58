"""Rules that no linter knows: nothing is unpickled or evaluated, and files and functions stay readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import repository
from tests.support.repository import relative, sources, tree

FILE_LINES = 600
FUNCTION_LINES = 50
# A reason beats a budget.
_SCRIPT = "reads from top to bottom as a user of transformers writes it"
LONGER: dict[str, str] = {
    "examples/causal_lm_lora/train.py::main": _SCRIPT,
    "examples/text_classification/train.py::main": _SCRIPT,
}

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "pandas.read_pickle"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
}
# Collectives that pickle what they send.
FORBIDDEN_ENDINGS = ("_object", "_object_list")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home|Users|work)/\w")
OURS = ("trainflow", "flows", "tasks", "trainer_lib", "examples", "benchmarks", "docs")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _offences(path: Path) -> Iterator[str]:
    where = relative(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"{where} imports {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in FORBIDDEN_CALLS or (name.startswith(("dist.", "torch.")) and name.endswith(FORBIDDEN_ENDINGS)):
                yield f"{where} calls {name}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield f"{where} passes shell="


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell() -> None:
    found = {offence for path in sources(*OURS) for offence in _offences(path)}
    assert found == set()


def test_every_interpreter_that_we_start_leaves_the_working_directory_off_its_path() -> None:
    """`sys.executable, "-P"` or `-I`: else a `torch.py` in the working directory is imported in torch's place."""
    for path in sources("trainflow", "flows", "tasks", "trainer_lib"):
        for node in ast.walk(tree(path)):
            parts = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            for program, option in pairwise(parts):
                if _dotted(program) == "sys.executable":
                    assert isinstance(option, ast.Constant), relative(path)
                    assert option.value in ("-P", "-I"), relative(path)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(f)",
        "dist.all_gather_object(a, b)",
        "run(c, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(source)
    assert len(list(_offences(path))) == 1


def test_only_the_bounded_reader_parses_json() -> None:
    """A deep or endless text ends a command at any other place, and with it all commands of a storage."""
    parsers = {"json.load", "json.loads", "json.JSONDecoder", "orjson.loads"}
    calls = {
        (relative(path), name)
        for path in sources("trainflow", "flows", "tasks", "trainer_lib")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and (name := _dotted(node.func)) in parsers
    }
    # orjson has a bound of its own, and rows are many.
    assert calls == {("trainer_lib/json_text.py", "json.loads"), ("trainer_lib/data/row_formats.py", "orjson.loads")}


def _over_budget() -> Iterator[str]:
    for path in sources(*OURS, "tests"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            yield f"{relative(path)}: {lines} lines"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{relative(path)}::{node.name}: {length} lines"


def test_files_and_functions_stay_within_their_budget() -> None:
    over = [line for line in _over_budget() if line.rsplit(":", 1)[0] not in LONGER]
    assert over == [], "split it, or say in LONGER why it is better whole"


def test_exceptions_from_the_budget_are_still_needed() -> None:
    assert set(LONGER) <= {line.rsplit(":", 1)[0] for line in _over_budget()}


def test_nothing_is_left_unfinished_and_no_path_of_somebodys_machine_is_named() -> None:
    texts = [*sources(*OURS), *repository.ROOT.glob("*.md"), *(repository.ROOT / "docs").rglob("*.md")]
    found = []
    for path in texts:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if UNFINISHED.search(line) or MACHINE_PATH.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    assert found == []


# Two modules of one name are two hits of a search and two tabs that look alike. Free to repeat: the names that Python
# prescribes, `base` for the protocol of a room, and a stage's verb, which names a task and a file of the worker.
REPEATED_FREELY = {"__init__", "__main__", "base"}
ROOMS_OF_VERBS = {"tasks", "trainer_lib/worker"}


def _repeated() -> set[str]:
    rooms: dict[str, set[str]] = {}
    for path in sources():
        rooms.setdefault(path.stem, set()).add(relative(path.parent))
    return {name for name, found in rooms.items() if len(found) > 1 and found != ROOMS_OF_VERBS} - REPEATED_FREELY


def test_no_two_modules_have_one_file_name() -> None:
    assert _repeated() == set(), "an editor shows both under this name: rename one after what it holds"
