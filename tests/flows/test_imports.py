"""The orchestrator's process never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

MODULES = sorted(
    f"{house}.{path.stem}"
    for house in ("flows", "tasks")
    for path in (ROOT / house).glob("*.py")
    if path.stem not in ("__init__", "__main__")
)

CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = {"torch", "safetensors", "accelerate", "transformers", "deepspeed", "datasets"} & set(sys.modules)
    if found:
        sys.exit(f"{name} imported {sorted(found)}")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})


def test_no_module_of_flows_or_tasks_imports_torch() -> None:
    done = run(CODE, *MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["flows.spec.spec", "flows.results", "tasks.configs", "tasks.stage.keys", "tasks.stage.runner"]
)
def test_what_runs_before_the_engines_imports_none_of_them(module: str) -> None:
    done = run(f"import {module}, sys; print(sorted({{'prefect', 'mlflow', 'torch'}} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
