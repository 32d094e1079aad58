"""Which launcher, how many processes, which environment, which engine: decided before anything starts."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.launch import base
from trainer_lib.launch.pool import apart, settle
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings import accelerate, gpu_selection
from trainer_lib.launch.settings.config import (
    LaunchConfig,
    check_installed,
    check_rendezvous,
    from_settings,
    require_torch,
    resolve_config,
)
from trainer_lib.launch.settings.variables import worker_environment

MEETING = "10.0.0.1:29500"
SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
PODS = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29501"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"}
DSTACK = {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: False)


def test_auto_is_a_process_for_each_core(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_config(LaunchConfig())
    assert (config.kind, config.processes) == ("torchrun", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    config = resolve_config(LaunchConfig())
    assert (config.kind, config.processes) == ("process", 1)


@pytest.mark.parametrize("kind", ["process", "in_process"])
def test_auto_processes_of_a_single_launcher_is_one(two_cores: None, kind: str) -> None:
    assert resolve_config(LaunchConfig(kind=kind)).processes == 1  # type: ignore[arg-type]


def test_devices_are_counted_without_torch(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_selection.num_devices({}) == 2
    counts = {"": 0, "-1": 0, "0": 1, "1,0": 2, "0,1,2": 2, "MIG-a,MIG-b,MIG-c": 3}
    assert {visible: gpu_selection.num_devices({"CUDA_VISIBLE_DEVICES": visible}) for visible in counts} == counts
    monkeypatch.setattr("trainer_lib.launch.settings.config.num_devices", lambda environment: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with pytest.raises(ConfigError, match=r"1 CUDA device"):
        resolve_config(LaunchConfig(processes=2))
    assert resolve_config(LaunchConfig(processes=2), use_cpu=True).processes == 2
    assert resolve_config(LaunchConfig(devices=(0,), processes=1), use_cpu=True).processes == 1


def test_cores_are_shared_out_so_that_load_cannot_change_the_result(
    two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert worker_environment(resolve_config(LaunchConfig(processes=2)), {})["OMP_NUM_THREADS"] == "1"
    one = worker_environment(resolve_config(LaunchConfig(processes=1)), {})
    assert one["OMP_NUM_THREADS"] == one["MKL_NUM_THREADS"] == "2"
    assert worker_environment(resolve_config(LaunchConfig(processes=1, threads=7)), {})["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environment(resolve_config(LaunchConfig(processes=2)), {})["OMP_NUM_THREADS"] == "5"


def test_environment_of_the_caller_comes_last_and_an_outer_launcher_is_forgotten(
    two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = ("ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "SLURM_STEP_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", *outer):
        monkeypatch.setenv(name, "7")
    config = resolve_config(LaunchConfig(processes=1, env={"A": "config", "B": "config"}))
    environment = worker_environment(config, {"B": "caller"})
    assert (environment["A"], environment["B"]) == ("config", "caller")
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["SLURM_JOB_ID"]) == ("0", "1", "7")
    assert not {"MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert not [name for name in environment if name.startswith(("ACCELERATE_", "FSDP_", "SLURM_STEP", "SLURM_PROC"))]
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_checked_configuration_is_known_as_checked_until_it_is_changed() -> None:
    given = LaunchConfig(kind="process", processes=1)
    checked = resolve_config(given)
    assert checked == given
    assert checked is not given
    assert resolve_config(checked) is checked
    assert resolve_config(checked, use_cpu=True) is not checked, "the CPU is checked by other rules"
    assert resolve_config(changed := replace(checked, threads=2)) is not changed


# ------------------------------------------------------------------------------------------------------------ devices
@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(gpu_selection, "DEVICE_FILES", tmp_path)


def test_devices_are_selected_and_ordered(two_devices: None) -> None:
    config = resolve_config(LaunchConfig(devices=(1, 0), device_order="PCI_BUS_ID"))
    assert (config.kind, config.processes) == ("torchrun", 2)
    environment = worker_environment(config, {})
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("1,0", "PCI_BUS_ID")
    assert resolve_config(LaunchConfig(devices=(1,))).processes == 1
    assert resolve_config(LaunchConfig(env={"CUDA_VISIBLE_DEVICES": "1"})).processes == 1


def test_deepspeeds_launcher_is_told_which_devices_in_which_order() -> None:
    told = base._deepspeed_command("train", Path("run"), 2, {"CUDA_VISIBLE_DEVICES": "3, 1,0"})
    assert told[told.index("--include") + 1] == "localhost:3,1"
    told = base._deepspeed_command("train", Path("run"), 2, {})
    assert told[told.index("--num_gpus") + 1] == "2"


# ------------------------------------------------------------------------------------------------------ several nodes


def test_more_nodes_are_configuration_only(two_cores: None) -> None:
    config = resolve_config(LaunchConfig(nodes=2, rendezvous=MEETING))
    assert (config.kind, config.node_range, config.world_size, config.follows) == ("torchrun", (2, 2), 4, False)
    assert config.endpoint == ("10.0.0.1", 29500)
    elastic = resolve_config(LaunchConfig(nodes="1:3", rendezvous="[::1]:7", node_rank=2, processes=1))
    assert (elastic.node_range, elastic.world_size, elastic.follows) == ((1, 3), 3, True)
    assert elastic.endpoint == ("::1", 7)
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(config, {})
    chosen = worker_environment(replace(config, interface="eth1"), {})
    assert chosen["GLOO_SOCKET_IFNAME"] == chosen["NCCL_SOCKET_IFNAME"] == "eth1"


def test_a_rendezvous_that_cannot_be_listened_on_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port}: This machine cannot listen there: Address already in use"
        ):
            check_rendezvous(LaunchConfig(nodes=2, rendezvous=f"127.0.0.1:{port}"))
    check_rendezvous(LaunchConfig(nodes=2, rendezvous=f"127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        check_rendezvous(LaunchConfig(nodes=2, rendezvous="203.0.113.1:29500"))


def test_a_task_per_process_is_a_node_of_one(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    config = in_job(monkeypatch, {**ranks, "MASTER_ADDR": "h", "MASTER_PORT": "9"})
    assert (config.nodes, config.node_rank, config.rendezvous, config.processes) == (4, 3, "h:9", 1)
    assert worker_environment(config, {})["TRAINFLOW_LOCAL_RANK"] == "1/2"
    with pytest.raises(ConfigError, match=r"launch\.processes = 2: Each of this machine's 2 tasks is one process"):
        in_job(monkeypatch, {}, processes=2)


def in_job(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **config: Any) -> LaunchConfig:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return resolve_config(LaunchConfig(kind="environment", **config))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (2, 1, "n1:15007", 2)),
        ({**PODS, "PET_NPROC_PER_NODE": "1"}, (2, 1, "job-node-0-0.job:29501", 1)),
        ({**PODS, "PET_NPROC_PER_NODE": "auto"}, (2, 1, "job-node-0-0.job:29501", 2)),
        # The operator of PyTorchJobs numbers pods by RANK, and counts processes by WORLD_SIZE.
        ({**PODS, "PET_NPROC_PER_NODE": "2", "RANK": "1", "WORLD_SIZE": "4"}, (2, 1, "job-node-0-0.job:29501", 2)),
        (
            {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-0:23456", "JOB_COMPLETION_INDEX": "2"},
            ("1:3", 2, "job-0:23456", 2),
        ),
        ({**SKY, "SKYPILOT_NUM_GPUS_PER_NODE": "0", "MASTER_PORT": "7"}, (2, 1, "10.0.0.1:7", 2)),
        (DSTACK, (2, 0, "10.0.0.1:29500", 2)),
    ],
)
def test_a_command_on_each_machine_of_a_scheduler_joins_them(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[Any, ...]
) -> None:
    config = in_job(monkeypatch, variables)
    assert (config.kind, config.nodes, config.node_rank, config.rendezvous, config.processes) == ("torchrun", *expected)
    assert config.follows == (expected[1] > 0)
    started = worker_environment(config, {})
    assert not [name for name in started if name.startswith(("PET_", "SKYPILOT_N", "DSTACK_"))]


def test_the_processes_of_a_job_are_those_that_it_starts(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"processes = 1: The job starts 2 processes on each machine \(PET_NPROC"
    with pytest.raises(ConfigError, match=words):
        in_job(monkeypatch, {**PODS, "PET_NPROC_PER_NODE": "2"}, processes=1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},  # a batch script, without srun
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        {"JOB_COMPLETION_INDEX": "1"},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    ],
)
def test_an_environment_that_describes_no_job_is_refused(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="No scheduler described a job") as caught:
        in_job(monkeypatch, variables)
    assert (caught.value.field, caught.value.value) == ("train.launch.kind", "environment")
    assert "PET_NNODES, SKYPILOT_NUM_NODES, DSTACK_NODES_NUM" in caught.value.message
    assert "kind=auto" in str(caught.value.remedy)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    ],
)
def test_a_job_of_one_is_one_machine(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    config = in_job(monkeypatch, variables)
    assert (config.kind, config.processes, config.several_nodes) == ("torchrun", 2, False)


def test_settings_as_plain_data_give_the_same_configuration() -> None:
    config = LaunchConfig(nodes="1:2", rendezvous=MEETING, devices=(1, 0), env={"A": "b"})
    assert from_settings({**json.loads(json.dumps(config.__dict__)), "unknown": 1}) == config


@pytest.mark.parametrize("kind", ["auto", "environment"])
def test_a_launcher_that_was_not_resolved_starts_nothing(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starts no command") as caught:
        base._command("train", LaunchConfig(kind=kind, processes=1), RunDir(tmp_path), {})
    assert (caught.value.field, caught.value.value) == ("train.launch.kind", kind)


# ------------------------------------------------------------------------------------------------------------ engines
def slurm(**given: Any) -> LaunchConfig:
    return LaunchConfig(**{"engine": "slurm", "processes": 4096, **given})


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_processes_of_other_machines_are_taken_as_they_are(
    programs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = resolve_config(slurm(nodes="1:4", engine_options={"kill-on-invalid-dep": True, "gpus-per-node": 8}))
    assert (config.world_size, config.rendezvous) == (4 * 4096, None)
    assert resolve_config(config) == config
    # Workers that share parts are placed one by one.
    three = apart(resolve_config(slurm(processes=3)))
    assert [(config.engine, config.kind, config.processes) for config in three] == [("slurm", "process", 1)] * 3
    with pytest.raises(InfrastructureError, match="the second"):  # all are lost
        settle([InfrastructureError("the first"), InfrastructureError("the second")], print)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="Slurm's program sbatch is not on this machine's PATH"):
        resolve_config(slurm())


ENGINE: dict[str, Any] = {"engine": "slurm", "processes": 4096}
#: The machine (a fixture), settings for it, the field that is refused, and parts of the refusal.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "two_cores": [
        ({"kind": "mpirun"}, "kind", "= mpirun: … not a launcher"),
        ({"kind": "process", "processes": 2}, "processes", "= 2: The launcher 'process' runs one process"),
        ({"processes": 3}, "processes", "= 3: … 2 CPU core … Use at most 2."),
        ({"devices": (0,)}, "devices", "= [0]: This machine has no CUDA device"),
        (
            {"env": {"ACCELERATE_MIXED_PRECISION": "bf16"}},
            "env",
            "= ACCELERATE_MIXED_PRECISION: This variable would change",
        ),
        *(({name: -1.0}, name, "= -1") for name in ("grace_s", "timeout_s", "join_timeout_s", "max_restarts")),
        *(({name: 0}, name, "= 0") for name in ("processes", "threads")),
        *(({"nodes": nodes, "rendezvous": MEETING}, "nodes", "") for nodes in ("2:1", "many", 0)),
        *(({"nodes": 2, "rendezvous": place}, "rendezvous", "") for place in (None, "10.0.0.1", "host:0")),
        ({"nodes": 2, "rendezvous": MEETING, "node_rank": 2}, "node_rank", ""),
        *(({"nodes": 2, "rendezvous": MEETING, "kind": kind}, "kind", "") for kind in ("process", "deepspeed")),
    ],
    "two_devices": [
        ({"devices": (0, 2)}, "CUDA_VISIBLE_DEVICES", "= 0,2"),
        ({"devices": (0, 0)}, "CUDA_VISIBLE_DEVICES", "= 0,0"),
        ({"devices": ("first",)}, "CUDA_VISIBLE_DEVICES", "= first"),
        ({"device_order": "BIGGEST_FIRST"}, "CUDA_DEVICE_ORDER", "= BIGGEST_FIRST"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "7"}}, "CUDA_VISIBLE_DEVICES", "= 7"),
        ({"devices": (0,), "env": {"CUDA_VISIBLE_DEVICES": "1"}}, "devices", "= [0]"),
    ],
    "programs": [
        ({**ENGINE, "engine": "slrum"}, "engine", "This is not an engine. Choose one of ray, slurm."),
        ({**ENGINE, "processes": "auto"}, "processes", "cannot be seen from here"),
        ({**ENGINE, "kind": "environment"}, "kind", "starts the processes of each machine itself"),
        ({**ENGINE, "kind": "process", "nodes": 2}, "nodes", "runs one process"),
        ({**ENGINE, "rendezvous": MEETING}, "rendezvous", "The engine slurm decides this on the cluster."),
        ({**ENGINE, "devices": (0,)}, "devices", ""),
        ({**ENGINE, "nodes": "4:1"}, "nodes", "This is not a range of machines."),
        ({**ENGINE, "address": "head:6379"}, "address", "Slurm's programs know their cluster."),
        (
            {**ENGINE, "engine_options": {"nodes": 4}},
            "engine_options.nodes",
            "passes this option to sbatch itself. Remove it",
        ),
        ({"processes": 1, "address": "head:6379"}, "address", "Only an engine reads this setting."),
        ({"processes": 1, "engine_options": {"a": 1}}, "engine_options", "Only an engine"),
    ],
}


@pytest.mark.parametrize(
    ("machine", "changes", "field", "words"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_a_configuration_that_cannot_work_is_refused(
    machine: str,
    changes: dict[str, Any],
    field: str,
    words: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(machine)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError) as caught:
        resolve_config(LaunchConfig(**changes))
    assert caught.value.field == (field if field.isupper() else f"train.launch.{field}")
    assert [part for part in words.split(" … ") if part not in str(caught.value)] == []
    assert caught.value.remedy


def test_nothing_is_missing_for_what_is_installed_or_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    require_torch()
    check_installed("accelerate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed("torchrun")


# ------------------------------------------------------------------------------------------- files of accelerate
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
