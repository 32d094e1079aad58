"""The settings of a runner are checked before anything is asked of a cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from flows.spec.checks import check_spec
from flows.spec.spec import load_spec
from tasks.configs import LaunchSettings, PrepareConfig
from tasks.runner_settings import RunnerSettings, check_runner
from tasks.stage.resolver import Resolver
from tests.support.shared_sources import project
from trainer_lib.errors import ConfigError, MissingExtraError


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def check(launch: dict[str, Any] | None = None, *, is_sharded: bool = True, **runner: Any) -> None:
    settings = RunnerSettings(**{"kind": "dask", "workers": 4, **runner})
    check_runner(settings, LaunchSettings(**(launch or {})), section="prepare", is_sharded=is_sharded)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "tls://host:8786", "host:8786", None])
def test_addresses_of_dask(address: str | None) -> None:
    check(address=address)
    check({"threads": 2, "max_restarts": 1, "timeout_s": 60, "env": {"A": "b"}, "grace_s": 5}, address=address)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"address": "host"}, "runner.address", "This is not the address of a Dask cluster. Give that of"),
        ({"address": "http://host:8786"}, "runner.address", "not the address of a Dask cluster"),
        ({"kind": "ray", "address": "ray://host:10001"}, "runner.address", "not the address of a Ray cluster"),
        ({"launch": {"processes": 4}}, "launch.processes", "The runner decides this"),
        ({"launch": {"engine": "ray", "processes": 1}}, "launch.engine", "The runner decides this"),
        ({"launch": {"kind": "in_process"}}, "launch.kind", "Remove it, or remove prepare.runner."),
        ({"launch": {"nodes": 2}}, "launch.nodes", "The runner decides this"),
        ({"launch": {"devices": (0,)}}, "launch.devices", "The runner decides this"),
        ({"is_sharded": False}, "runner.kind", "it has no function 'prepare_shard'"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**given)
    assert caught.value.field == f"prepare.{field}"
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "package"), [("dask", "prefect_dask"), ("ray", "prefect_ray"), ("ray", "ray")])
def test_without_its_extra_a_runner_is_refused_by_name(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(MissingExtraError) as caught:
        check(kind=kind)
    assert package.replace("_", "-") in caught.value.message
    assert f"trainflow[{kind}]" in str(caught.value)


def test_a_spec_is_checked_with_its_recipe(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    words = ("prepare.runner.kind=dask", "prepare.runner.workers=2")
    check_spec(load_spec(folder / "pipeline.yaml", words), Resolver())
    with pytest.raises(ConfigError, match="runner decides this"):
        check_spec(load_spec(folder / "pipeline.yaml", (*words, "prepare.launch.processes=2")), Resolver())
    text = (folder / "recipe.py").read_text()
    (folder / "recipe.py").write_text(text.replace("prepare_shard(source", "prepare(source"))
    with pytest.raises(ConfigError, match="no function 'prepare_shard'"):
        check_spec(load_spec(folder / "pipeline.yaml", words), Resolver())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prepare.runner.kind=dsk", "dask"),
        ("prepare.runner.wokers=2", "Did you mean 'workers'?"),
        ("prepare.runner.workers=0", "prepare.runner.workers"),
    ],
)
def test_typing_errors_are_refused(tmp_path: Path, given: str, message: str) -> None:
    folder = project(tmp_path / "project")
    with pytest.raises(ConfigError) as caught:
        load_spec(folder / "pipeline.yaml", ("prepare.runner.kind=dask", "prepare.runner.workers=2", given))
    assert message in str(caught.value)


def test_the_runner_is_no_part_of_the_key() -> None:
    assert PrepareConfig.affects()["runner"] == "nothing"
