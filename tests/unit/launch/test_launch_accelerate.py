"""The configuration files of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import ConfigError
from trainer_lib.launch import LaunchConfig, resolve_config
from trainer_lib.launch.settings import accelerate, gpu_selection


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: False)


NODES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 1 #change rank as per the node
main_process_ip: 192.168.20.1
main_process_port: 9898
mixed_precision: fp16
num_machines: 2
num_processes: 4
rdzv_backend: static
tpu_env: []
use_cpu: false
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""
ZERO = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
ZERO_FILE = """
deepspeed_config:
  deepspeed_config_file: /configs/ds_zero3_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
num_processes: 2
"""


@pytest.fixture
def written(tmp_path: Path, two_cores: None) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "accelerate.yaml").write_text(text)
        return str(tmp_path / "accelerate.yaml")

    return write


def test_accelerates_files_are_read(written: Callable[[str], str]) -> None:
    path = written(NODES)
    config = resolve_config(LaunchConfig(kind="accelerate", config_file=path))
    assert (config.kind, config.nodes, config.node_rank, config.processes) == ("torchrun", 2, 1, 2)
    assert config.rendezvous == "192.168.20.1:9898"
    assert accelerate.merge_arguments({}, path) == {"fp16": True}
    path = written(FSDP)
    config = resolve_config(LaunchConfig(kind="accelerate", config_file=path))
    assert (config.kind, config.processes) == ("accelerate", 2)
    merged = accelerate.merge_arguments({"seed": 1}, path)
    assert (merged["seed"], merged["bf16"], merged["fsdp"]) == (1, True, "full_shard auto_wrap")
    assert merged["fsdp_config"] == {
        "backward_prefetch": "backward_pre",
        "forward_prefetch": True,
        "state_dict_type": "full_state_dict",
        "transformer_layer_cls_to_wrap": ["BertLayer"],
    }
    merged = accelerate.merge_arguments({}, written(ZERO))
    assert (merged["bf16"], merged["max_grad_norm"]) == (True, 0.7)
    offloaded = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert merged["deepspeed"]["zero_optimization"] == {"stage": 2, **offloaded}
    assert accelerate.merge_arguments({}, written(ZERO_FILE)) == {"deepspeed": "/configs/ds_zero3_config.json"}


@pytest.mark.parametrize(
    ("text", "given", "field", "value"),
    [
        (FSDP, {"processes": 1}, "processes", "1"),
        (NODES, {"rendezvous": "10.0.0.1:1"}, "rendezvous", "10.0.0.1:1"),
        (FSDP, {"kind": "torchrun"}, "config_file", None),
        ("distributed_type: MEGATRON_LM", {}, "config_file", None),
        ("compute_environment: AMAZON_SAGEMAKER", {}, "config_file", None),
        ("num_machines: 2\nnum_processes: 3", {}, "config_file", None),
        ("- a list", {}, "config_file", None),
        ("", {"config_file": "none.yaml"}, "config_file", "none.yaml"),
    ],
)
def test_a_contradiction_with_accelerates_file_is_refused(
    written: Callable[[str], str], text: str, given: dict[str, Any], field: str, value: str | None
) -> None:
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        resolve_config(LaunchConfig(**{"kind": "accelerate", "config_file": path, **given}))
    assert (caught.value.field, caught.value.value) == (f"train.launch.{field}", value or path)
    assert caught.value.remedy is not None
