"""README, tutorial, notebook and how-to pages, done literally outside of the repository."""

from __future__ import annotations

import html
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.command import Cli, python
from tests.support.pages import Block, blocks
from tests.support.repository import ROOT
from trainer_lib.base.yaml_text import dump_yaml, parse_yaml

pytestmark = pytest.mark.timeout(900)
# What workers do, and what a whole training comes to, is in test_digits.py.
HERE = ["train.args.max_steps=8", *map("{}.launch=in_process".format, ("prepare", "train", "evaluate", "predict"))]


@dataclass(frozen=True)
class Page:
    """A page: what its reader has, and replacements for parts of its text."""

    elsewhere: str = ""
    """The test that runs what the page is about; here its settings are understood."""
    wine: bool = True
    """Whether the reader has a project."""
    read_as: Mapping[str, str] = field(default_factory=dict)


PAGES = {
    "conversations": Page("tests/unit/recipes/test_conversations.py", False, {"chats.jsonl": "points.csv"}),
    "csv": Page(wine=False),
    "debug": Page("tests/flows/test_cli.py"),
    "finetune": Page("tests/flows/test_new_projects.py", wine=False),
    "gpus": Page(),
    "machines": Page("tests/distributed/test_launch_nodes.py", read_as={"processes: 4": "processes: 1"}),
    "own-data": Page(wine=False, read_as={"def prepare(": "def build_model(options, data): ...\n\n\ndef prepare("}),
    "own-model": Page("tests/flows/test_pipeline.py"),
    "packing": Page(),
    "predict": Page("tests/processes/test_new_rows.py"),
    "publish": Page(read_as={"hf://organisation/digits": "models"}),
    "register": Page("tests/services/test_mlflow_registry.py"),
    "resume": Page("tests/e2e/test_kill_resume.py"),
    "s3": Page("tests/flows/test_pipeline_runs.py", read_as={"s3://bucket/project": "store"}),
    "schedule": Page("tests/e2e/test_deployments.py"),
    "tune": Page("tests/flows/test_sweep.py"),
}


def test_every_page_is_done_and_what_stands_for_something_else_is_there() -> None:
    assert {path.stem for path in (ROOT / "docs" / "howto").glob("*.md")} == set(PAGES)
    assert [page.elsewhere for page in PAGES.values() if not (ROOT / page.elsewhere).exists()] == []
    for name, page in PAGES.items():
        text = "".join(block.text for block in blocks(f"howto/{name}.md"))
        assert [old for old in page.read_as if old not in text] == []


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that `trainflow init wine` makes."""
    from trainflow.flows.new_project.starting import write_project

    folder = tmp_path_factory.mktemp("new") / "wine"
    write_project(folder, "tabular-classification")
    return folder


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path, wine: Path, cli: Cli) -> None:
    page = PAGES[name]
    project = Project(tmp_path / "project", cli)
    if page.wine:
        shutil.copytree(wine, project.folder, dirs_exist_ok=True)
    done = [read(block, page) for block in blocks(f"howto/{name}.md")]
    for block in done:
        project.take(block)
    if (project.folder / "pipeline.yaml").exists():
        project.run("trainflow why pipeline.yaml")
    for command in [command for block in done if not page.elsewhere for command in block.commands]:
        project.run(command)


def read(block: Block, page: Page) -> Block:
    """The block as it is done here."""
    text = block.text
    for old, new in page.read_as.items():
        text = text.replace(old, new)
    return replace(block, text=text)


class Project:
    """A folder in which commands are run."""

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.folder = folder
        self.cli = cli
        self.scratch = folder.parent / "scratch"
        folder.mkdir()
        self.scratch.mkdir()
        draw = random.Random(0)
        (folder / "customers.csv").write_bytes("\r\n".join(_customers(240)).encode("cp1252"))
        points = [f"{draw.random()},{draw.random()},{draw.randint(0, 1)}" for _ in range(40)]
        (folder / "points.csv").write_text("a,b,kind\n" + "\n".join(points) + "\n")

    def take(self, block: Block) -> None:
        """Put the settings of a page into the spec, and its recipe and other specs beside it."""
        named = re.match(r"# (\w+\.yaml)\n", block.text)
        if block.language == "yaml" and named is not None and named[1] != "pipeline.yaml":
            (self.folder / named[1]).write_text(block.text)
        elif block.language == "yaml":
            self.take_settings(block.text)
        elif block.language == "python" and block.text.startswith("# recipe.py"):
            (self.folder / "recipe.py").write_text(block.text)
            self.take_settings("recipe: recipe.py")

    def take_settings(self, text: str) -> None:
        """Put the settings of a page into the spec."""
        path = self.folder / "pipeline.yaml"
        spec = parse_yaml(path.read_text()) if path.exists() else {"name": "howto", "recipe": "recipe.py"}
        path.write_text(dump_yaml(_merged(spec, parse_yaml(text))))

    def run(self, line: str) -> None:
        """Run a line as a shell does, but trainflow in this process."""
        folder = self.folder
        for command in line.split(" && "):
            program, *words = shlex.split(command)
            if program == "cd":
                folder /= words[0]
            elif program == "trainflow":
                done = self.cli(*words, *(HERE if words[0] == "run" else []), cwd=folder)
                assert done.code == 0, f"$ {command}\n{done.out}{done.err}"
                assert "Traceback" not in done.err
            else:
                self.run_in_shell(command, folder)

    def run_in_shell(self, command: str, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, "TMPDIR": str(self.scratch)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr


def _customers(count: int) -> Iterator[str]:
    """The lines of the table of the page csv."""
    yield "customer;revenue;since;city;comment;cancelled on;churned"
    comments = ("waits for an answer", "likes the new tariff", "wants a <b>paper</b> bill")
    for row in range(count):
        money = "unknown" if row % 11 == 5 else f"${900 + 37 * row:,}".replace(",", ".") + ",50"
        since = f"{1 + row % 28:02}/{1 + row % 12:02}/{2018 + row % 5}"
        city, comment = ("Köln", "köln ", "Graz", "Bern")[row % 4], f"{comments[row % 3]} since week {row * 7 % 53}"
        end = "2024-01-01;yes" if row % 3 == 0 else ";no"
        yield f"K-{row:04};{money};{since};{city};{comment};{end}"


def _merged(base: Any, more: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    return {**base, **{name: _merged(base.get(name), value) for name, value in more.items()}}


# -- the tutorial -----------------------------------------------------------------------------------------------------

MARK = "@@ command "


@dataclass
class Step:
    """One command, and what the page shows of its output; nothing shown: anything."""

    command: str
    shown: list[str]

    def matches(self, output: str) -> bool:
        """Whether the output is what is shown; `…` is any text in a line, or any lines."""
        lines = [re.escape(line).replace("…", ".*") + r" *\n" if line != "…" else r"(.*\n)*?" for line in self.shown]
        return not self.shown or re.fullmatch("".join(lines), output.lstrip("\n")) is not None


def _steps() -> list[Step]:
    steps = []
    for block in blocks("tutorial.md"):
        if block.language == "python":
            steps.append(Step(f"python - <<'END'\n{block.text}END", []))
        elif block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(line[2:], []))
                else:
                    steps[-1].shown.append(line)
    return steps


def test_only_the_installation_is_left_out() -> None:
    assert [block.text for block in blocks("tutorial.md") if block.language not in ("console", "python")] == [
        'python3 -m venv .venv && source .venv/bin/activate\npip install -c constraints.txt ".[torch]"\n'
    ]
    assert len(_steps()) > 10


@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_does_what_the_page_shows(tmp_path: Path) -> None:
    steps = _steps()
    script = "".join(f"echo '{MARK}{number}'\n{step.command}\n" for number, step in enumerate(steps))
    # Not so narrow that tables lose columns; a terminal of the reader's is as wide.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    folder, log = tmp_path / "empty", tmp_path / "log"
    folder.mkdir()
    with log.open("wb") as output:
        bash = subprocess.Popen(
            ["bash", "-e", "-c", script], cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = bash.wait(840)
        except subprocess.TimeoutExpired:
            os.killpg(bash.pid, signal.SIGKILL)
            code = bash.wait()
    text = log.read_text(encoding="utf-8")
    assert code == 0, text
    outputs = re.split(rf"^{MARK}\d+\n", text, flags=re.MULTILINE)[1:]
    # What bash says of the command that the page kills.
    outputs = [re.sub(r"^bash: line \d+: .* Killed .*\n", "", output, flags=re.MULTILINE) for output in outputs]
    wrong = [
        f"$ {step.command}\n{output}" for step, output in zip(steps, outputs, strict=True) if not step.matches(output)
    ]
    assert wrong == []


# -- the README -------------------------------------------------------------------------------------------------------

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "Trainer(Line()" in block]
    (tmp_path / "snippet.py").write_text(snippet)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time it resumes from the last checkpoint
        runpy.run_path("snippet.py", run_name="__main__")
        assert float(capsys.readouterr().out.splitlines()[-1]) < 1e-6


def test_the_pictures_are_small() -> None:
    pictures = [ROOT / name for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)]
    assert len(pictures) >= 2
    assert [picture.name for picture in pictures if not 1_000 < picture.stat().st_size < 150_000] == []


# -- the notebook -----------------------------------------------------------------------------------------------------

NOTEBOOK = ROOT / "examples" / "notebook" / "pipeline.ipynb"


def test_it_is_kept_without_outputs() -> None:
    assert [cell.outputs for cell in _read(NOTEBOOK).cells if cell.cell_type == "code" and cell.outputs] == []


@pytest.mark.timeout(600)
def test_every_cell_runs_and_the_last_one_shows_the_report(tmp_path: Path) -> None:
    for name in ("notebook", "tabular"):
        shutil.copytree(ROOT / "examples" / name, tmp_path / name)
    folder = tmp_path / "notebook"
    given = (folder / NOTEBOOK.name).read_text("utf-8")
    several = given.replace("train.args.max_steps=60", 'train.args.max_steps=60\\", \\"train.launch.processes=2')
    assert several != given
    (folder / NOTEBOOK.name).write_text(several, "utf-8")
    # A process of its own: the client leaves threads, and the kernel is a child of it.
    client = ("-c", "from nbclient.cli import main; main()")
    env = {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    words = (NOTEBOOK.name, "--output", "executed.ipynb", "--timeout", "500")
    python(*client, *words, cwd=folder, env=env, timeout=590)
    executed = _read(folder / "executed.ipynb")
    shown = [_shown(cell) for cell in executed.cells if cell.cell_type == "code"]
    assert "'wine'" in shown[0]
    assert "never run before" in shown[1]
    assert shown[3].endswith("'finished'")
    # Lines below the cell say how it goes.
    assert re.search(r"train +.*step \d+/60", shown[3]), shown[3]
    [commit] = (folder / ".trainflow" / "stages" / "train").glob("*/COMMIT.json")
    assert json.loads(commit.read_text("utf-8"))["meta"]["meta"]["world_size"] == 2
    assert "test_accuracy" in shown[4]
    assert len(shown[5].splitlines()) >= 4
    assert "row_id" in shown[6]
    assert "push-to-hub" in shown[7]
    assert "prediction" in shown[8]
    last = html.unescape(executed.cells[-1].outputs[-1]["data"]["text/html"])
    assert "<svg" in last
    assert "push-to-hub" in last
    assert (folder / ".trainflow" / "hub" / "wine").is_dir()


def _read(path: Path) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def _shown(cell: nbformat.NotebookNode) -> str:
    """What is below a cell, as text."""
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "\n".join(texts).strip()
