"""DeepSpeed's configuration beside the arguments: what agrees, what is taken from where, what is refused."""

from __future__ import annotations

import ctypes.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs import deepspeed_config as keys
from trainer_lib.arguments.configs.deepspeed_config import adopt, plan
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.secrets import mask_value
from trainer_lib.strategies.deepspeed import zero_config

TWO = {"stage": 2}
# The oldest reference document's first example, and the arguments that mean the same.
BY_FILE: dict[str, Any] = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "cpu_offload": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "zero_allow_untested_optimizer": True,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
}
BY_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 3e-5,
    "warmup_steps": 500,
    "lr_scheduler_type": "constant_with_warmup",
    "fp16": True,
    "adam_beta1": 0.8,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 3e-7,
}


def arguments(config: Any, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="out", deepspeed=config, **given)


def engine(args: TrainingArguments, model: Any = None) -> dict[str, Any]:
    return zero_config.engine_config(adopt(args), args, model, data_parallel_size=args.world_size)


def test_the_documents_two_ways_of_saying_the_same_give_the_same() -> None:
    """All in the file, or ZeRO in the file and the rest among the arguments."""
    first = arguments(BY_FILE)
    second = arguments({"zero_optimization": BY_FILE["zero_optimization"]}, **BY_ARGUMENTS)
    one, other = adopt(first), adopt(second)
    for name in BY_ARGUMENTS:
        assert getattr(first, name) == getattr(second, name) == BY_ARGUMENTS[name], name
    assert (one.stage, one.precision, one.offload_optimizer) == (2, "fp16", "cpu")
    assert (other.stage, other.precision, other.offload_optimizer) == (2, "fp16", "cpu")
    assert one.schedule == ("WarmupLR", BY_FILE["scheduler"]["params"])
    assert other.schedule is None, "lr_scheduler_type says it"
    for key, value in BY_FILE["zero_optimization"].items():
        assert key == "cpu_offload" or one.zero[key] == other.zero[key] == value, key


def test_the_engine_gets_what_follows_from_the_arguments() -> None:
    config = engine(
        arguments(
            {"zero_optimization": {"stage": 3, "overlap_comm": False}, "steps_per_print": 7},
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            max_grad_norm=0.5,
            bf16=True,
        )
    )
    assert config == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "overlap_comm": False, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "steps_per_print": 7,
    }


def test_auto_leaves_it_to_the_arguments() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    args = arguments(auto, learning_rate=2e-4, weight_decay=0.3, warmup_steps=0.1, max_grad_norm=0.7, bf16=True)
    found = adopt(args)
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (2e-4, 0.3, 0.7)
    assert (found.precision, found.automatic) == ("bf16", ("reduce_bucket_size",)) and found.schedule is not None
    settings = zero_config.schedule_settings(*found.schedule, args, 50)
    assert list(settings.items())[:2] == [("warmup_min_lr", 0.0), ("warmup_max_lr", 2e-4)]
    assert (settings["warmup_num_steps"], settings["total_num_steps"]) == (5, 50)


def test_sizes_follow_from_the_models_width() -> None:
    sizes = dict.fromkeys(keys.ZERO_AUTO, "auto")
    args = arguments({"zero_optimization": {"stage": 3, **sizes}})
    config = engine(args, SimpleNamespace(config=SimpleNamespace(hidden_size=32)))
    found = {name: config["zero_optimization"][name] for name in sizes}
    assert found.pop("reduce_bucket_size") == 1024
    assert found == {"stage3_prefetch_bucket_size": 921, "stage3_param_persistence_threshold": 320}
    assert not engine(args)["zero_optimization"].keys() & sizes.keys(), "DeepSpeed's own defaults"


@pytest.mark.parametrize(
    ("section", "optim", "optim_args"),
    [
        ({"type": "AdamW"}, "adamw_torch_fused", None),
        ({"type": "Adam", "params": {"weight_decay": 0.01}}, "adamw_torch_fused", None),  # it decays like AdamW
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam", None),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, "sgd", "momentum=0.9,nesterov=True"),
        ({"type": "Lion"}, "lion", None),
    ],
)
def test_the_files_optimizer_becomes_an_argument(section: Any, optim: str, optim_args: str | None) -> None:
    args = arguments({"zero_optimization": TWO, "optimizer": section})
    adopt(args)
    assert (str(args.optim), args.optim_args) == (optim, optim_args)
    adopt(args)  # a second Trainer with the same arguments


def test_legacy_offloads_and_the_old_name_of_bf16() -> None:
    legacy = {"cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True}
    found = plan(arguments({**zero(stage=3, **legacy), "bfloat16": {"enabled": True}}))
    assert found.zero["offload_optimizer"] == found.zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert found.precision == "bf16"
    assert plan(arguments(zero(cpu_offload=False))).offload_optimizer is None
    assert plan(arguments(zero(offload_optimizer={"device": "none"}))).offload_optimizer is None


def test_a_file_is_read_when_training_is_set_up_and_without_zero_it_is_stage_0(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": TWO, "gradient_clipping": 0.25}))
    args = arguments(str(file))
    assert adopt(args).stage == 2 and args.max_grad_norm == 0.25
    alone = arguments({name: BY_FILE[name] for name in ("optimizer", "scheduler", "zero_allow_untested_optimizer")})
    assert adopt(alone).stage == 0 and (alone.learning_rate, alone.warmup_steps, alone.adam_beta1) == (3e-5, 500, 0.8)


def nvme(path: str, stage: int = 3) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": path}}}


def zero(**settings: Any) -> dict[str, Any]:
    return with_zero(zero_optimization={"stage": 2, **settings})


def with_zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": TWO, **settings}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return with_zero(optimizer={"type": kind, "params": params})


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return with_zero(scheduler={"type": kind, "params": params})


DRIVE = {"device": "nvme", "nvme_path": "/x"}
ROUGH = {"enabled": True, "bf16_master_weights_and_grads": True}
#: Configuration, arguments, and what the error begins with and says.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (zero(stage=4), {}, "zero_optimization.stage = 4: … Give 0, 1, 2 or 3"),
    (with_zero(gradient_clip=1), {}, 'gradient_clip: … Did you mean "gradient_clipping"'),
    (zero(overlap_com=True), {}, 'zero_optimization.overlap_com: … "overlap_comm"'),
    (with_zero(amp={"enabled": True, "opt_level": "O1"}), {}, "amp = … O1 … docs/distributed.md"),
    (with_zero(wandb={"enabled": True}), {}, "wandb = … enabled … the Trainer decides this"),
    (with_zero(train_micro_batch_size_per_gpu=4), {}, "train_micro_batch_size_per_gpu = 4: … size = 8"),
    (
        with_zero(gradient_accumulation_steps=4),
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps = 4: … = 2",
    ),
    (with_zero(train_batch_size=64), {"global_batch_size": 32}, "train_batch_size = 64: … = 32"),
    (with_zero(gradient_clipping=0.5), {"max_grad_norm": 2.0}, "gradient_clipping = 0.5: … max_grad_norm = 2.0"),
    (optimizer("AdamW", lr=0.1), {"learning_rate": 0.2}, "optimizer.params.lr = 0.1: … learning_rate = 0.2"),
    (optimizer("AdamW", betas=[0.8, 0.9]), {"adam_beta2": 0.95}, "optimizer.params.betas = 0.9: … adam_beta2 = 0.95"),
    (optimizer("AdamW", weight_decay=1), {"weight_decay": 2.0}, "optimizer.params.weight_decay = 1: … = 2.0"),
    (optimizer("SGD"), {"optim": "adam"}, "optimizer.type = SGD: … optim = adam"),
    (optimizer("OneBitAdam"), {}, "optimizer.type = OneBitAdam: … not supported with ZeRO"),
    (optimizer("Lamb"), {}, "optimizer.type = Lamb: … Choose one of: adam, adamw"),
    (with_zero(), {"optim": "adafactor"}, "optim = adafactor: … Choose one of"),
    (schedule("WarmupLR"), {"lr_scheduler_type": "cosine"}, "scheduler.type = WarmupLR: … = cosine"),
    (schedule("WarmupLR", warmup_num_steps=5), {"warmup_steps": 7}, "scheduler.params.warmup_num_steps = 5: … = 7"),
    (schedule("WarmupDecayLR", total_num_steps=5), {"max_steps": 9}, "scheduler.params.total_num_steps = 5: … = 9"),
    (schedule("Warmup"), {}, "scheduler.type = Warmup: … WarmupLR"),
    (schedule("OneCycle", cycle_min_lr="auto"), {}, "scheduler.params.cycle_min_lr = auto: … Write a value"),
    (with_zero(bf16={"enabled": False}), {"bf16": True}, "bf16.enabled = False: … bf16 = True"),
    (with_zero(bf16={"enabled": True}, fp16={"enabled": True}), {}, "fp16.enabled = True: … Keep one"),
    (with_zero(fp16={"enabled": True}), {"use_cpu": True}, "fp16.enabled = True: … Use bf16"),
    (with_zero(bf16=ROUGH), {}, "bf16.bf16_master_weights_and_grads = True: … too few digits"),
    (zero(overlap_comm="auto"), {}, "zero_optimization.overlap_comm = auto: … Write a value"),
    (nvme(""), {}, "zero_optimization.offload_optimizer.nvme_path = … Name a folder"),
    (nvme("/x", 2), {}, "zero_optimization.offload_optimizer.device = nvme: … needs stage 3"),
    (zero(offload_optimizer={"device": "disk"}), {}, "zero_optimization.offload_optimizer.device = disk: … nvme"),
    (zero(stage=3, cpu_offload=True, offload_optimizer=DRIVE), {}, "zero_optimization.cpu_offload = True: … = nvme"),
    (zero(zero_quantized_gradients=True), {}, "zero_optimization.zero_quantized_gradients = True: … decides"),
    (with_zero(optimizer="AdamW"), {}, "optimizer = AdamW: … must be a section"),
    (with_zero(gradient_clipping="much"), {}, "gradient_clipping = much: … Write a number"),
    # Arguments that cannot stand beside it.
    (with_zero(), {"fsdp": "full_shard"}, "fsdp = … deepspeed"),
    (with_zero(), {"auto_find_batch_size": True}, "auto_find_batch_size = … deepspeed"),
    (with_zero(), {"torch_compile": True}, "torch_compile = … deepspeed"),
    (with_zero(), {"bf16_full_eval": True}, "bf16_full_eval = … deepspeed"),
]


@pytest.mark.parametrize(("config", "given", "said"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_is_wrong_is_refused_before_a_start(config: dict[str, Any], given: dict[str, Any], said: str) -> None:
    """When a mapping is given already at construction, so that a spec is refused at once."""
    with pytest.raises(ConfigError) as caught:
        arguments(config, **given)
    place, *parts = said.split(" … ")
    assert str(caught.value).removeprefix("deepspeed.").startswith(place)
    assert all(part in str(caught.value) for part in parts) and caught.value.remedy


def test_parameters_are_offloaded_in_stage_3_alone_and_dropped_with_a_warning_elsewhere() -> None:
    for config in (zero(offload_param={"device": "cpu"}), zero(cpu_offload_param=True), zero(cpu_offload_params=True)):
        with pytest.warns(UserWarning, match="offload_param is dropped: only stage 3 shards parameters") as caught:
            args = arguments(config)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="is dropped"):
            assert plan(args).offload_param is None


def test_the_number_of_processes_counts_once_it_is_known() -> None:
    args = arguments(with_zero(train_batch_size=16), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert plan(args, data_parallel_size=2).stage == 2
    with pytest.raises(ConfigError, match=r"deepspeed.train_batch_size = 16: This contradicts .* = 4 x 2 x 4 = 32"):
        plan(args, data_parallel_size=4)


def test_the_drive_must_be_there_and_its_library_too(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder") as caught:
        zero_config.resolve_config(arguments(nvme(str(file / "swap"))))
    assert caught.value.field == "deepspeed.zero_optimization.offload_optimizer.nvme_path"
    for folder in [str(tmp_path / "swap"), "~no-such-user/swap"] if ctypes.util.find_library("aio") is None else []:
        with pytest.raises(ConfigError, match="libaio") as caught:
            zero_config.resolve_config(arguments(nvme(folder)))
        assert "device: cpu" in str(caught.value.remedy)
    assert not (tmp_path / "swap").exists(), "looking changes nothing"


def test_a_missing_compiler_and_a_missing_package_are_named_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**zero(cpu_offload=True), "optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    monkeypatch.setattr("shutil.which", lambda program, path=None: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"the program g\+\+ is not installed"):
        zero_config.resolve_config(arguments(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "trainflow\[deepspeed\]"'):
        zero_config.resolve_config(arguments(config))


def test_secrets_are_not_logged() -> None:
    shown = mask_value("deepspeed", {"wandb": {"api_key": "s3cret", "team": "us"}, "aio": {"block_size": 3}})
    assert shown == {"wandb": {"api_key": "<API_KEY>", "team": "us"}, "aio": {"block_size": 3}}
