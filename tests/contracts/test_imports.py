"""What importing a part of the product brings into a process: torch and the engines stay out until needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from tests.support import repository
from tests.support.repository import ROOT

HEAVY = {"torch", "accelerate", "datasets", "deepspeed", "safetensors", "transformers"}
ENGINES = {"prefect", "mlflow"}
VENDORS = {"huggingface_hub", "numpy", "pyarrow"}

#: Packages, with every module below them.
PACKAGES = {
    "flows": HEAVY,
    "trainflow": HEAVY,
    "tasks": HEAVY,
    "trainer_lib.arguments": HEAVY | ENGINES | VENDORS,
    "trainer_lib.launch": HEAVY | ENGINES | VENDORS,
    "trainer_lib.locks": HEAVY | ENGINES | VENDORS,
    "trainer_lib.storage": HEAVY | ENGINES | VENDORS,
    "trainer_lib.trackers": HEAVY | ENGINES | VENDORS,
}

#: Single modules, with what they import themselves.
MODULES = {
    "trainer_lib": HEAVY | ENGINES | VENDORS | {"yaml", "tqdm", "fsspec"},
    "trainer_lib.callbacks.early_stopping": HEAVY | ENGINES,
    "trainer_lib.callbacks.progress_bar": HEAVY | ENGINES,
    "trainer_lib.checkpoint.catalogue": HEAVY | ENGINES,
    "trainer_lib.commit": HEAVY | ENGINES,
    "trainer_lib.errors": HEAVY | ENGINES,
    "trainer_lib.hub.card": HEAVY | ENGINES | VENDORS,
    "trainer_lib.hub.huggingface": HEAVY | ENGINES | VENDORS,
    "trainer_lib.hub.transport": HEAVY | ENGINES | VENDORS,
    "flows.cli.main": HEAVY | ENGINES,
    "flows.results": HEAVY | ENGINES,
    "trainflow": HEAVY | ENGINES | VENDORS,
    "flows.spec.spec": HEAVY | ENGINES,
    "tasks.configs": HEAVY | ENGINES,
    "tasks.push_to_hub": HEAVY | {"mlflow", "huggingface_hub"},
    "tasks.stage.keys": HEAVY | ENGINES,
    "tasks.stage.runner": HEAVY | ENGINES,
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
