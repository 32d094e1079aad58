"""The extras of the package: the use of each without its packages is an error that says what to type."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.support.repository import pyproject
from trainer_lib.data.rows.reading import Reading, read_sheet
from trainer_lib.data.rows.row_sources import RowFile
from trainer_lib.errors import CodeError, MissingExtraError
from trainer_lib.evaluation.benchmarks import FIELD, require_lm_eval
from trainer_lib.keras_models.keras_backend import import_keras
from trainer_lib.launch.settings.config import LaunchConfig, require_torch, resolve_config
from trainer_lib.protocol.recipe_functions import user_error
from trainer_lib.recipes.shared.model_places import import_transformers, quantized
from trainer_lib.search.trials import default_hp_space_ray
from trainer_lib.storage import Store
from trainflow.flows.sweeps.ledger import Ledger
from trainflow.tasks.configs import LaunchSettings
from trainflow.tasks.settings import RunnerSettings, check_runner

EXTRAS: dict[str, list[str]] = pyproject()["project"]["optional-dependencies"]
#: They serve those who work on trainflow itself, from a checkout.
OF_CHECKOUTS = {"all", "dev", "docs"}


class Use(NamedTuple):
    """The part of the product that needs an extra, and the module that is missing."""

    extra: str
    module: str
    use: Callable[[], Any]
    field: str | None = None


def _distribute(kind: Any) -> None:
    check_runner(RunnerSettings(kind=kind, workers=2), LaunchSettings(), is_sharded=True)


def _load_in_few_bits() -> None:
    quantized("4bit", place="gpt2", adapted=True)


def _open_workbook() -> None:
    list(read_sheet(io.BytesIO(), RowFile("file:///data", "a.xlsx", 1), Reading(), []))


USES = [
    Use("torch", "torch", require_torch),
    Use("torch", "accelerate", lambda: resolve_config(LaunchConfig(kind="accelerate")), "train.launch.kind"),
    Use("transformers", "transformers", import_transformers),
    Use("quantization", "bitsandbytes", _load_in_few_bits, "train.model.load_in"),
    Use("deepspeed", "deepspeed", lambda: resolve_config(LaunchConfig(kind="deepspeed")), "train.launch.kind"),
    Use("keras", "keras", import_keras, "model"),
    Use("excel", "openpyxl", _open_workbook),
    Use("s3", "s3fs", lambda: Store.open("s3://bucket/x", field="storage"), "storage"),
    Use("gcs", "gcsfs", lambda: Store.open("gs://bucket/x", field="storage"), "storage"),
    Use("dask", "dask", lambda: _distribute("dask"), "prepare.runner.kind"),
    Use("dask", "prefect_dask", lambda: _distribute("dask"), "prepare.runner.kind"),
    Use("ray", "ray", lambda: _distribute("ray"), "prepare.runner.kind"),
    Use("ray", "prefect_ray", lambda: _distribute("ray"), "prepare.runner.kind"),
    Use("ray", "ray", lambda: resolve_config(LaunchConfig(engine="ray", processes=1)), "train.launch.engine"),
    Use("ray", "ray", lambda: default_hp_space_ray(None), "backend"),
    Use("benchmarks", "lm_eval", require_lm_eval, FIELD),
    Use("search", "optuna", lambda: Ledger(Path("unused"), settings=None), "sweep"),  # type: ignore[arg-type]
]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide a module; all others seem installed."""

    def hide(module: str) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else object())
        for scheme in ("s3", "gs"):  # classes that are loaded already
            monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)
        monkeypatch.setenv("KERAS_BACKEND", "torch")

    return hide


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.extra}-{use.module}")
def test_the_use_of_an_extra_that_is_not_installed_says_what_to_type(use: Use, without: Callable[[str], None]) -> None:
    without(use.module)
    with pytest.raises(MissingExtraError) as caught:
        use.use()
    assert (caught.value.exit_code, caught.value.field) == (2, use.field)
    assert caught.value.remedy == f'Install it: pip install "trainflow[{use.extra}]".'
    assert use.extra in ("s3", "gcs") or use.module.replace("_", "-") in caught.value.message


def test_every_extra_that_a_user_installs_has_such_an_error() -> None:
    assert {use.extra for use in USES} == set(EXTRAS) - OF_CHECKOUTS


def _brought() -> list[tuple[str, str]]:
    """Each package that an extra of users brings, with the first extra that does."""
    brought: dict[str, str] = {}
    for extra, lines in EXTRAS.items():
        if extra not in OF_CHECKOUTS:
            for name in (Requirement(line).name for line in lines):
                brought.setdefault(name, extra)
    return [(name, extra) for name, extra in brought.items() if name != "trainflow"]


@pytest.mark.parametrize(("package", "extra"), _brought())
def test_a_recipe_that_imports_a_package_of_an_extra_is_answered_with_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [f'{line}; extra == "{name}"' for name, lines in EXTRAS.items() for line in lines]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: known)  # as an installation of today has it
    module = package.replace("-", "_")
    error = user_error(ModuleNotFoundError(f"No module named {module!r}", name=module), Path("project"))
    assert isinstance(error, MissingExtraError)
    assert error.remedy == f'Install it: pip install "trainflow[{extra}]".'


@pytest.mark.parametrize("module", ["nowhere", "optun", ""])
def test_no_extra_is_named_for_another_module(module: str) -> None:
    assert isinstance(user_error(ModuleNotFoundError("No module", name=module), Path("project")), CodeError)
