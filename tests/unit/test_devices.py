"""Which device a process takes, by what is there and how it was started."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from trainer_lib.devices import choose_device
from trainer_lib.errors import ConfigError

SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_the_nth_process_of_a_machine_takes_the_nth_gpu(gpus: pytest.MonkeyPatch) -> None:
    assert choose_device(use_cpu=False) == torch.device("cuda", 0)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        gpus.setenv(name, value)
    assert choose_device(use_cpu=False) == torch.device("cuda", 1)
    assert choose_device(use_cpu=True) == torch.device("cpu")
    gpus.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK = 2: There are only 2 GPUs"):
        choose_device(use_cpu=False)


def test_a_task_of_slurm_that_sees_one_gpu_takes_it(gpus: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}.items():
        gpus.setenv(name, value)
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(use_cpu=False) == torch.device("cuda", 0)
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(use_cpu=False) == torch.device("cuda", 3)


def test_mps_is_taken_alone_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device(use_cpu=False) == torch.device("mps")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MPS serves one process"):
        choose_device(use_cpu=False)


def test_xla_is_asked_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows what is called; tests/unit/trainer/test_xla.py trains."""
    replicas = [1]
    package, runtime = (types.ModuleType(name) for name in ("torch_xla", "torch_xla.runtime"))
    package.__dict__.update(device=lambda: torch.device("meta"), __spec__=ModuleSpec("torch_xla", None))
    runtime.__dict__.update(world_size=lambda: replicas[0])
    for module in (package, runtime):  # gone again afterwards: others look whether there is one
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(use_cpu=False) == torch.device("cpu")  # installed, but not asked for
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert choose_device(use_cpu=False) == torch.device("meta")
    replicas[0] = 2
    with pytest.raises(ConfigError, match="XLA serves one process"):
        choose_device(use_cpu=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="XLA serves one process"):
        choose_device(use_cpu=False)
