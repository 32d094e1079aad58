"""Every command line and configuration of the five documents that describe the Trainer of transformers.

Each runs, that is, it means the right arguments, or it is refused, and docs/migration.md has the row that says why.
Lines that only choose GPUs (CUDA_VISIBLE_DEVICES, --nproc_per_node) have no arguments, and are not here.
"""

from __future__ import annotations

import json
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from trainer_lib.arguments import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments, launched
from trainer_lib.arguments.deepspeed.deepspeed_config import adopt, plan
from trainer_lib.errors import ConfigError
from trainer_lib.yaml_text import parse_yaml

MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")

TRANSLATION = (
    "--model_name_or_path sshleifer/distill-mbart-en-ro-12-4 --data_dir wmt_en_ro --output_dir output_dir "
    "--overwrite_output_dir --do_train --n_train 500 --num_train_epochs 1 --per_device_train_batch_size 1 "
    "--freeze_embeds --src_lang en_XX --tgt_lang ro_RO --task translation"
)
T5 = (
    "--model_name_or_path t5-small --per_device_train_batch_size 1 --output_dir output_dir --overwrite_output_dir "
    '--do_train --max_train_samples 500 --num_train_epochs 1 --dataset_name wmt16 --dataset_config "ro-en" '
    "--source_lang en --target_lang ro --fp16"
)
GLUE = (
    "--model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128 "
    "--per_device_train_batch_size {batch} --learning_rate {rate} --num_train_epochs 3 --output_dir /tmp/mrpc/ "
    "--overwrite_output_dir"
)
ONE: dict[str, Any] = {
    "output_dir": "output_dir",
    "overwrite_output_dir": True,
    "do_train": True,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
}
BY_ARGUMENTS = (
    "--learning_rate 3e-5 --warmup_steps 500 --adam_beta1 0.8 --adam_beta2 0.999 --adam_epsilon 1e-8 "
    "--weight_decay 3e-7 --lr_scheduler_type constant_with_warmup --fp16 --fp16_backend amp"
)
QUIET = {"log_level": "warning", "log_level_replica": "error"}
#: Command line -> the arguments that it means.
LINES: dict[str, dict[str, Any]] = {
    f"{TRANSLATION} --fp16 --sharded_ddp": {**ONE, "fp16": True, "fsdp": "shard_grad_op"},
    f"--deepspeed ds_config.json {TRANSLATION}": {**ONE, "deepspeed": "ds_config.json"},
    BY_ARGUMENTS: {
        "learning_rate": 3e-5,
        "warmup_steps": 500,
        "adam_beta1": 0.8,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 3e-7,
        "lr_scheduler_type": "constant_with_warmup",
        "fp16": True,
    },
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 2": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
    },
    "--lr_scheduler_type constant_with_warmup --learning_rate 3e-5 --warmup_steps 500": {
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": 3e-5,
        "warmup_steps": 500,
    },
    "--lr_scheduler_type linear --learning_rate 3e-5 --warmup_steps 500": {
        "lr_scheduler_type": "linear",
        "learning_rate": 3e-5,
        "warmup_steps": 500,
    },
    "--fp16 --fp16_backend amp": {"fp16": True},
    "--fp16 --fp16_backend apex --fp16_opt_level 01": {"fp16": True},
    "--local-rank=0 --fp16": {"local_rank": 0, "fp16": True},  # what python -m torch.distributed.launch adds
    f"{T5} --sharded_ddp simple": {**ONE, "fp16": True, "fsdp": "shard_grad_op"},
    f"{T5} --sharded_ddp zero_dp_2": {**ONE, "fp16": True, "fsdp": "shard_grad_op"},
    "--fp16 --sharded_ddp zero_dp_3": {"fp16": True, "fsdp": "full_shard"},
    '--fp16 --sharded_ddp "zero_dp_2 cpu_offload"': {"fp16": True, "fsdp": "shard_grad_op offload"},
    '--sharded_ddp "zero_dp_3 auto_wrap"': {"fsdp": "full_shard auto_wrap"},
    "--log_level warning --log_level_replica error": QUIET,
    "--log_level warning --log_level_replica error --log_on_each_node 0": {**QUIET, "log_on_each_node": False},
    "--log_level error --log_level_replica error --log_on_each_node 0": {
        "log_level": "error",
        "log_level_replica": "error",
        "log_on_each_node": False,
    },
    **{
        f'--fsdp "{words}"': {"fsdp": words}
        for words in (
            *("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "full_shard offload"),
            *("shard_grad_op offload", "full_shard auto_wrap", "shard_grad_op auto_wrap"),
            *("full_shard offload auto_wrap", "shard_grad_op offload auto_wrap"),
        )
    },
    "--fsdp full_shard --fsdp_config fsdp_config.json": {"fsdp": "full_shard", "fsdp_config": "fsdp_config.json"},
    GLUE.format(batch=32, rate="2e-5"): {
        "output_dir": "/tmp/mrpc/",
        "overwrite_output_dir": True,
        "do_train": True,
        "do_eval": True,
        "num_train_epochs": 3,
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 32,
    },
    GLUE.format(batch=16, rate="5e-5"): {
        "output_dir": "/tmp/mrpc/",
        "overwrite_output_dir": True,
        "do_train": True,
        "do_eval": True,
        "num_train_epochs": 3,
        "learning_rate": 5e-5,
        "per_device_train_batch_size": 16,
    },
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.filterwarnings("ignore:.* is an old name:DeprecationWarning")
def test_a_command_line_means_the_right_arguments(line: str) -> None:
    parser = HfArgumentParser(Seq2SeqTrainingArguments, exit_on_error=False)
    args, remaining = parser.parse_args_into_dataclasses(shlex.split(line), return_remaining_strings=True)
    usual = Seq2SeqTrainingArguments().to_dict()
    wanted = {name: value for name, value in LINES[line].items() if usual[name] != value}
    assert {name: value for name, value in args.to_dict().items() if usual[name] != value} == wanted
    assert not {word for word in remaining if word.startswith("--")} & {f"--{name}" for name in usual}


ZERO_2: dict[str, Any] = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "cpu_offload": True,
}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


def adamw(rate: float) -> dict[str, Any]:
    params = {"lr": rate, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
    return {"zero_allow_untested_optimizer": True, "optimizer": {"type": "AdamW", "params": params}}


def warmup(rate: float, steps: int) -> dict[str, Any]:
    params = {"warmup_min_lr": 0, "warmup_max_lr": rate, "warmup_num_steps": steps}
    return {"scheduler": {"type": "WarmupLR", "params": params}}


#: DeepSpeed configuration -> its stage, and the arguments that it decides.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "whole": (
        {"fp16": FP16, "zero_optimization": ZERO_2, **adamw(3e-5), **warmup(3e-5, 500)},
        2,
        {"fp16": True, "learning_rate": 3e-5, "adam_beta1": 0.8, "warmup_steps": 500, "weight_decay": 3e-7},
    ),
    "zero_optimization": ({"zero_optimization": ZERO_2}, 2, {"learning_rate": 5e-5}),
    "optimizer": (adamw(0.001), 0, {"learning_rate": 0.001, "adam_beta1": 0.8, "adam_epsilon": 1e-8}),
    "scheduler": (
        warmup(0.001, 1000),
        0,
        {"learning_rate": 0.001, "warmup_steps": 1000, "lr_scheduler_type": "constant_with_warmup"},
    ),
    "fp16": ({"fp16": FP16}, 0, {"fp16": True}),
    "gradient_clipping": ({"gradient_clipping": 1.0}, 0, {"max_grad_norm": 1.0}),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_deepspeed_configuration_decides_the_right_arguments(name: str) -> None:
    config, stage, decided = CONFIGURATIONS[name]
    args = TrainingArguments("out", deepspeed=config)
    assert adopt(args).stage == stage
    assert {name: getattr(args, name) for name in decided} == decided


BLOCK = ["BertLayer", "GPTJBlock", "T5Block"]
FSDP_FILES: dict[str, dict[str, Any]] = {
    "of the third document": {
        "fsdp_transformer_layer_cls_to_wrap": BLOCK,
        "fsdp_backward_prefetch": "backward_pre",
        "fsdp_forward_prefetch": "True",
        "limit_all_gathers": "True",
        "activation_checkpointing": "True",
    },
    "by size": {"fsdp_min_num_params": 2000, "fsdp_backward_prefetch": "backward_pos"},
    "of the fifth document": {
        "transformer_layer_cls_to_wrap": BLOCK,
        "backward_prefetch": "backward_pre",
        "use_orig_params": "True",
        "forward_prefetch": "True",
        "limit_all_gathers": "True",
        "activation_checkpointing": "True",
    },
}


@pytest.mark.parametrize("name", FSDP_FILES)
def test_the_settings_of_fsdp_are_taken(name: str) -> None:
    args = TrainingArguments("out", fsdp="full_shard auto_wrap", fsdp_config=FSDP_FILES[name])
    assert args.fsdp_config == FSDP_FILES[name]


#: What `accelerate config` wrote, less what says how many processes there are and where.
ACCELERATE: dict[str, tuple[str, dict[str, Any]]] = {
    "several GPUs": ("distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n", {"fp16": True}),
    "FSDP": (
        """\
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
num_processes: 2
""",
        {
            "bf16": True,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "state_dict_type": "full_state_dict",
                "forward_prefetch": True,
                "transformer_layer_cls_to_wrap": ["BertLayer"],
            },
        },
    ),
    "a file of DeepSpeed": (
        "deepspeed_config:\n  deepspeed_config_file: {file}\n  zero3_init_flag: true\ndistributed_type: DEEPSPEED\n"
        "num_processes: 4\n",
        {"deepspeed": "{file}"},
    ),
    "DeepSpeed": (
        """\
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
""",
        {"bf16": True, "max_grad_norm": 0.7, "deepspeed": ...},
    ),
    "flags": (
        "--num_processes=2 --use_fsdp --mixed_precision=bf16 --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP "
        '--fsdp_transformer_layer_cls_to_wrap="BertLayer" --fsdp_sharding_strategy=1 '
        "--fsdp_state_dict_type=FULL_STATE_DICT",
        {
            "bf16": True,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"state_dict_type": "full_state_dict", "transformer_layer_cls_to_wrap": ["BertLayer"]},
        },
    ),
}
MACHINE = "compute_environment: LOCAL_MACHINE\ndowncast_bf16: 'no'\nmachine_rank: 0\nnum_machines: 1\nuse_cpu: false\n"


def _launcher_variables(words: list[str]) -> dict[str, str]:
    """What `accelerate launch` sets for its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    before = dict(os.environ)
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "script.py"]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        after = prepare_deepspeed_cmd_env(args)[1]
    else:
        after = prepare_multi_gpu_env(args)
    return {name: value for name, value in after.items() if before.get(name) != value}


@pytest.mark.parametrize("name", ACCELERATE)
@pytest.mark.filterwarnings("ignore:zero_optimization.offload_param is dropped")
def test_a_launcher_of_accelerate_means_the_right_arguments(name: str, tmp_path: Path) -> None:
    text, wanted = ACCELERATE[name]
    file, config = tmp_path / "ds_zero3_config.json", tmp_path / "config.yaml"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    config.write_text(MACHINE + text.replace("{file}", str(file)))
    words = shlex.split(text) if name == "flags" else ["--config_file", str(config)]
    assert name == "flags" or parse_yaml(config.read_text())
    environ = _launcher_variables(words)
    args = launched.apply_launcher(TrainingArguments("out"), environ)
    found, usual = args.to_dict(), TrainingArguments("out").to_dict()
    changed = {key: value for key, value in found.items() if usual[key] != value}
    wanted = {key: str(file) if value == "{file}" else value for key, value in wanted.items()}
    if name == "DeepSpeed":
        wanted["deepspeed"] = changed["deepspeed"]
        offloads = plan(args)
        assert (offloads.stage, offloads.offload_optimizer, offloads.offload_param) == (2, "cpu", None)
    assert changed == wanted


#: Arguments -> what the error names, and the row of docs/migration.md.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"deepspeed": {"amp": {"enabled": True, "opt_level": "O1"}}}, r"deepspeed\.amp", "| the section `amp`"),
    (
        {"fsdp": "full shard", "fsdp_config": {"xla": True, "xla_fsdp_settings": {}, "xla_fsdp_grad_ckpt": True}},
        r"fsdp_config\.xla = True",
        "| `fsdp_config` with `xla`",
    ),
    ({"save_safetensors": False}, "save_safetensors", "| `save_safetensors=False`"),
    ({"optim": "galore_adamw_layerwise"}, "optim = galore_adamw_layerwise", "| optimizers that end in `_layerwise`"),
    ({"jit_mode_eval": True}, "jit_mode_eval", "`jit_mode_eval`"),
    ({"mp_parameters": "{}"}, "mp_parameters", "| `mp_parameters`"),
]


@pytest.mark.parametrize(("given", "match", "row"), REFUSED)
def test_what_is_refused_has_its_row_in_the_page_about_moving(given: dict[str, Any], match: str, row: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(ConfigError, match=match) as caught:
            TrainingArguments(output_dir="out", **given)
    assert caught.value.remedy and row in MIGRATION
