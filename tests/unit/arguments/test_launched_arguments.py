"""Who started this process, and what it says about the run: variables of launchers become ranks and arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.arguments import TrainingArguments, foreign_arguments
from trainer_lib.arguments.environment import ALONE, Ranks, find_machines, first_host, ranks, tasks_per_node
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError


def variables(words: str) -> dict[str, str]:
    """An environment, from words NAME=value."""
    return dict(word.split("=", 1) for word in words.split())


SLURM = variables(
    "SLURM_JOB_ID=123456 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=gpu[007-008]"
)
TORCHRUN = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
MPI = variables("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3")
POD = variables("KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=2 WORLD_SIZE=3 MASTER_ADDR=m MASTER_PORT=1")
STARTED: dict[str, tuple[dict[str, str], Ranks]] = {
    "nothing": ({}, ALONE),
    "torchrun": ({**TORCHRUN, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, Ranks(3, 4, 1, 2, ("a", 7), "RANK")),
    "rank and world only": ({"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, 1, 2, None, "RANK")),
    "srun": (SLURM, Ranks(5, 8, 1, 4, ("gpu007", 15_000 + 123_456 % 20_000), "SLURM_PROCID")),
    "srun with the script's own address": (
        {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "29501", "WORLD_SIZE": "8"},
        Ranks(5, 8, 1, 4, ("head", 29501), "SLURM_PROCID"),
    ),
    "torchrun inside srun": ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 1, 0, 1, None, "RANK")),
    "a batch script of Slurm": ({k: v for k, v in SLURM.items() if "STEP" not in k}, ALONE),
    "one task of Slurm": ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ALONE),
    "mpirun": (
        {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"},
        Ranks(2, 3, 0, 1, ("a", 29500), "OMPI_COMM_WORLD_RANK"),
    ),
    "a pod of a PyTorchJob": (POD, Ranks(2, 3, 0, 1, ("m", 1), "RANK")),
    "an indexed Job": (
        {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"},
        Ranks(1, 2, 0, 1, ("job-0.job", 29500), "JOB_COMPLETION_INDEX"),
    ),
}


@pytest.mark.parametrize("how", STARTED)
def test_ranks_follow_from_what_started_the_process(how: str) -> None:
    environ, expected = STARTED[how]
    assert ranks(environ) == expected


def test_slurms_short_forms() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    hosts = {"n1": "n1", "n[03,07-9]-ib,login": "n03-ib", "a-1,b": "a-1", "gpu[1-2]": "gpu1"}
    assert {text: first_host(text) for text in hosts} == hosts
    for call, words in (
        (lambda: tasks_per_node("two"), "SLURM_TASKS_PER_NODE = two"),
        (lambda: ranks({**SLURM, "SLURM_PROCID": "x"}), "SLURM_PROCID = x: This is not an integer"),
        (lambda: ranks({**SLURM, "SLURM_PROCID": "8"}), "SLURM_PROCID = 8: This rank does not fit a job of 8"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES = two: This is neither a number of machines nor a range"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "PET_NNODES = 2: This number does not fit a job of 2 machines"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK: The environment describes 2 machines"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "x"}, "PET_NPROC_PER_NODE = x: This is not an integer"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NODE_RANK: The environment describes 2 machines"),
        ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "x"}, "DSTACK_NODE_RANK = x: This is not an integer"),
    ],
)
def test_a_schedulers_variable_that_is_wrong_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_machines(environ)


def test_a_script_that_a_scheduler_starts_on_each_machine_warns_that_it_trains_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSTACK_NODE_RANK", "0")
    monkeypatch.setenv("DSTACK_NODES_NUM", "2")
    distributed.init(TrainingArguments("out", use_cpu=True))
    assert "trains alone although the job has 2 machines (DSTACK_NODES_NUM)" in caplog.text
    caplog.clear()
    monkeypatch.setenv("DSTACK_NODES_NUM", "1")
    distributed.init(TrainingArguments("out", use_cpu=True))
    assert not caplog.text


# ------------------------------------------------------------------------------------------------- accelerate launch
FSDP = variables(
    "ACCELERATE_USE_FSDP=true FSDP_VERSION=1 FSDP_SHARDING_STRATEGY=1 FSDP_OFFLOAD_PARAMS=true "
    "FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP FSDP_TRANSFORMER_CLS_TO_WRAP=BertLayer,T5Block "
    "FSDP_BACKWARD_PREFETCH=BACKWARD_PRE FSDP_STATE_DICT_TYPE=FULL_STATE_DICT FSDP_FORWARD_PREFETCH=true "
    "FSDP_USE_ORIG_PARAMS=true FSDP_SYNC_MODULE_STATES=true FSDP_CPU_RAM_EFFICIENT_LOADING=true "
    "FSDP_ACTIVATION_CHECKPOINTING=false"
)
DEEPSPEED = variables(
    "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=3 ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2 "
    "ACCELERATE_GRADIENT_CLIPPING=0.7 ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu "
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=none ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=true"
)


def adopted(environ: dict[str, str], **given: Any) -> TrainingArguments:
    args = TrainingArguments("out", **given)
    before = args.to_dict()
    first = foreign_arguments.apply_launcher(args, environ)
    assert args.to_dict() == before  # the user's own stay as they are
    second = foreign_arguments.apply_launcher(first, environ)  # a Trainer with the arguments of another one
    assert second.to_dict() == first.to_dict()
    return second


def test_precision_device_accumulation_clipping_and_compilation_are_taken_up() -> None:
    asked = "ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=True ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 "
    asked += (
        "ACCELERATE_GRADIENT_CLIPPING=0.5 ACCELERATE_DYNAMO_BACKEND=INDUCTOR ACCELERATE_DYNAMO_MODE=reduce-overhead"
    )
    args = adopted(variables(asked))
    assert (args.bf16, args.use_cpu, args.gradient_accumulation_steps, args.max_grad_norm) == (True, True, 4, 0.5)
    compiled = (args.torch_compile, args.torch_compile_backend, args.torch_compile_mode)
    assert compiled == (True, "inductor", "reduce-overhead")
    # What the launcher writes when nothing was asked for.
    quiet = "ACCELERATE_MIXED_PRECISION=no ACCELERATE_USE_CPU=False ACCELERATE_DYNAMO_BACKEND=NO "
    quiet += "ACCELERATE_DYNAMO_MODE=default"
    assert adopted(variables(quiet), bf16=True).to_dict() == TrainingArguments("out", bf16=True).to_dict()


def test_fsdp_variables_become_fsdp_and_its_settings() -> None:
    args = adopted(FSDP)
    assert args.fsdp == "full_shard offload auto_wrap"
    assert args.fsdp_config == {
        "backward_prefetch": "backward_pre",
        "state_dict_type": "full_state_dict",
        "forward_prefetch": True,
        "transformer_layer_cls_to_wrap": ["BertLayer", "T5Block"],
    }


@pytest.mark.parametrize(
    ("changes", "words", "settings"),
    [
        ("FSDP_VERSION=2 FSDP_RESHARD_AFTER_FORWARD=false", "shard_grad_op", {"version": 2}),
        ("FSDP_SHARDING_STRATEGY=HYBRID_SHARD", "hybrid_shard", {}),
        (
            "FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP FSDP_MIN_NUM_PARAMS=2000",
            "full_shard auto_wrap",
            {"min_num_params": 2000},
        ),
    ],
)
def test_ways_of_sharding(changes: str, words: str, settings: dict[str, Any]) -> None:
    args = adopted(variables(f"ACCELERATE_USE_FSDP=true {changes}"))
    assert args.fsdp == words and (args.fsdp_config or {}) == settings


def test_deepspeed_variables_become_its_configuration(tmp_path: Path) -> None:
    args = adopted(DEEPSPEED)
    assert (args.gradient_accumulation_steps, args.max_grad_norm) == (2, 0.7) and isinstance(args.deepspeed, dict)
    assert args.deepspeed["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert args.deepspeed["gradient_accumulation_steps"] == "auto"
    file = tmp_path / "ds.json"
    file.write_text("{}")
    with_file = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert adopted(with_file).deepspeed == str(file)


def test_what_both_say_is_joined(tmp_path: Path) -> None:
    args = adopted(FSDP, fsdp="full_shard", fsdp_config={"fsdp_forward_prefetch": "true", "limit_all_gathers": True})
    assert args.fsdp == "full_shard offload auto_wrap" and isinstance(args.fsdp_config, dict)
    assert (args.fsdp_config["limit_all_gathers"], args.fsdp_config["fsdp_forward_prefetch"]) == (True, "true")
    assert "forward_prefetch" not in args.fsdp_config
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"backward_prefetch": "backward_pre", "xla": False}))
    read = adopted(FSDP, fsdp_config=str(file)).fsdp_config
    assert isinstance(read, dict) and (read["xla"], read["forward_prefetch"]) == (False, True)
    zero = {"zero_optimization": {"stage": "auto", "overlap_comm": True}, "gradient_clipping": 0.7}
    joined = adopted(DEEPSPEED, deepspeed=zero).deepspeed
    assert isinstance(joined, dict) and joined["zero_optimization"]["stage"] == 3
    assert joined["zero_optimization"]["overlap_comm"] is True


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"gradient_accumulation_steps": 8}, DEEPSPEED, r"gradient_accumulation_steps = 8: .* sets 2"),
    ({"max_grad_norm": 2.0}, DEEPSPEED, r"max_grad_norm = 2\.0: .* sets 0\.7 \(ACCELERATE_GRADIENT_CLIPPING\)"),
    ({"fsdp": "shard_grad_op"}, FSDP, r"fsdp = shard_grad_op: .* sets full_shard offload auto_wrap"),
    (
        {"fsdp": "full_shard", "fsdp_config": {"backward_prefetch": "backward_post"}},
        FSDP,
        r"fsdp_config\.backward_prefetch = backward_post: .* sets backward_pre",
    ),
    (
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        DEEPSPEED,
        r"deepspeed\.zero_optimization\.stage = 2: .* sets 3",
    ),
    ({"fp16": True}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "fp16 = True: This cannot be on together with bf16"),
    ({"fsdp": "full_shard"}, DEEPSPEED, "cannot be used together with deepspeed"),
]


@pytest.mark.parametrize(("given", "environ", "message"), CONTRADICTIONS)
def test_a_contradiction_names_both(given: dict[str, Any], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adopted(environ, **given)


@pytest.mark.parametrize(
    "environ",
    [
        {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        {"ACCELERATE_USE_FSDP": "1", "FSDP_SHARDING_STRATEGY": "9"},
        {"ACCELERATE_USE_FSDP": "1", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "many"},
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "x"},
    ],
)
def test_what_is_not_served_is_refused_by_the_variables_name(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        adopted(environ)
    assert (caught.value.field or "").removeprefix("environment variable ") in environ
    assert caught.value.value is not None and caught.value.remedy is not None


def test_float8_of_the_launcher_is_that_of_torchao() -> None:
    args = adopted({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"})
    assert (args.fp8, args.bf16) == ("tensorwise", True)


def test_sizes_of_the_launcher_are_sizes_of_the_mesh() -> None:
    sizes = {"DP_REPLICATE_SIZE": "1", "DP_SHARD_SIZE": "4", "TP_SIZE": "2", "SP_BACKEND": "deepspeed"}
    environ = {f"PARALLELISM_CONFIG_{name}": value for name, value in sizes.items()}
    args = adopted({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **environ})
    assert args.parallelism_config == {"dp_replicate_size": 1, "dp_shard_size": 4, "tp_size": 2}
    with pytest.raises(ConfigError, match="cp_size = 2: There is no ring attention"):
        adopted({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"})


def test_a_trainer_takes_up_what_its_launcher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert trainer(tmp_path, classification_rows(8))._trainflow.engine.precision.name == "bf16"


def test_a_spec_is_merged_before_anything_starts() -> None:
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    merged = foreign_arguments.merge({"learning_rate": "1e-3"}, bf16, prefix="train.args")
    assert merged == {"learning_rate": "1e-3", "bf16": True}
    with pytest.raises(ConfigError, match=r"train\.args\.max_grad_norm = 3\.0"):
        foreign_arguments.merge({"max_grad_norm": "3"}, {"ACCELERATE_GRADIENT_CLIPPING": "0.7"}, prefix="train.args")
