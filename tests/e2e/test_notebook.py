"""examples/notebook, executed headless from its first cell to its last."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.support.repository import ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "pipeline.ipynb"


def test_it_is_kept_without_outputs() -> None:
    notebook = _read(NOTEBOOK)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []


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
    client = [sys.executable, "-c", "from nbclient.cli import main; main()"]
    command = [*client, NOTEBOOK.name, "--output", "executed.ipynb", "--timeout", "500"]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
