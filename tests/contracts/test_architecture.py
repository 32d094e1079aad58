"""Three houses and their floors; what the orchestrator's process may import; packages as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import repository
from tests.support.repository import ROOT

HEAVY = ("torch", "accelerate", "deepspeed", "transformers")
ENGINES = ("prefect", "mlflow")
BEFORE_ENGINES = (
    "trainer_lib.errors",
    "trainer_lib.arguments",
    "trainer_lib.storage",
    "tasks.configs",
    "flows.spec.spec",
)
WITHOUT_TORCH = (
    *("trainer_lib.errors", "trainer_lib.arguments", "trainer_lib.storage", "trainer_lib.commit"),
    *("trainer_lib.locks.lease", "trainer_lib.launch", "trainer_lib.checkpoint.catalogue", "trainer_lib.hub.transport"),
)


def _imported(names: Iterable[str]) -> set[str]:
    """Top-level packages that a fresh interpreter holds after importing `names`."""
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    command = [sys.executable, "-c", program, json.dumps(list(names))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_linter_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_flows_and_tasks_leave_torch_out() -> None:
    names = [*repository.modules("tasks"), *repository.modules("flows")]
    assert not _imported(names) & set(HEAVY)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_torch_free_package_leaves_torch_and_the_engines_out(package: str) -> None:
    assert not _imported(repository.modules(package)) & {*HEAVY, *ENGINES}


def test_a_spec_is_read_before_any_engine_is_imported() -> None:
    assert not _imported(BEFORE_ENGINES) & {*HEAVY, *ENGINES}


def test_the_command_line_starts_without_engines() -> None:
    assert not _imported(["flows.cli.main"]) & {*HEAVY, *ENGINES}


def test_importing_trainer_lib_leaves_torch_out() -> None:
    assert not _imported(["trainer_lib"]) & {*HEAVY, *ENGINES, "numpy"}


def test_every_package_is_listed() -> None:
    assert set(repository.pyproject()["tool"]["setuptools"]["packages"]) == repository.packages()


def test_every_torch_free_name_stands() -> None:
    for name in (*WITHOUT_TORCH, *BEFORE_ENGINES):
        assert repository.modules(name), name
