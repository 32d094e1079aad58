"""The settings of an engine are checked before anything is asked of a cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.launch import LaunchConfig, resolve_config
from trainer_lib.launch.pool import apart


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def slurm(**given: Any) -> LaunchConfig:
    return LaunchConfig(**{"engine": "slurm", "processes": 4096, **given})


def test_the_processes_of_other_machines_are_taken_as_they_are() -> None:
    config = resolve_config(slurm(nodes="1:4", engine_options={"partition": "gpu", "gpus-per-node": 8}))
    assert (config.world_size, config.rendezvous) == (4 * 4096, None)
    assert resolve_config(config) == config


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"engine": "slrum"}, "engine", "This is not an engine. Choose one of ray, slurm."),
        ({"processes": "auto"}, "processes", "cannot be seen from here"),
        ({"kind": "environment"}, "kind", "starts the processes of each machine itself"),
        ({"kind": "process", "nodes": 2}, "nodes", "runs one process"),
        ({"rendezvous": "10.0.0.1:29500"}, "rendezvous", "The engine slurm decides this on the cluster."),
        ({"devices": (0,)}, "devices", ""),
        ({"nodes": "4:1"}, "nodes", "This is not a range of machines."),
        ({"address": "head:6379"}, "address", "Slurm's programs know their cluster."),
        ({"engine_options": {"partiton": "gpu"}}, "engine_options.partiton", 'Did you mean "partition"?'),
        ({"engine_options": {"nodes": 4}}, "engine_options.nodes", "passes this option to sbatch itself. Remove it"),
        ({"engine": None, "processes": 1, "address": "head:6379"}, "address", "Only an engine reads this setting."),
        ({"engine": None, "processes": 1, "engine_options": {"a": 1}}, "engine_options", "Only an engine"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(slurm(**given))
    assert caught.value.field == f"train.launch.{field}"
    assert message in str(caught.value)


def test_without_its_programs_slurm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="Slurm's program sbatch is not on this machine's PATH"):
        resolve_config(slurm())


def test_without_its_package_ray_is_refused_by_the_name_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(MissingExtraError, match=r'pip install "trainflow\[ray\]"') as caught:
        resolve_config(LaunchConfig(engine="ray", processes=1))
    assert caught.value.field == "train.launch.engine"


def test_workers_that_share_parts_are_placed_one_by_one() -> None:
    three = apart(resolve_config(slurm(processes=3)))
    assert [(config.engine, config.kind, config.processes) for config in three] == [("slurm", "process", 1)] * 3
