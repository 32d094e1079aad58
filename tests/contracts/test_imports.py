"""Who may import whom, and what importing a part of the product brings into a process: torch stays out until needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import repository
from tests.support.repository import ROOT

HEAVY = {"torch", "accelerate", "datasets", "deepspeed", "safetensors", "transformers"}
ENGINES = {"prefect", "mlflow"}
VENDORS = {"huggingface_hub", "numpy", "pyarrow"}

LIGHT = HEAVY | ENGINES | VENDORS

#: Packages, with every module below them.
PACKAGES = {
    **dict.fromkeys(("flows", "trainflow", "tasks"), HEAVY),
    **{f"trainer_lib.{name}": LIGHT for name in ("arguments", "launch", "locks", "storage", "trackers")},
}

#: Single modules, with what they import themselves.
MODULES = {
    "trainer_lib": LIGHT | {"yaml", "tqdm", "fsspec"},
    "trainflow": LIGHT,
    "tasks.push_to_hub": HEAVY | {"mlflow", "huggingface_hub"},
    **{f"trainer_lib.hub.{name}": LIGHT for name in ("card", "huggingface", "transport")},
    **{f"flows.{name}": HEAVY | ENGINES for name in ("cli.main", "results", "spec.spec")},
    **{f"tasks.{name}": HEAVY | ENGINES for name in ("configs", "stage.keys", "stage.runner")},
    **{f"trainer_lib.callbacks.{name}": HEAVY | ENGINES for name in ("early_stopping", "progress_bar")},
    **{f"trainer_lib.{name}": HEAVY | ENGINES for name in ("checkpoint.catalogue", "commit", "errors")},
}

#: Modules that only an extra makes importable, with the package that shows whether it is installed.
OF_EXTRAS = {"tasks.runners.dask_tasks": "prefect_dask", "tasks.runners.ray_tasks": "prefect_ray"}

PROGRAM = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def _packages_after_importing(names: Iterable[str]) -> set[str]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(names))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_a_package_imports_what_the_package_leaves_out(package: str) -> None:
    modules = repository.modules(package)
    assert package in modules
    assert {name for name in OF_EXTRAS if name.startswith(f"{package}.")} <= set(modules)
    modules = [name for name in modules if name not in OF_EXTRAS or find_spec(OF_EXTRAS[name])]
    assert not _packages_after_importing(modules) & PACKAGES[package]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_leaves_out_what_it_does_not_need(module: str) -> None:
    assert not _packages_after_importing([module]) & MODULES[module]


def test_import_linter_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_package_is_listed() -> None:
    assert set(repository.pyproject()["tool"]["setuptools"]["packages"]) == repository.packages()
