"""The how-to pages, done literally in a new project outside of the repository: their files, settings and commands."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import Block, blocks
from tests.support.repository import ROOT
from trainer_lib.yaml_text import dump_yaml, parse_yaml

pytestmark = pytest.mark.timeout(900)
WINE = "trainflow init wine --quiet && mv wine/* ."
RUN = "trainflow run --quiet"
# A run of some minutes, whose command is killed once it has saved something.
UNTIL_SAVED = (
    "command=$!; until ls .trainflow/stages/train/*/checkpoints/*/COMMIT.json > found 2> missing; "
    "do kill -0 $command; sleep 0.1; done; kill -9 $command"
)
KILLED = f"""
trainflow run --quiet train.args.max_steps=600 train.args.save_strategy=steps train.args.save_steps=3 &
{UNTIL_SAVED}
"""


@dataclass(frozen=True)
class Page:
    """How a page is done.

    Attributes:
        before: what its reader has done already.
        then: what its reader does once the settings of the page are in the spec.
        read_as: text of the page -> what stands for it here.
        left_out: the beginning of a command -> why it is not run.
        together: beginnings of commands that are started at the same time, as on several machines.
        refused: the beginning of a command that says no here, which is an answer (exit code 2).
    """

    before: tuple[str, ...] = (WINE,)
    then: tuple[str, ...] = ()
    read_as: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    together: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


PAGES = {
    "csv": Page(before=()),
    "debug": Page(before=(WINE, RUN, f"{RUN} train.args.seed=4"), read_as={"compare RUN last": "compare wine-1 last"}),
    "finetune": Page(
        before=(),
        read_as={
            "$ trainflow run adapted.yaml": f"$ {RUN} adapted.yaml train.args.max_steps=300 & {UNTIL_SAVED}",
        },
    ),
    "gpus": Page(),
    # Both machines are this one, and the data has few rows.
    "machines": Page(
        read_as={
            "join 10.0.0.1:29500": "join 127.0.0.1:{port} --processes 1",
            "10.0.0.1:29500": "127.0.0.1:{port}",
            "global_batch_size: 256": "global_batch_size: 16",
            "processes: 4": "processes: 1",
        },
        together=("trainflow run", "trainflow join"),
    ),
    "own-data": Page(before=(), read_as={"def prepare(": "def build_model(options, data): ...\n\n\ndef prepare("}),
    "own-model": Page(),
    "packing": Page(),
    "predict": Page(before=(WINE, RUN, "mkdir new", "head -4 wine.csv > new/a.csv")),
    "publish": Page(read_as={"hf://organisation/digits": "{s3}/models/digits"}),
    "register": Page(
        then=(RUN, f"{RUN} train.args.seed=4"),
        read_as={"digits 4": "digits 2"},
        left_out={"mlflow models serve": "It serves until it is ended: tests/services/test_mlflow_models.py."},
        refused=("trainflow promote", "trainflow rollback"),  # the second model is not better, and there was no other
    ),
    "resume": Page(before=(WINE, KILLED)),
    "s3": Page(
        read_as={"s3://bucket/project": "{s3}/project"},
        left_out={"pip install": "It is installed."},
        refused=("trainflow resume",),  # the run has finished
    ),
    "schedule": Page(),
    "tune": Page(
        read_as={"compare RUN RUN": "compare wine-1 last"},
        left_out={
            "python - <<'END'\nbest = trainer": "A fragment of a script: tests/unit/search.",
            "python - <<'END'\nfrom ray": "A fragment that takes the extra ray: tests/services/test_ray_tune.py.",
        },
    ),
}


def test_every_page_is_done() -> None:
    assert {path.stem for path in (ROOT / "docs" / "howto").glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path, s3_url: str) -> None:
    page = PAGES[name]
    project = Project(tmp_path / "project")
    for command in page.before:
        project.run(command)
    places = {"{s3}": s3_url, "{port}": str(free_port())}
    found = [read(block, page, places) for block in blocks(f"howto/{name}.md")]
    for block in found:
        project.take(block)
    commands = [command for block in found for command in typed(block)]
    if (project.folder / "pipeline.yaml").exists():
        project.run("trainflow why")  # the settings of the page are understood
    for command in page.then:
        project.run(command)
    commands = [each for each in commands if not any(each.startswith(beginning) for beginning in page.left_out)]
    together = [command for command in commands if page.together and command.startswith(page.together)]
    if together:
        with ThreadPoolExecutor(len(together)) as machines:
            list(machines.map(project.run, together))
    for command in commands:
        if command not in together:
            project.run(command, codes=(0, 2) if command.startswith(page.refused or ("\n",)) else (0,))


def test_what_stands_for_something_else_is_there() -> None:
    for name, page in PAGES.items():
        text = "".join(block.text for block in blocks(f"howto/{name}.md"))
        assert [old for old in (*page.read_as, *page.refused, *page.together) if old not in text] == []


def typed(block: Block) -> list[str]:
    """What is done with a block: its commands, or the program itself."""
    if block.language == "console":
        return block.commands
    is_program = block.language == "python" and not block.text.startswith("# recipe.py")
    return [f"python - <<'END'\n{block.text}END"] if is_program else []


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def read(block: Block, page: Page, places: Mapping[str, str]) -> Block:
    """The block as it is done here."""
    text = block.text
    for old, new in page.read_as.items():
        for place, here in places.items():
            new = new.replace(place, here)
        text = text.replace(old, new)
    return replace(block, text=text)


class Project:
    """A folder in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder.parent / "scratch"
        folder.mkdir()
        self.scratch.mkdir()
        draw = random.Random(0)
        houses = [(n, 10000 + n % 9, draw.randint(40, 200), draw.randint(1, 6)) for n in range(240)]
        rows = [f"{n},{code},{area},{rooms},{900 * area + 9000 * rooms}" for n, code, area, rooms in houses]
        (folder / "houses.csv").write_text("listing_id,postcode,area,rooms,price\n" + "\n".join(rows) + "\n")
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

    def run(self, command: str, codes: tuple[int, ...] = (0,)) -> None:
        """Run a command as a shell does."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "TMPDIR": str(self.scratch)},  # --debug leaves files there, on purpose
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode in codes, f"$ {command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr


def _merged(base: Any, more: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    return {**base, **{name: _merged(base.get(name), value) for name, value in more.items()}}
