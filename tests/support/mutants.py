"""Mutants: small faults put into the product, which tests have to notice.

``python -m tests.support.mutants run`` puts every fault of ``mutants.json`` into a copy of the tree, runs tests until
one fails, and compares with what is recorded: a fault that was noticed once must still be noticed. The list is fixed:
it was drawn at random, more of it from rooms where a loss is silent, and ``renew`` draws again what is in code that is
gone. A fault is found again by the name of its function and its text, so files may be renamed and moved.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.support.repository import ROOT, relative, sources

LIST = Path(__file__).with_name("mutants.json")
SEED = 20261126
TIMEOUT_S = 900
MARK = "TRAINFLOW_MUTANT"
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Patterns of files, and the tests that are tried first.
ROOMS: dict[str, tuple[tuple[str, ...], str]] = {
    "commit": (("trainer_lib/storage/commit.py", "trainer_lib/checkpoint/[a-z]*.py"), "checkpoint test_commit.py"),
    "restore": (
        ("trainer_lib/trainer/checkpoints/restore.py", "trainer_lib/trainer/checkpoints/snapshots.py"),
        "trainer checkpoint",
    ),
    "order": (("trainer_lib/data/*/*.py",), "data trainer"),
    "weighting": (("trainer_lib/trainer/weighting.py", "trainer_lib/trainer/history.py"), "trainer"),
    "keys": (("tasks/keys/keys.py", "tasks/keys/sources.py", "tasks/stage/manifest.py"), "tasks flows"),
    "leases": (("trainer_lib/locks/*.py",), "locks"),
    "secrets": (("trainer_lib/secrets.py",), "test_secrets.py trackers"),
    "storage": (("trainer_lib/storage/*.py",), "storage"),
    "loop": (("trainer_lib/trainer/loop.py", "trainer_lib/trainer/evaluator.py"), "trainer"),
    "evaluation": (("trainer_lib/evaluation/*.py",), "evaluation"),
    "optim": (("trainer_lib/optim/*.py",), "optim"),
    "sharding": (("trainer_lib/distributed/sharding.py", "trainer_lib/strategies/fsdp.py"), "strategies trainer"),
    "launch": (("trainer_lib/launch/*.py", "trainer_lib/guard.py"), "launch"),
    "failures": (("tasks/stage/retry.py", "tasks/stage/runner.py", "tasks/stage/gates.py"), "tasks flows"),
    "flows": (
        ("flows/planning/plan.py", "flows/records/past_runs.py", "flows/runs/garbage.py", "flows/records/results.py"),
        "flows",
    ),
    "trackers": (("trainer_lib/trackers/spool.py", "trainer_lib/trackers/mlflow/delivery.py"), "trackers"),
    "recipes": (
        ("trainer_lib/recipes/tables/splitting.py", "trainer_lib/recipes/time_series_forecasting.py"),
        "recipes",
    ),
    "arguments": (("trainer_lib/arguments/[cgv]*.py",), "arguments"),
}
OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


@dataclass
class Mutant:
    """One fault: `before`, the `nth` time that it stands in `function`, becomes `after`."""

    room: str
    file: str
    function: str
    kind: str
    before: str
    nth: int
    after: str
    killed_by: str | None = None  # the first test that failed; none did when this is None

    @property
    def title(self) -> str:
        return f"{self.room}: {self.file} {self.function}: {self.kind}: {' '.join(self.before.split())[:70]}"


def _functions(module: ast.Module) -> Iterator[tuple[str, Function]]:
    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, Function):
                    yield name, child
                yield from below(child, f"{name}.")

    yield from below(module, "")


def _changes(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the kind, the replaced node and the new text of each fault that a node allows."""

    def segment(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    match node:
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Name) or test.id != "TYPE_CHECKING":
            yield "condition", test, f"not ({segment(test)})"
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            sign = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}.get(type(operator))
            if sign:
                yield "bound", node, f"{segment(left)} {OPPOSITE[sign]} {segment(right)}"
        case ast.Expr(value=ast.Call()):
            yield "removed call", node, "pass"
        case ast.Call(args=[first, second, *_]) if segment(first) != segment(second):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                whole, start = segment(node), segment(node.func)
                rest = whole[len(start) :].replace(segment(first), "\0", 1).replace(segment(second), segment(first), 1)
                yield "swapped argument", node, start + rest.replace("\0", segment(second), 1)
        case ast.Raise() if node.exc is not None:
            yield "lost exception", node, "pass"


def _candidates(room: str) -> Iterator[Mutant]:
    for pattern in ROOMS[room][0]:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            for name, function in _functions(ast.parse(text)):
                body = ast.get_source_segment(text, function) or ""
                for node in ast.walk(function):
                    for kind, part, after in _changes(node, text):
                        before = ast.get_source_segment(text, part) or ""
                        start = _offset(text, part) - _offset(text, function)
                        nth = body[:start].count(before)
                        yield Mutant(room, relative(path), name, kind, before, nth, after)


def _offset(text: str, node: ast.AST) -> int:
    assert isinstance(node, ast.expr | ast.stmt)
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])) + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())


def renew(mutants: list[Mutant]) -> list[Mutant]:
    """Draw, for every fault whose code is gone, another one of its room and kind."""
    kept = [mutant for mutant in mutants if place(mutant, ROOT) is not None]
    taken = {(mutant.function, mutant.kind, mutant.before, mutant.nth) for mutant in kept}
    renewed = []
    for number, mutant in enumerate(mutants):
        if mutant not in kept:
            fitting = [other for other in _candidates(mutant.room) if other.kind == mutant.kind]
            free = [other for other in fitting if (other.function, other.kind, other.before, other.nth) not in taken]
            mutant = random.Random(f"{SEED} renewed {number}").choice(free)
            taken.add((mutant.function, mutant.kind, mutant.before, mutant.nth))
        renewed.append(mutant)
    return renewed


def place(mutant: Mutant, root: Path) -> tuple[Path, str] | None:
    """Return the file that has the fault's place, and its text with the fault; None where the code is gone."""
    here = [root / mutant.file] if (root / mutant.file).is_file() else []
    for path in [*here, *(root / relative(path) for path in sources())]:
        text = path.read_text(encoding="utf-8")
        if mutant.before not in text:
            continue
        for name, function in _functions(ast.parse(text)):
            if name != mutant.function:
                continue
            start, body = _offset(text, function), ast.get_source_segment(text, function) or ""
            pieces = body.split(mutant.before)
            if len(pieces) > mutant.nth + 1:
                head, tail = pieces[: mutant.nth + 1], pieces[mutant.nth + 1 :]
                changed = mutant.before.join(head) + mutant.after + mutant.before.join(tail)
                return path, text[:start] + changed + text[start + len(body) :]
    return None


def _tests(mutant: Mutant) -> list[str]:
    """Return what is run, in turn: the test that noticed it, its room's tests, those of every change, the slow ones."""
    room = [name for name in (f"tests/unit/{part}" for part in ROOMS[mutant.room][1].split()) if (ROOT / name).exists()]
    return [
        *_known(mutant.killed_by),
        " ".join(room),
        "tests/unit",
        "-m not*slow*and*not*nightly tests",
        "-m slow tests",
    ]


def _known(test: str | None) -> list[str]:
    """Return the function that noticed a fault, of all its cases (their names may have spaces), wherever it is now."""
    file, _, name = (test or "").partition("::")
    definition = f"def {name.partition('[')[0]}("
    paths = [ROOT / file, *sorted((ROOT / "tests").rglob("test_*.py"))] if name else []
    found = (path for path in paths if path.is_file() and definition in path.read_text(encoding="utf-8"))
    return [f"{relative(path)}::{definition[4:-1]}" for path in found][:1]


def _end_what_is_left() -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()):
                process.kill()


def _make_environment(tree: Path) -> None:
    """Make an environment that imports the product from `tree`: our workers start with -I and ignore PYTHONPATH."""
    folder = tree / ".venv"
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "mutants.pth").write_text(
        f"{tree}\nimport site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    here, there = Path(sys.executable).parent, folder / "bin"
    for script in here.iterdir():
        if script.is_file() and not (there / script.name).exists() and script.read_bytes().startswith(b"#!"):
            text = script.read_text(encoding="utf-8").replace(f"#!{here}/", f"#!{there}/", 1)
            (there / script.name).write_text(text, encoding="utf-8")
            (there / script.name).chmod(0o755)


def _first_failure(tree: Path, tests: str) -> str | None:
    """Run tests until one fails. Return its name; the whole call is named when it ended or hung without one."""
    words = [word.replace("*", " ") for word in tests.split(" ")]
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command = [f"{tree}/.venv/bin/python", "-m", "pytest", *options, *words]
    environment = {**os.environ, MARK: str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return tests.split(" ")[-1]
    finally:
        process.kill()
        _end_what_is_left()
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed or process.returncode in (0, 5) or "ERROR: not found:" in output:
        return failed[0] if failed else None
    return tests.split(" ")[-1]


def kill(mutant: Mutant, tree: Path, depth: int) -> str | None:
    """Run tests on the tree with the fault in it, the nearest ones first; return the first that fails."""
    found = place(mutant, tree)
    if found is None:
        return "gone"
    path, text = found
    whole = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        return next(filter(None, (_first_failure(tree, tests) for tests in _tests(mutant)[:depth])), None)
    finally:
        path.write_text(whole, encoding="utf-8")


def run(depth: int, record: bool, only: str | None) -> int:
    """Run every fault of the list; return the number of those that were noticed once and are not any more."""
    mutants = read()
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        # Links stay links: flows and tasks are imported through trainflow/flows and trainflow/tasks.
        left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", ".trainflow")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
        _make_environment(tree)
        for number, mutant in enumerate(mutants, 1):
            if only and only not in mutant.title:
                continue
            start = time.monotonic()
            killer = kill(mutant, tree, depth)
            lost += bool(mutant.killed_by and killer in (None, "gone"))
            print(
                f"{number:3} {time.monotonic() - start:5.0f} s  {killer or 'SURVIVED':60}  {mutant.title}", flush=True
            )
            if record and killer != "gone":
                mutant.killed_by = killer
                write(mutants)
    print(f"{sum(bool(mutant.killed_by) for mutant in mutants)} of {len(mutants)} recorded as noticed, {lost} lost")
    return lost


def read() -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(LIST.read_text(encoding="utf-8"))]


def write(mutants: list[Mutant]) -> None:
    LIST.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["renew", "run"])
    parser.add_argument("--depth", type=int, default=9, help="how many groups of tests are tried at most")
    parser.add_argument("--record", action="store_true", help="write down which test noticed each fault")
    parser.add_argument("--only", help="faults whose title has this text")
    options = parser.parse_args()
    if options.verb == "renew":
        write(renew(read()))
    else:
        sys.exit(bool(run(options.depth, options.record, options.only)))
