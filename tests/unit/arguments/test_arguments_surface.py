"""Every argument of the reference exists here, with its default, its meaning, its unit, and the keys it changes."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.surface import SURFACE
from trainer_lib.arguments import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    evaluation_fields,
    evaluation_matters,
    numeric_fields,
    total_batch_size,
)
from trainer_lib.arguments.compat import OLD_NAMES
from trainer_lib.arguments.fields import Affects, declarations, field_hints, field_map
from trainer_lib.arguments.groups import ArgumentGroups
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.errors import ConfigError

DIFFERENT = {
    "enable_jit_checkpoint": True,  # a stop request saves by default
    "fsdp": "",  # text or nothing, as in the documents of all ages
}
ALONE = {
    "parallelism",
    *("global_batch_size", "max_nonfinite_steps", "save_async", "max_failed_saves", "allow_global_batch_change"),
    *("loss_spike_sigma", "loss_spike_window", "max_loss_spikes", "fp8"),
}
OLD = {"overwrite_output_dir", "logging_dir", "include_tokens_per_second", "past_index", "use_legacy_prediction_loop"}
CUT_UP = {"per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "accelerator_config"}


def test_every_argument_of_the_reference_exists_with_its_default() -> None:
    generation = field_map(Seq2SeqTrainingArguments)
    for name, default in SURFACE["Seq2SeqTrainingArguments_extra"].items():
        assert generation[name].default == default, name
    fields = field_map(TrainingArguments)
    for name, default in SURFACE["TrainingArguments"].items():
        assert name in fields, name
        factory = fields[name].default_factory
        ours = factory() if factory is not dataclasses.MISSING else fields[name].default
        assert ours == DIFFERENT.get(name, default), name
    assert set(fields) - set(SURFACE["TrainingArguments"]) == ALONE | OLD and set(SURFACE["old_args"]) >= OLD
    assert {name for name, declared in declarations(TrainingArguments).items() if declared.alone} == ALONE


def test_every_public_member_exists() -> None:
    args = TrainingArguments("out", use_cpu=True)
    for name in SURFACE["TrainingArguments_public_members"]:
        assert getattr(args, name) is not None, name


def test_every_choice_of_the_reference_exists() -> None:
    for enum in (OptimizerNames, SchedulerType, IntervalStrategy, SaveStrategy, HubStrategy):
        assert set(SURFACE[enum.__name__]) <= {member.value for member in enum}, enum
    assert set(SURFACE["report_to"]) <= set(REPORTERS)
    assert set(SURFACE["old_args"]) <= {*field_map(TrainingArguments), *OLD_NAMES}


def test_groups_are_small_and_every_field_says_what_it_means() -> None:
    groups = [base for base in ArgumentGroups.__mro__[1:-1] if dataclasses.is_dataclass(base)]
    assert len(groups) == 10
    for group in groups:
        own = dataclasses.fields(group)
        assert len(own) <= 20, group.__name__
        for field in own:
            assert field.metadata["help"].rstrip().endswith((".", "…")), field.name
            assert declarations(group)[field.name].affects in typing.get_args(Affects), field.name
            assert set(field.metadata) <= {"help", "nargs", "const"}, field.name  # argparse gets every key


def test_every_number_has_a_unit() -> None:
    for cls in (TrainingArguments, Seq2SeqTrainingArguments):
        hints = field_hints(cls)
        for name in field_map(cls):
            kinds = typing.get_args(hints[name]) or (hints[name],)
            if int in kinds or float in kinds:
                assert declarations(cls)[name].unit, name


def test_replace_subclass_assignment_and_copy_work_as_for_any_dataclass() -> None:
    @dataclass
    class Mine(TrainingArguments):
        extra: int = 3
        group_by_length: bool = False  # an old name, now this class's own field

        def __post_init__(self) -> None:
            super().__post_init__()
            self.doubled = self.extra * 2

    mine = Mine("out", extra=4, learning_rate=1e-3, group_by_length=True)
    assert (mine.doubled, mine.group_by_length, mine.train_sampling_strategy) == (8, True, "random")
    changes: dict[str, Any] = {"learning_rate": "3e-4"}
    other = dataclasses.replace(mine, **changes)
    assert isinstance(other, Mine) and (other.learning_rate, other.extra) == (3e-4, 4)
    mine.learning_rate = 2e-3
    mine.validate()
    assert copy.deepcopy(mine) == mine
    assert "extra" in mine.to_dict()
    with pytest.raises(ConfigError, match=r"^extr: .*extra"):
        Mine("out", extr=1)  # type: ignore[call-arg]


def test_assignment_is_checked_again_by_validate() -> None:
    """And what was filled in follows it."""
    args = TrainingArguments("out", eval_strategy="steps", load_best_model_at_end=True, save_steps=20, logging_steps=10)
    filled = (args.eval_steps, args.metric_for_best_model, args.greater_is_better, args.do_eval)
    assert filled == (10, "loss", False, True)
    args.metric_for_best_model, args.logging_steps = "accuracy", 5
    args.validate()
    assert (args.eval_steps, args.greater_is_better) == (5, True)
    args.greater_is_better = False
    args.validate()
    assert args.greater_is_better is False
    args.per_device_train_batch_size = 0
    with pytest.raises(ConfigError, match="per_device_train_batch_size = 0"):
        args.validate()


def test_both_names_of_gradient_checkpointing_mean_the_same() -> None:
    assert TrainingArguments("out", activation_checkpointing=True).gradient_checkpointing is True
    assert TrainingArguments("out", gradient_checkpointing=True).activation_checkpointing is True
    with pytest.raises(ConfigError, match="contradicts activation_checkpointing"):
        TrainingArguments("out", gradient_checkpointing=True, activation_checkpointing=False)


def test_construction_reads_no_environment_and_touches_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "nonsense")
    TrainingArguments("out", fp16=True, bf16_full_eval=True, deepspeed="missing.json", push_to_hub=True)
    assert list(tmp_path.iterdir()) == []


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("out")

    def seen() -> tuple[Any, ...]:
        return args.world_size, args.process_index, args.local_process_index, args.parallel_mode

    assert seen() == (1, 0, 0, "not_parallel")
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert seen() == (4, 3, 1, "distributed")
    assert (args.should_log, args.should_save) == (False, False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (args.should_log, args.should_save) == (True, False)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="environment variable RANK = x"):
        _ = args.process_index


def test_log_levels_differ_between_main_and_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("out", log_level_replica="error")
    assert args.get_process_log_level() == logging.INFO
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")
    assert args.get_process_log_level() == logging.CRITICAL
    assert TrainingArguments("out", log_level="debug").get_process_log_level() == logging.DEBUG
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert args.get_process_log_level() == logging.ERROR
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first process of the second machine
    args.log_on_each_node = False
    assert args.get_process_log_level() == logging.ERROR and not args.should_log
    args.log_on_each_node = True
    assert args.get_process_log_level() == logging.CRITICAL and args.should_log


def test_warmup_is_a_number_of_steps_or_a_share() -> None:
    assert TrainingArguments("out", warmup_steps=10).get_warmup_steps(1000) == 10
    assert TrainingArguments("out", warmup_steps=0.03).get_warmup_steps(101) == 4
    assert TrainingArguments("out", warmup_steps=10.0).warmup_steps == 10


def test_the_cpu_is_used_when_asked_for() -> None:
    args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=3, ddp_timeout=7)
    assert args.device.type == "cpu"
    assert (args.n_gpu, args.train_batch_size, args.ddp_timeout_delta.total_seconds()) == (0, 3, 7)
    with args.main_process_first(desc="nothing"):
        pass


def test_setters_set_check_and_chain() -> None:
    args = TrainingArguments("out")
    chained = (
        args.set_training(learning_rate=1e-3, batch_size=4, num_epochs=2)
        .set_evaluate("steps", steps=50, batch_size=2)
        .set_save("steps", steps=100, total_limit=2)
        .set_logging(steps=10, report_to=["jsonl"])
        .set_optimizer("sgd", learning_rate=0.1, args="momentum=0.9")
        .set_lr_scheduler("cosine", warmup_steps=0.1)
        .set_dataloader(train_batch_size=16, num_workers=2, sampler_seed=7)
        .set_push_to_hub("me/it", token="secret")
        .set_testing(batch_size=32)
    )
    assert chained is args
    assert (args.learning_rate, args.optim, args.lr_scheduler_type, args.warmup_steps) == (0.1, "sgd", "cosine", 0.1)
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size, args.data_seed) == (16, 32, 7)
    assert (args.do_train, args.do_eval, args.do_predict, args.push_to_hub) == (True, True, True, True)
    before = args.to_dict()
    with pytest.raises(ConfigError):
        args.set_training(batch_size=-1)
    assert args.to_dict() == before


# -- what belongs in a content key, and what does not -----------------------------------------------------------------
def _fields(world_size: int = 1, **given: Any) -> dict[str, Any]:
    return numeric_fields(TrainingArguments("out", **given), data_parallel_size=world_size)


#: Changes that can change the weights, and changes that cannot.
NUMERIC: list[dict[str, Any]] = [
    *({"learning_rate": 1e-3}, {"seed": 1}, {"optim": "sgd"}, {"bf16": True}, {"num_train_epochs": 4}),
    *({"per_device_train_batch_size": 16}, {"train_sampling_strategy": "sequential"}, {"dataloader_drop_last": True}),
    *({"lr_scheduler_kwargs": {"a": 1}}, {"load_best_model_at_end": True, "eval_strategy": "steps"}),
    {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
]
OTHER: list[dict[str, Any]] = [
    *({"logging_steps": 3}, {"report_to": "jsonl"}, {"run_name": "x"}, {"dataloader_num_workers": 4}),
    *({"save_steps": 3}, {"eval_strategy": "steps", "eval_steps": 3}, {"push_to_hub": True, "hub_token": "t"}),
    *({"gradient_checkpointing": True}, {"fsdp": "full_shard"}, {"per_device_eval_batch_size": 1}, {"use_cpu": True}),
    *({"ddp_backend": "gloo"}, {"accelerator_config": {"non_blocking": False, "even_batches": True}}),
]


@pytest.mark.parametrize("change", [*NUMERIC, *OTHER], ids=str)
def test_what_can_change_the_weights_changes_the_fields_and_nothing_else_does(change: dict[str, Any]) -> None:
    assert (_fields(**change) != _fields()) == (change in NUMERIC)


def test_each_argument_is_part_of_the_keys_that_its_declaration_says() -> None:
    args = Seq2SeqTrainingArguments("out")
    trained, measured = numeric_fields(args, data_parallel_size=1), evaluation_fields(args)
    for name in field_map(Seq2SeqTrainingArguments).keys() - CUT_UP:
        changed = copy.copy(args)
        object.__setattr__(changed, name, {"fp16": {"enabled": True}} if name == "deepspeed" else 77)
        affects = declarations(type(args))[name].affects
        decides = name in ("load_best_model_at_end", "metric_for_best_model")  # evaluations choose the weights
        counts = affects in ("weights", "outputs") or decides
        assert (numeric_fields(changed, data_parallel_size=1) != trained) == counts, name
        assert (evaluation_fields(changed) != measured) == (affects in ("outputs", "evaluation")), name


def test_only_the_global_batch_counts() -> None:
    one = _fields(per_device_train_batch_size=16)
    assert one["global_batch_size"] == 16
    assert _fields(per_device_train_batch_size=4, gradient_accumulation_steps=2, world_size=2) == one
    assert _fields(global_batch_size=16, per_device_train_batch_size=1, world_size=3) == one
    assert total_batch_size(TrainingArguments("out", global_batch_size=48), data_parallel_size=5) == 48
    assert _fields(max_steps=10, num_train_epochs=1) == _fields(max_steps=10, num_train_epochs=2)


def test_split_batches_keeps_the_global_batch_for_any_number_of_processes(tmp_path: Path) -> None:
    for processes in (1, 2, 4):
        settings: dict[str, Any] = {"per_device_train_batch_size": 8, "accelerator_config": {"split_batches": True}}
        assert total_batch_size(TrainingArguments("out", **settings), data_parallel_size=processes) == 8
        # The same training, cut up in another way.
        assert _fields(processes, **settings) == _fields(per_device_train_batch_size=8)
    config = tmp_path / "accelerator.yaml"
    config.write_text("split_batches: true\n")
    settings = {"gradient_accumulation_steps": 2, "accelerator_config": str(config)}
    assert total_batch_size(TrainingArguments("out", **settings), data_parallel_size=4) == 16
    assert _fields(4, **settings) == _fields(global_batch_size=16)


def test_evaluation_counts_when_it_can_choose_the_weights() -> None:
    best: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    assert _fields(**best, eval_steps=5, save_steps=5) != _fields(**best, eval_steps=10, save_steps=10)
    assert not evaluation_matters(TrainingArguments("out", eval_strategy="epoch"))
    assert evaluation_matters(TrainingArguments("out", eval_strategy="epoch", metric_for_best_model="loss"))
    assert evaluation_matters(TrainingArguments("out", eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau"))
    gathers = [evaluation_fields(TrainingArguments("out", eval_use_gather_object=way)) for way in (True, False)]
    assert gathers[0] != gathers[1]


def test_only_the_numeric_part_of_a_deepspeed_configuration_counts() -> None:
    offload = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    plain = {"zero_optimization": {"stage": 1}}
    assert _fields(deepspeed=offload) == _fields(deepspeed=plain)
    assert _fields(deepspeed={**plain, "optimizer": {"type": "Adam"}}) != _fields(deepspeed=plain)
    fields = _fields(deepspeed=plain, load_best_model_at_end=True, eval_strategy="steps")
    assert json.loads(json.dumps(fields)) == fields
