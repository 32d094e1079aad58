"""A training's whole life without unpickling anything or running what a file says, seen by Python's audit hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT


def lived(kind: str, folder: Path, *sabotage: str) -> tuple[int, list[str]]:
    """Exit code of a life under the hook, and what it saw."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.no_pickle", kind, str(folder), *sabotage]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, json.loads(lines[-1])


@pytest.mark.parametrize("kind", ["own", "transformers", "peft"])
def test_nothing_is_unpickled_and_no_file_is_run(kind: str, tmp_path: Path) -> None:
    assert lived(kind, tmp_path) == (0, [])


def test_the_hook_sees_what_it_looks_for(tmp_path: Path) -> None:
    code, found = lived("own", tmp_path, "sabotage")
    assert code == 1
    signs = ("torch.load", "pickle.loads", "pickle.Unpickler", "pickle.find_class pathlib", "exec <string>", "open ")
    for sign in (*signs, f"exec {tmp_path}/run/modeling.py"):
        assert any(each.startswith(sign) for each in found), (sign, found)
