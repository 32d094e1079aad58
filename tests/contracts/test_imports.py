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
from tests.support.command import python
from tests.support.repository import ROOT

HEAVY = {"torch", "accelerate", "datasets", "deepspeed", "safetensors", "transformers"}
ENGINES = {"prefect", "mlflow"}
VENDORS = {"huggingface_hub", "numpy", "pyarrow"}

LIGHT = HEAVY | ENGINES | VENDORS

#: What the importing of packages, with every module below them, leaves out.
PACKAGES = [
    (("trainflow",), HEAVY),
    (tuple(f"trainer_lib.{name}" for name in ("arguments", "launch", "locks", "storage", "trackers")), LIGHT),
]

#: What single modules leave out, with what they import themselves.
MODULES = [
    (("trainer_lib",), LIGHT | {"yaml", "tqdm", "fsspec"}),
    (("trainflow", *(f"trainer_lib.hub.{name}" for name in ("card", "huggingface", "folder"))), LIGHT),
    (("trainflow.tasks.push_to_hub",), HEAVY | {"mlflow", "huggingface_hub"}),
    (
        (
            *(f"trainer_lib.{name}" for name in ("callbacks.base", "checkpoint.catalogue", "storage.commit", "errors")),
            *(f"trainflow.tasks.{name}" for name in ("configs", "keys.keys", "stage.runner")),
            *(f"trainflow.flows.{name}" for name in ("cli.main", "records.results", "spec.spec")),
        ),
        HEAVY | ENGINES,
    ),
]

#: Modules that only an extra makes importable, with the package that shows whether it is installed.
OF_EXTRAS = {"trainflow.tasks.runners.dask_tasks": "prefect_dask", "trainflow.tasks.runners.ray_tasks": "prefect_ray"}

PROGRAM = """
import importlib, json, sys
left_out, broken = set(json.loads(sys.argv[2])), {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    found = left_out & {loaded.partition(".")[0] for loaded in sys.modules}
    left_out -= found
    if found:
        broken[name] = sorted(found)
print(json.dumps(broken))
"""


def _broken(names: Iterable[str], left_out: set[str]) -> dict[str, list[str]]:
    """Import modules one after the other in a new process; return what each brought that is left out."""
    done = python("-c", PROGRAM, json.dumps(list(names)), json.dumps(sorted(left_out)))
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("packages", "left_out"), PACKAGES)
def test_no_module_of_a_package_imports_what_the_package_leaves_out(
    packages: tuple[str, ...], left_out: set[str]
) -> None:
    modules = [name for package in packages for name in repository.modules(package)]
    assert set(packages) <= set(modules)
    assert "trainflow" not in packages or set(OF_EXTRAS) <= set(modules)
    modules = [name for name in modules if name not in OF_EXTRAS or find_spec(OF_EXTRAS[name])]
    assert _broken(modules, left_out) == {}


@pytest.mark.parametrize(("modules", "left_out"), MODULES)
def test_a_module_leaves_out_what_it_does_not_need(modules: tuple[str, ...], left_out: set[str]) -> None:
    assert _broken(modules, left_out) == {}


def test_a_package_that_is_brought_is_named_with_its_module() -> None:
    assert _broken(["json", "logging.handlers", "trainer_lib.errors"], {"logging", "torch"}) == {
        "logging.handlers": ["logging"]
    }


def test_every_folder_of_modules_is_a_package_that_the_wheel_holds() -> None:
    assert {path.parent for path in repository.sources()} == {
        path.parent for path in repository.sources() if path.stem == "__init__"
    }
    for house in ("flows", "tasks"):
        assert (ROOT / "trainflow" / house).readlink() == Path("..", house)


def test_a_project_may_have_modules_called_flows_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("NAME = 'theirs'\n")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("NAME = 'theirs'\n")
    script = "import flows, tasks, trainflow.tasks.configs as ours; print(flows.NAME, tasks.NAME, ours.__name__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["theirs", "theirs", "trainflow.tasks.configs"], done.stderr
