"""Which launcher, how many processes, which environment: decided before anything starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer_lib.errors import ConfigError
from trainer_lib.launch import LaunchConfig, check, devices
from trainer_lib.launch.base import worker_environment


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)


def test_auto_is_two_processes_on_two_cores_under_torchrun(two_cores: None) -> None:
    config = check(LaunchConfig())
    assert (config.kind, config.processes) == ("torchrun", 2)


def test_auto_is_one_plain_process_on_one_core(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    config = check(LaunchConfig())
    assert (config.kind, config.processes) == ("process", 1)


@pytest.mark.parametrize("kind", ["process", "in_process"])
def test_auto_processes_of_a_single_launcher_is_one(two_cores: None, kind: str) -> None:
    assert check(LaunchConfig(kind=kind)).processes == 1  # type: ignore[arg-type]


def test_more_processes_than_cores_are_refused(two_cores: None) -> None:
    with pytest.raises(ConfigError, match=r"2 CPU core") as caught:
        check(LaunchConfig(processes=3))
    assert (caught.value.field, caught.value.value) == ("train.launch.processes", "3")
    assert caught.value.remedy == "Use at most 2."


def test_more_processes_than_devices_are_refused(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_lib.launch.base.devices", lambda environment: 1)
    with pytest.raises(ConfigError, match=r"1 CUDA device"):
        check(LaunchConfig(processes=2))
    assert check(LaunchConfig(processes=2), use_cpu=True).processes == 2


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,1,2", 2), ("MIG-a,MIG-b,MIG-c", 3)]
)
def test_devices_are_counted_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, seen: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    assert devices.devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == seen


@pytest.mark.parametrize("kind", ["accelerate", "mpirun"])
def test_unknown_launcher_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="not a launcher") as caught:
        check(LaunchConfig(kind=kind))  # type: ignore[arg-type]
    assert caught.value.field == "train.launch.kind"


@pytest.mark.parametrize(
    "changes", [{"processes": 0}, {"threads": 0}, {"grace_s": -1.0}, {"timeout_s": -1.0}, {"max_restarts": -1}]
)
def test_senseless_numbers_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(replace(LaunchConfig(), **changes))  # type: ignore[arg-type]
    assert caught.value.field == f"train.launch.{next(iter(changes))}"


def test_single_launcher_with_two_processes_is_refused(two_cores: None) -> None:
    with pytest.raises(ConfigError, match="runs one process"):
        check(LaunchConfig(kind="process", processes=2))


def test_cores_are_shared_out_so_that_load_cannot_change_the_result(
    two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert worker_environment(check(LaunchConfig(processes=2)), {})["OMP_NUM_THREADS"] == "1"
    one = worker_environment(check(LaunchConfig(processes=1)), {})
    assert one["OMP_NUM_THREADS"] == one["MKL_NUM_THREADS"] == "2"
    assert worker_environment(check(LaunchConfig(processes=1, threads=7)), {})["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environment(check(LaunchConfig(processes=2)), {})["OMP_NUM_THREADS"] == "5"


def test_environment_of_the_caller_comes_last_and_an_outer_torchrun_is_forgotten(
    two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    config = check(LaunchConfig(processes=1, env={"A": "config", "B": "config"}))
    environment = worker_environment(config, {"B": "caller"})
    assert (environment["A"], environment["B"]) == ("config", "caller")
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_launch_imports_no_torch() -> None:
    code = (
        "import sys, trainer_lib.launch; sys.exit(bool({'torch', 'prefect', 'mlflow', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
