"""`fsdp` and `fsdp_config`: what each key comes to, and what is refused before any process is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from trainer_lib import TrainingArguments
from trainer_lib.arguments.configs.fsdp_config import KEYS, FsdpSettings, read_settings
from trainer_lib.errors import ConfigError

CLASSES = {"transformer_layer_cls_to_wrap": ["Block"]}


def settings(fsdp: Any = "full_shard", config: Any = None, **given: Any) -> FsdpSettings:
    found = read_settings(TrainingArguments("out", fsdp=fsdp, fsdp_config=config, **given))
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
def test_modes(mode: str) -> None:
    assert settings(mode).mode == mode
    assert settings(mode).reshards == (mode not in ("shard_grad_op", "hybrid_shard_zero2"))


# What is given → the settings that differ from the default ones.
MAPPED: list[tuple[Any, Any, dict[str, Any]]] = [
    (True, None, {}),
    ("full_shard offload", None, {"offload": True}),
    (["full_shard", "offload"], {"offload_params": True}, {"offload": True}),
    ("full_shard auto_wrap", None, {"wrap": "classes"}),
    ("full_shard auto_wrap", CLASSES, {"wrap": "classes", "wrap_classes": ("Block",)}),
    ("full_shard", {"transformer_layer_cls_to_wrap": "A, B"}, {"wrap": "classes", "wrap_classes": ("A", "B")}),
    ("full_shard", {"transformer_cls_names_to_wrap": "A"}, {"wrap": "classes", "wrap_classes": ("A",)}),
    ("full_shard auto_wrap", {"min_num_params": "100"}, {"wrap": "size", "min_num_params": 100}),
    ("full_shard", {"min_num_params": 0}, {}),
    ("full_shard", {"min_num_params": 100}, {"wrap": "size", "min_num_params": 100}),
    ("full_shard", {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **CLASSES}, {"wrap": "classes"}),
    ("full_shard", {"auto_wrap_policy": "NO_WRAP"}, {}),
    ("full_shard", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}, {"wrap": "size"}),
    ("shard_grad_op", {"sharding_strategy": 2}, {"mode": "shard_grad_op"}),
    ("hybrid_shard", {"sharding_strategy": "HYBRID_SHARD"}, {"mode": "hybrid_shard"}),
    ("hybrid_shard", {"hybrid_group_size": 2}, {"mode": "hybrid_shard", "hybrid_group": 2}),
    (True, {"reshard_after_forward": False}, {"mode": "shard_grad_op"}),
    (True, {"reshard_after_forward": "true"}, {}),
    ("hybrid_shard", {"reshard_after_forward": False}, {"mode": "hybrid_shard_zero2"}),
    ("no_shard", {"reshard_after_forward": "NO_SHARD"}, {"mode": "no_shard"}),
    ("full_shard", {"cpu_offload": "true"}, {"offload": True}),
    ("full_shard", {"backward_prefetch": "backward_pre"}, {"backward_prefetch": True}),
    ("full_shard", {"backward_prefetch": "BACKWARD_POST"}, {"backward_prefetch": False}),
    ("full_shard", {"backward_prefetch": "backward_pos"}, {"backward_prefetch": False}),  # as the reference spells it
    ("full_shard", {"backward_prefetch_policy": "NO_PREFETCH"}, {"backward_prefetch": False}),
    ("full_shard", {"forward_prefetch": "True"}, {"forward_prefetch": True}),
    ("full_shard", {"sync_module_states": False}, {"sync_module_states": False}),
    ("full_shard", {"cpu_ram_efficient_loading": "true"}, {"cpu_ram_efficient_loading": True}),
    ("full_shard auto_wrap", {"activation_checkpointing": "true"}, {"activation_checkpointing": True}),
    ("full_shard", {"state_dict_type": "FULL_STATE_DICT"}, {"sharded_checkpoints": False}),
    ("full_shard", {"state_dict_type": "SHARDED_STATE_DICT"}, {}),
    ("full_shard", {"mixed_precision": "bf16"}, {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
    ("full_shard", {"mixed_precision_policy": {"param_dtype": "torch.bfloat16"}}, {"param_dtype": "bfloat16"}),
    ("full_shard", {"ignored_modules": "head, .*norm"}, {"ignored_modules": ("head", ".*norm")}),
    ("full_shard", {"version": 2}, {}),
    ("full_shard", {"xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False, "xla_fsdp_settings": {}}, {}),
    ("full_shard", {"activation_checkpointing_offload": False}, {}),
    ("full_shard", {"limit_all_gathers": True, "use_orig_params": "true"}, {}),
]


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize(("fsdp", "config", "differs"), MAPPED)
def test_what_keys_come_to(fsdp: Any, config: Any, differs: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    given = None if config is None else {f"{prefix}{key}": value for key, value in config.items()}
    found = settings(fsdp, given)
    for name, value in differs.items():
        assert getattr(found, name) == value, name
    if given is not None:
        file = tmp_path / "fsdp.json"
        file.write_text(json.dumps(given))
        assert settings(fsdp, str(file)) == found


def test_every_key_is_exercised_and_told_in_the_documents() -> None:
    assert {key for _, config, _ in MAPPED for key in config or {}} == set(KEYS)
    page = (ROOT / "docs" / "distributed.md").read_text()
    told = set(re.findall(r"^\| `(\w+)` \|", page.partition("### fsdp_config")[2].partition("\n### ")[0], re.M))
    assert told == set(KEYS)


@pytest.mark.parametrize("key", ["limit_all_gathers", "use_orig_params"])
def test_what_cannot_be_switched_off_is_said(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert settings("full_shard", {key: False}) == FsdpSettings()
    assert f"fsdp_config.{key} is always True here" in caplog.text


def test_the_precision_of_the_arguments_is_what_parameters_are_gathered_in() -> None:
    assert (settings(bf16=True).param_dtype, settings(bf16=True).reduce_dtype) == ("bfloat16", "float32")
    assert settings(fp16=True).param_dtype == "float16" and settings().param_dtype is None
    both = settings(config={"mixed_precision": {"reduce_dtype": "bf16"}}, bf16=True)
    assert (both.param_dtype, both.reduce_dtype) == ("bfloat16", "bfloat16")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"fsdp_config": {"min_num_prams": 1}}, "fsdp_config = min_num_prams", "min_num_params"),
    ({"fsdp_config": {"xla": True}}, "fsdp_config.xla = True", "TPU"),
    ({"fsdp_config": {"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}}, "xla_fsdp_settings", "TPU"),
    ({"fsdp_config": {"version": 1}}, "fsdp_config.version = 1", "Remove it"),
    ({"fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, "state_dict_type", "SHARDED_STATE_DICT"),
    ({"fsdp_config": {"state_dict_type": "sharded"}}, "state_dict_type", "SHARDED_STATE_DICT"),
    ({"fsdp_config": {"sharding_strategy": "NO_SHARD"}}, "contradicts fsdp = full_shard", "Keep one"),
    ({"fsdp_config": {"sharding_strategy": 7}}, "sharding_strategy = 7", "full_shard"),
    ({"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}, "shard_grad_op", "full_shard"),
    ({"fsdp": "full_shard offload", "fsdp_config": {"offload_params": False}}, "contradicts fsdp", "Keep one"),
    ({"fsdp_config": {"min_num_params": 9, **CLASSES}}, "together with transformer_layer", "Keep one"),
    ({"fsdp_config": {"min_num_params": -1}}, "min_num_params = -1", "Give a number"),
    ({"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "needs a size", "number of parameters"),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, "contradicts auto_wrap", "Rem"),
    ({"fsdp_config": {"transformer_layer_cls_to_wrap": 3}}, "transformer_layer_cls_to_wrap = 3", "names"),
    ({"fsdp_config": {"fsdp_version": 2, "version": 1}}, "given twice", "Keep one"),
    ({"fsdp_config": {"hybrid_group_size": 2}}, "no effect on full_shard", "hybrid_shard"),
    ({"fsdp_config": {"backward_prefetch": "sometimes"}}, "backward_prefetch = sometimes", "backward_pre"),
    ({"fsdp_config": {"forward_prefetch": "perhaps"}}, "forward_prefetch = perhaps", "true"),
    ({"fsdp_config": {"mixed_precision": {"buffer_dtype": "bf16"}}}, "buffer_dtype", "param_dtype"),
    ({"fsdp_config": {"mixed_precision": "fp16"}}, "loss scaler", "fp16=True"),
    ({"fsdp_config": {"mixed_precision": 16}}, "mixed_precision = 16", "param_dtype"),
    ({"fsdp_config": {"activation_checkpointing": True}}, "activation_checkpointing = True", "auto_wrap"),
    ({"fsdp_config": {"activation_checkpointing_offload": True}}, "activation_checkpointing_offload", "offload"),
    (
        {"fsdp_config": {"activation_checkpointing": True, **CLASSES}, "gradient_checkpointing": True},
        "together with gradient_checkpointing",
        "Keep",
    ),
    ({"fsdp_config": {"cpu_ram_efficient_loading": True, "sync_module_states": False}}, "sync_module_states", "Rem"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size = True", "Remove it"),
    ({"save_on_each_node": True}, "save_on_each_node = True", "output_dir"),
    ({"bf16_full_eval": True}, "bf16_full_eval = True", "bf16=True"),
    ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, "optim = galore_adamw", "adamw_torch"),
    ({"optim": "adamw_bnb_8bit"}, "optim = adamw_bnb_8bit", "adamw_torch"),
    ({"optim": "adafactor"}, "optim = adafactor", "adamw_torch"),
    ({"optim": "lomo"}, "optim = lomo", "adamw_torch"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "cannot be used together with deepspeed", "Keep one"),
    ({"fsdp": "", "fsdp_config": CLASSES}, "Without fsdp", "auto_wrap"),
    ({"fsdp": "full_shard no_shard"}, "exactly one way", "full_shard"),
]


@pytest.mark.parametrize(("given", "what", "remedy"), REFUSED)
def test_what_cannot_be_served_is_refused_by_the_arguments_alone(given: Any, what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", **{"fsdp": "full_shard", **given})
    assert what in str(caught.value)
    assert caught.value.field
    assert remedy.lower() in (caught.value.remedy or "").lower()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    args = TrainingArguments("out", fsdp="full_shard", fsdp_config=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"fsdp_config = .*none\.json: The file cannot be read"):
        read_settings(args)
