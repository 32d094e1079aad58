"""Launches on a real Ray cluster, whose machines are raylets on this one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.command import running
from tests.support.engine_launch import Launch
from tests.support.launched import request
from tests.support.ray_cluster import VARIABLES, RayCluster
from tests.support.repository import ROOT
from trainer_lib.errors import CodeError, ConfigError, InfrastructureError, Interrupted, Preempted
from trainer_lib.launch.settings.gpu_selection import num_cores
from trainer_lib.protocol.requests import PreparedData

pytestmark = [pytest.mark.needs("ray"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[RayCluster]:
    """Two machines of two CPUs each, for tests that take none away."""
    cluster = RayCluster(2, 2)
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster() -> Iterator[RayCluster]:
    """Two machines of one CPU each."""
    cluster = RayCluster(1, 1)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def ray_launch(cluster: RayCluster, asked: Any, env: dict[str, str] | None = None, **config: Any) -> Launch:
    usual = {"engine": "ray", "address": cluster.address, "grace_s": 20.0}
    return Launch(asked, env, **{**usual, **config})


def test_two_machines_train_what_two_processes_train(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, shared_cluster: RayCluster
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = ray_launch(shared_cluster, asked, nodes=2)
    result = started.join(200)
    assert (result.world_size, result.global_step) == (2, 36)
    assert tiny.weights(asked.output) == uninterrupted_weights
    assert any(event["message"].startswith("runs on ") for event in started.reported("wait"))
    assert list((tmp_path / "train" / "attempts").iterdir()) == []


def test_a_model_is_sharded_over_two_machines(
    tmp_path: Path, prepared_data: PreparedData, shared_cluster: RayCluster
) -> None:
    sharded = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "ray"), **sharded)
    result = ray_launch(shared_cluster, asked, nodes=2).join(200)
    here = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "here"), **sharded)
    tiny.run(here, kind="torchrun", processes=2)
    assert (result.world_size, result.global_step) == (2, 36)
    assert tiny.weights(asked.output) == tiny.weights(here.output)
    # Each machine has written its rows.
    shards = (tmp_path / "ray" / "checkpoints" / "checkpoint-36" / "shards").iterdir()
    assert sorted(path.name for path in shards) == ["rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.timeout(700)
def test_all_stages_of_digits_run_on_the_cluster(tmp_path: Path, shared_cluster: RayCluster) -> None:
    shutil.copytree(ROOT / "examples" / "digits", tmp_path / "digits")
    launch = {"engine": "ray", "address": shared_cluster.address, "nodes": 2, "processes": 1, "grace_s": 20}
    words = [f"train.launch.{name}={value}" for name, value in launch.items()]
    words += [f"storage={tmp_path}/store", "tracking.enabled=false", "train.args.num_train_epochs=3"]
    home = {"PREFECT_HOME": str(tmp_path / "prefect")}
    with running("run", "pipeline.yaml", *words, cwd=tmp_path / "digits", log=tmp_path / "log", env=home) as command:
        assert command.process.wait(600) == 0, command.output
        assert command.output.count("runs on ") >= 3, command.output  # train, evaluate and predict
    [metrics] = (tmp_path / "store").glob("stages/evaluate/*/metrics.json")
    assert json.loads(metrics.read_text())["test"]["accuracy"] > 0.8


def test_workers_have_the_threads_of_the_machine_and_not_those_that_ray_sets(
    tmp_path: Path, shared_cluster: RayCluster
) -> None:
    found = "raise ValueError(os.environ['OMP_NUM_THREADS'])"
    asked = request(tmp_path, f"import os\ndef prepare(o, out):\n    {found}\ndef build_model(o, d): ...\n")
    failure = Launch(asked, {"OMP_NUM_THREADS": ""}, engine="ray", address=shared_cluster.address).failure()
    assert isinstance(failure, CodeError)
    assert failure.message == f"ValueError: {num_cores()}"


def test_a_machine_that_is_killed_is_replaced_and_training_goes_on_to_the_same_bits(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, own_cluster: RayCluster
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = ray_launch(own_cluster, asked, {"STEP_S": "0.1"}, nodes=2, max_restarts=1, join_timeout_s=120.0)
    started.wait_for("save", 2)
    own_cluster.tell("kill", 1)
    started.wait_for("warning")
    own_cluster.tell("add", 1)
    result = started.join(250)
    assert (result.world_size, result.global_step) == (2, 36)
    assert result.resumed_from >= 12
    (lost,) = started.reported("warning")
    assert "was lost" in lost["message"]
    assert "Starting again (1 of 1)" in lost["message"]
    assert tiny.weights(asked.output) == uninterrupted_weights


def test_a_range_of_machines_goes_on_without_the_one_that_is_lost(
    tmp_path: Path, prepared_data: PreparedData, own_cluster: RayCluster
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = ray_launch(own_cluster, asked, {"STEP_S": "0.1"}, nodes="1:4", max_restarts=1)
    started.wait_for("save", 2)
    own_cluster.tell("kill", 0)
    result = started.join(250)
    assert (result.world_size, result.global_step) == (1, 36)
    assert result.resumed_from >= 12


def test_a_machine_that_is_drained_is_left_with_everything_saved(
    tmp_path: Path, prepared_data: PreparedData, own_cluster: RayCluster
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = ray_launch(own_cluster, asked, {"STEP_S": "0.2"}, nodes=2)
    started.wait_for("save")
    own_cluster.tell("drain", 1, 60)
    failure = started.failure()
    assert isinstance(failure, Preempted)
    assert "The cluster took the machine" in failure.message
    assert (Path(asked.output) / "checkpoints" / f"checkpoint-{failure.step}").is_dir()


def test_cancelling_saves(tmp_path: Path, prepared_data: PreparedData, shared_cluster: RayCluster) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = ray_launch(shared_cluster, asked, {"STEP_S": "0.1"}, nodes=2)
    started.wait_for("save")
    started.stop.set()
    failure = started.failure()
    assert isinstance(failure, Interrupted)
    assert (Path(asked.output) / "checkpoints" / f"checkpoint-{failure.step}").is_dir()


def test_gpus_that_nobody_asked_for_are_not_left_aside_without_a_word(
    tmp_path: Path, prepared_data: PreparedData, own_cluster: RayCluster
) -> None:
    own_cluster.tell("add", 2, 1)
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"), use_cpu=False)
    failure = ray_launch(own_cluster, asked).failure()
    assert isinstance(failure, ConfigError)
    assert failure.field == "train.launch.engine_options.gpus"
    on_cpu = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "cpu"), use_cpu=True)
    assert ray_launch(own_cluster, on_cpu).join(200).global_step == 36


def test_without_its_token_the_cluster_takes_nothing(
    tmp_path: Path, shared_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    failure = ray_launch(shared_cluster, request(tmp_path)).failure()
    assert isinstance(failure, ConfigError | InfrastructureError)
    assert "oken" in str(failure)
