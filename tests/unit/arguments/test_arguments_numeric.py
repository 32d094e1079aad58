"""What belongs in a content key, and what does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.arguments import (
    Seq2SeqTrainingArguments,
    TrainingArguments,
    evaluation_fields,
    evaluation_matters,
    numeric_fields,
    total_batch_size,
)
from trainer_lib.arguments.fields import declarations, field_map


def _fields(world_size: int = 1, **given: Any) -> dict[str, Any]:
    return numeric_fields(TrainingArguments("out", **given), data_parallel_size=world_size)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-3},
        {"seed": 1},
        {"optim": "sgd"},
        {"bf16": True},
        {"num_train_epochs": 4},
        {"per_device_train_batch_size": 16},
        {"train_sampling_strategy": "sequential"},
        {"lr_scheduler_kwargs": {"a": 1}},
        {"dataloader_drop_last": True},
        {"load_best_model_at_end": True, "eval_strategy": "steps"},
    ],
)
def test_what_can_change_the_weights_changes_the_fields(change: dict[str, Any]) -> None:
    assert _fields(**change) != _fields()


@pytest.mark.parametrize(
    "change",
    [
        {"logging_steps": 3},
        {"report_to": "jsonl"},
        {"run_name": "x"},
        {"dataloader_num_workers": 4},
        {"save_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 3},
        {"push_to_hub": True, "hub_token": "t"},
        {"gradient_checkpointing": True},
        {"fsdp": "full_shard"},
        {"per_device_eval_batch_size": 1},
        {"use_cpu": True},
        {"ddp_backend": "gloo"},
    ],
)
def test_what_cannot_change_the_weights_is_left_out(change: dict[str, Any]) -> None:
    assert _fields(**change) == _fields()


CUT_UP = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "accelerator_config")


@pytest.mark.parametrize("name", [name for name in field_map(Seq2SeqTrainingArguments) if name not in CUT_UP])
def test_each_argument_is_part_of_the_keys_that_its_declaration_says(name: str) -> None:
    args = Seq2SeqTrainingArguments("out")
    changed = copy.copy(args)
    object.__setattr__(changed, name, {"fp16": {"enabled": True}} if name == "deepspeed" else 77)
    affects = declarations(type(args))[name].affects
    trained = [numeric_fields(each, data_parallel_size=1) for each in (args, changed)]
    measured = [evaluation_fields(each) for each in (args, changed)]
    decides = name in ("load_best_model_at_end", "metric_for_best_model")  # changed so, evaluations choose the weights
    assert (trained[0] != trained[1]) == (affects in ("weights", "outputs") or decides)
    assert (measured[0] != measured[1]) == (affects in ("outputs", "evaluation"))


def test_how_an_evaluation_gathers_is_part_of_its_key() -> None:
    one, other = (evaluation_fields(TrainingArguments("out", eval_use_gather_object=each)) for each in (True, False))
    assert one != other


def test_only_the_global_batch_counts() -> None:
    one = _fields(per_device_train_batch_size=16)
    assert one["global_batch_size"] == 16
    assert _fields(per_device_train_batch_size=4, gradient_accumulation_steps=2, world_size=2) == one
    assert _fields(global_batch_size=16, per_device_train_batch_size=1, world_size=3) == one
    assert total_batch_size(TrainingArguments("out", global_batch_size=48), data_parallel_size=5) == 48


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_split_batches_keeps_the_global_batch_for_any_number_of_processes(processes: int) -> None:
    split = {"split_batches": True}
    args = TrainingArguments("out", per_device_train_batch_size=8, accelerator_config=split)
    assert total_batch_size(args, data_parallel_size=processes) == 8
    fields = _fields(processes, per_device_train_batch_size=8, accelerator_config=split)
    assert fields == _fields(per_device_train_batch_size=8)  # the same training, cut up in another way


def test_split_batches_may_stand_in_a_file(tmp_path: Path) -> None:
    config = tmp_path / "accelerator.yaml"
    config.write_text("split_batches: true\n")
    args = TrainingArguments("out", gradient_accumulation_steps=2, accelerator_config=str(config))
    assert total_batch_size(args, data_parallel_size=4) == 16
    assert _fields(4, gradient_accumulation_steps=2, accelerator_config=str(config)) == _fields(global_batch_size=16)


def test_of_the_batch_settings_only_those_count_that_reach_the_gradients() -> None:
    assert _fields(accelerator_config={"non_blocking": False, "even_batches": True}) == _fields()
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert _fields(accelerator_config=each) != _fields()


def test_evaluation_counts_when_it_can_choose_the_weights() -> None:
    best: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    assert _fields(**best, eval_steps=5, save_steps=5) != _fields(**best, eval_steps=10, save_steps=10)
    assert not evaluation_matters(TrainingArguments("out", eval_strategy="epoch"))
    assert evaluation_matters(TrainingArguments("out", eval_strategy="epoch", metric_for_best_model="loss"))
    assert evaluation_matters(TrainingArguments("out", eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau"))


def test_epochs_do_not_count_when_steps_override_them() -> None:
    assert _fields(max_steps=10, num_train_epochs=1) == _fields(max_steps=10, num_train_epochs=2)


def test_only_the_numeric_part_of_a_deepspeed_configuration_counts() -> None:
    offload = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    plain = {"zero_optimization": {"stage": 1}}
    assert _fields(deepspeed=offload) == _fields(deepspeed=plain)
    assert _fields(deepspeed={**plain, "optimizer": {"type": "Adam"}}) != _fields(deepspeed=plain)


def test_the_fields_are_plain_json() -> None:
    fields = _fields(load_best_model_at_end=True, eval_strategy="steps")
    assert json.loads(json.dumps(fields)) == fields
