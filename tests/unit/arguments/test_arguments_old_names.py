"""Old argument names keep working with one warning, or are refused with the way out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from trainer_lib.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments.compat import OLD_NAMES
from trainer_lib.errors import ConfigError

#: The class without its types: what is refused here, a type checker would refuse already.
Untyped: Any = TrainingArguments

TRANSLATED: list[tuple[str, Any, str, Any]] = [
    ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
    ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
    ("per_gpu_eval_batch_size", 5, "per_device_eval_batch_size", 5),
    ("warmup_ratio", 0.1, "warmup_steps", 0.1),
    ("adafactor", True, "optim", "adafactor"),
    ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
    ("no_cuda", True, "use_cpu", True),
    ("push_to_hub_model_id", "it", "hub_model_id", "it"),
    ("push_to_hub_token", "t", "hub_token", "t"),
    ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
    ("torchdynamo", "inductor", "torch_compile_backend", "inductor"),
    ("torchdynamo", "inductor", "torch_compile", True),
    ("tpu_metrics_debug", True, "debug", ["tpu_metrics_debug"]),
    *(("sharded_ddp", value, "fsdp", "shard_grad_op") for value in ("simple", True, "zero_dp_2")),
    ("sharded_ddp", "zero_dp_3 offload auto_wrap", "fsdp", "full_shard offload auto_wrap"),
    ("sharded_ddp", ["zero_dp_3", "offload"], "fsdp", "full_shard offload"),
    *((name, True, "accelerator_config", {name: True}) for name in ("dispatch_batches", "split_batches")),
    ("xpu_backend", "ccl", "ddp_backend", "ccl"),
]
OF_FSDP = [("fsdp_min_num_params", 1000, 1000), ("fsdp_transformer_layer_cls_to_wrap", "Block", ["Block"])]
NEUTRAL: list[tuple[str, Any]] = [
    *[("fp16_backend", value) for value in ("auto", "amp", "cuda_amp")],
    *[("half_precision_backend", value) for value in ("auto", "cpu_amp")],
    *[(name, "apex") for name in ("fp16_backend", "half_precision_backend")],
    *[("use_mps_device", value) for value in (True, False)],
    *[("fp16_opt_level", level) for level in ("O0", "O1")],
    *[(name, "") for name in ("mp_parameters", "sharded_ddp")],
    *[(name, False) for name in ("jit_mode_eval", "adafactor")],
    *[("use_ipex", value) for value in (True, False)],
    *[(name, None) for name in ("xpu_backend", "tpu_num_cores", "per_gpu_train_batch_size")],
    *[("save_safetensors", True), ("ray_scope", "last"), ("warmup_ratio", 0.0)],
]
REFUSED: list[tuple[str, Any, str]] = [
    ("fp16_backend", "magic", "Remove it"),
    *[("fp16_opt_level", level, "fp16=True") for level in ("O2", "o3", "O9")],
    ("save_safetensors", False, "safetensors"),
    ("mp_parameters", "{}", "fsdp"),
    ("jit_mode_eval", True, "torch_compile"),
    ("tpu_num_cores", 8, "launcher"),
    ("ray_scope", "all", "reported last"),
    ("sharded_ddp", "zero_dp_9", "fsdp"),
    ("warmup_ratio", 1.5, "warmup_steps"),
    ("warmup_ratio", "much", "number"),
]


def _build(**given: Any) -> tuple[TrainingArguments, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return TrainingArguments("out", **given), list(caught)


@pytest.mark.parametrize(("old", "value", "new", "expected"), TRANSLATED)
def test_an_old_name_does_what_the_new_one_does_and_says_so_once(old: str, value: Any, new: str, expected: Any) -> None:
    args, caught = _build(**{old: value})
    assert getattr(args, new) == expected
    assert [warning.category for warning in caught] == [DeprecationWarning]
    message = str(caught[0].message)
    assert old in message
    assert new in message or new == "torch_compile"
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("old", "value", "expected"), OF_FSDP)
def test_an_old_name_of_fsdps_configuration_goes_with_fsdp(old: str, value: Any, expected: Any) -> None:
    args, caught = _build(fsdp="full_shard auto_wrap", **{old: value})
    assert args.fsdp_config == {old.removeprefix("fsdp_"): expected}
    assert [warning.category for warning in caught] == [DeprecationWarning]
    assert old in str(caught[0].message)
    with pytest.raises(ConfigError, match="Without fsdp"):
        _build(**{old: value})


@pytest.mark.parametrize(("old", "value"), NEUTRAL)
def test_a_value_that_asks_for_nothing_is_dropped_with_a_warning(old: str, value: Any) -> None:
    args, caught = _build(**{old: value})
    assert args == TrainingArguments("out")
    assert [warning.category for warning in caught] == [DeprecationWarning]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("old", "value", "way_out"), REFUSED)
def test_what_cannot_be_served_names_the_way_out(old: str, value: Any, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", **{old: value})
    assert caught.value.field == old and caught.value.value == str(value)
    assert way_out in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["fp16_backend", "half_precision_backend"])
def test_apexs_levels_are_float32_and_torchs_own_autocast(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    apex = {backend: "apex", "fp16": True}
    assert Untyped("out", **apex).mixed_precision == "fp16"
    assert "torch's own autocast takes its place" in caplog.text
    assert Untyped("out", **apex, fp16_opt_level="O1").mixed_precision == "fp16"
    assert Untyped("out", fp16_opt_level="O0", **apex).mixed_precision == "no"
    assert "O0 computes in float32: fp16 is off" in caplog.text
    assert Untyped("out", bf16=True, fp16_opt_level="O0").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="fp16_opt_level = O2: This level of NVIDIA Apex keeps the weights"):
        Untyped("out", **apex, fp16_opt_level="O2")


def test_every_old_name_is_tested_here() -> None:
    tested = {case[0] for case in (*TRANSLATED, *OF_FSDP, *NEUTRAL, *REFUSED)} | {"push_to_hub_organization"}
    assert tested == set(OLD_NAMES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_organization_is_joined_with_the_models_name() -> None:
    assert Untyped("out", push_to_hub_model_id="it", push_to_hub_organization="us").hub_model_id == "us/it"
    with pytest.raises(ConfigError, match="push_to_hub_organization = us"):
        Untyped("out", push_to_hub_organization="us")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_name_that_contradicts_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Untyped("out", eval_strategy="steps", evaluation_strategy="epoch")
    assert caught.value.field == "evaluation_strategy"
    assert Untyped("out", eval_strategy="epoch", evaluation_strategy="epoch").eval_strategy == "epoch"
    assert Untyped("out", warmup_steps=7, warmup_ratio=0.5).warmup_steps == 7


def test_old_attributes_can_be_read_and_assigned() -> None:
    args = TrainingArguments("out", warmup_steps=0.2)
    with pytest.warns(DeprecationWarning, match="warmup_steps"):
        assert args.warmup_ratio == 0.2
    with pytest.warns(DeprecationWarning, match="eval_strategy"):
        args.evaluation_strategy = "epoch"
    assert args.eval_strategy == "epoch"
    with pytest.warns(DeprecationWarning, match="accelerator_config"):
        args.split_batches = True
    assert args.accelerator_config == {"split_batches": True}
    for name in OLD_NAMES:
        with pytest.warns(DeprecationWarning, match=name):
            getattr(args, name)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = args.no_such_thing


def test_old_names_work_in_subclasses_and_mappings() -> None:
    with pytest.warns(DeprecationWarning, match="use_cpu"):
        old: Any = Seq2SeqTrainingArguments
        assert old("out", no_cuda=True).use_cpu
    with pytest.warns(DeprecationWarning, match="use_cpu"):
        assert TrainingArguments.from_dict({"output_dir": "out", "no_cuda": "true"}).use_cpu
