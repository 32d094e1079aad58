"""Classes derived from our arguments as TRL and sentence-transformers do it, and what such code reads of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Optional, Union

import pytest
import torch

from trainer_lib import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments import ParallelMode
from trainer_lib.arguments.configs.accelerator_config import AcceleratorConfig
from trainer_lib.arguments.fields import declarations
from trainer_lib.arguments.numeric import numeric_fields
from trainer_lib.errors import ConfigError


class Sampler(Enum):
    """A choice of a library's own."""

    FIRST = "first"
    SECOND = "second"


class SamplerClass:
    """What a field may hold in place of a choice."""


@dataclass
class BaseConfig(TrainingArguments):
    """Overrides defaults, as the base of TRL's configurations does."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]  # noqa: RUF012 - as in TRL

    logging_steps: float = field(default=10, metadata={"help": "Steps between logs."})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "About ~20%% slower."})
    bf16: bool | None = field(default=None, metadata={"help": "True unless fp16 is."})  # type: ignore[assignment]
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Of the schedule."}
    )
    learning_rate: float = field(default=2e-5, metadata={"help": "Its own default."})
    max_length: int | None = field(default=1024, metadata={"help": "Tokens."})
    truncation: str = field(default="start", metadata={"help": "Where.", "choices": ["start", "end"]})
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of the model."})
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"], metadata={"help": "Losses."})
    pad_to: int | str | None = field(default="auto", metadata={"help": "Multiple."})
    unstated: int = field(default=None, metadata={"help": "As older code writes it."})  # type: ignore[assignment]
    made: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()
        if self.pad_to == "auto":
            self.pad_to = 128 if self.device.type == "neuron" else None
        if self.truncation == "legacy":
            self.truncation = "start"


@dataclass
class SamplingConfig(Seq2SeqTrainingArguments):
    """Redefines the dictionary fields and an old name, and derives values afterwards, as sentence-transformers does."""

    _VALID_DICT_FIELDS = ["accelerator_config", "prompts"]  # noqa: RUF012

    prompts: Union[str, None, dict[str, str], dict[str, dict[str, str]]] = None  # noqa: UP007, RUF036
    sampler: Union[Sampler, str, SamplerClass, Callable[..., SamplerClass]] = field(  # noqa: UP007
        default=Sampler.FIRST, metadata={"help": "The sampler."}
    )
    mapping: Optional[dict[str, str]] = field(default_factory=dict)  # noqa: UP045
    warmup_ratio: float | None = field(default_factory=lambda: None, metadata={"help": "The old name, kept."})

    def __post_init__(self) -> None:
        if self.warmup_ratio is not None and self.warmup_steps == 0:
            self.warmup_steps, self.warmup_ratio = self.warmup_ratio, None
        super().__post_init__()
        self.sampler = Sampler(self.sampler) if isinstance(self.sampler, str) else self.sampler
        self.prediction_loss_only = True
        if self.parallel_mode == ParallelMode.DISTRIBUTED:
            self.dataloader_drop_last = True

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        if callable(found["sampler"]):
            del found["sampler"]
        return found


def test_overridden_defaults_and_added_fields_of_a_derived_class_count() -> None:
    args: Any = BaseConfig("out")
    assert (args.logging_steps, args.learning_rate, args.bf16, args.max_length) == (10, 2e-5, True, 1024)
    assert isinstance(args.logging_steps, int) and args.gradient_checkpointing is args.activation_checkpointing is True
    assert (args.loss_type, args.pad_to, args.unstated, args.made) == (["sigmoid"], None, None, 3)
    off = BaseConfig("out", activation_checkpointing=False)
    assert off.gradient_checkpointing is off.activation_checkpointing is False
    off = BaseConfig("out", gradient_checkpointing=False)
    assert off.gradient_checkpointing is off.activation_checkpointing is False
    assert BaseConfig("out", fp16=True).bf16 is False
    assert BaseConfig("out", truncation="legacy").truncation == "start"  # its own choices are its own business
    given = BaseConfig("out", model_init_kwargs='{"dtype": "float32", "use_cache": "false"}')
    assert given.model_init_kwargs == {"dtype": "float32", "use_cache": False}
    assert BaseConfig("out", max_length=7.5).max_length == 7.5  # type: ignore[arg-type]


def test_what_a_base_declared_holds_for_an_overridden_default() -> None:
    declared = declarations(BaseConfig)
    assert (declared["logging_steps"].unit, declared["logging_steps"].affects) == ("steps, or a share", "nothing")
    assert declared["max_length"].affects == "weights"
    with pytest.raises(ConfigError, match="learning_rate = -1"):
        BaseConfig("out", learning_rate=-1)
    one, other = (numeric_fields(BaseConfig("out", logging_steps=each), data_parallel_size=1) for each in (1, 2))
    assert one == other
    assert "max_length" in one


def test_a_derived_class_survives_copies_and_its_own_dictionary() -> None:
    args = SamplingConfig("out", prompts='{"a": "b"}', sampler="second", warmup_ratio=0.1)
    assert (args.prompts, args.sampler, args.warmup_steps, args.warmup_ratio) == ({"a": "b"}, Sampler.SECOND, 0.1, None)
    assert args.prediction_loss_only and not args.dataloader_drop_last
    values = json.loads(json.dumps(args.to_dict()))
    assert values["sampler"] == "second" and SamplingConfig(**values).to_dict() == values
    assert dataclasses.replace(args, learning_rate=1.0).sampler is Sampler.SECOND
    assert dataclasses.asdict(args)["prompts"] == {"a": "b"}
    assert pickle.loads(pickle.dumps(copy.deepcopy(args))).to_dict() == values
    assert SamplingConfig("out", sampler=SamplerClass).sampler is SamplerClass
    assert SamplingConfig("out", prompts="query: ").prompts == "query: "


def test_fields_that_a_constructor_does_not_take_are_left_out_and_dtypes_are_names() -> None:
    args = BaseConfig("out", model_init_kwargs={"dtype": torch.float32, "deep": {"dtype": torch.bfloat16}})
    values = args.to_dict()
    assert "made" not in values
    assert values["model_init_kwargs"] == {"dtype": "float32", "deep": {"dtype": "bfloat16"}}
    assert BaseConfig(**values).max_length == 1024


LINE = (
    "--output_dir out --max_steps 5 --logging_steps 0.5 --save_steps 7 --report_to jsonl --debug underflow_overflow "
    "--bf16 true --eval_strategy steps --no_dataloader_pin_memory --warmup_steps 3 --optim sgd --fsdp_config {} "
    "--include_num_input_tokens_seen all --resume_from_checkpoint last --lr_scheduler_kwargs '{\"num_cycles\": 2}'"
)


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments, BaseConfig])
def test_transformers_parser_takes_our_fields(cls: Any) -> None:
    import transformers

    theirs = transformers.HfArgumentParser(cls)
    (args,) = theirs.parse_args_into_dataclasses(shlex.split(LINE), look_for_args_file=False)
    (ours,) = HfArgumentParser(cls).parse_args_into_dataclasses(shlex.split(LINE))
    assert args.to_dict() == ours.to_dict() and args.lr_scheduler_kwargs == {"num_cycles": 2}
    theirs.format_help()
    HfArgumentParser(cls).format_help()


# ------------------------------------------------------------------------------------------------ what other code reads
def test_the_settings_of_the_accelerator_are_an_object_and_a_mapping() -> None:
    args = TrainingArguments("out")
    config: Any = args.accelerator_config
    assert isinstance(config, AcceleratorConfig)
    assert (config.split_batches, config.dispatch_batches, config.gradient_accumulation_kwargs) == (False, None, None)
    config.split_batches = True
    args.validate()
    assert args.accelerator_config is config == {"split_batches": True}
    assert config.to_dict()["even_batches"] is True
    assert copy.deepcopy(args).accelerator_config == config
    assert pickle.loads(pickle.dumps(args)).accelerator_config.split_batches is True
    with pytest.raises(ConfigError, match=r'split_batch: No setting has this name\. Did you mean "split_batches"\?'):
        config.split_batch = True
    with pytest.raises(AttributeError):
        _ = config.split_batch


def test_the_process_can_be_asked_without_starting_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = TrainingArguments("out", use_cpu=True).distributed_state
    assert (state.num_processes, state.process_index, state.distributed_type) == (1, 0, "NO")
    assert state.is_main_process and state.is_local_main_process and state.is_last_process and state.initialized
    assert state.device == torch.device("cpu")
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert (state.num_processes, state.process_index, state.distributed_type) == (2, 1, "MULTI_CPU")
    assert not state.is_main_process and state.is_last_process and not state.initialized


def test_the_plugins_are_none_or_say_what_is_configured() -> None:
    args: Any = TrainingArguments("out")
    assert (args.deepspeed_plugin, args.fsdp_plugin_args, args.parallelism_config) == (None, None, None)
    args = TrainingArguments("out", deepspeed={"zero_optimization": {"stage": 3}})
    assert (args.deepspeed_plugin.zero_stage, args.deepspeed_plugin.is_zero3_init_enabled()) == (3, True)
    assert args.deepspeed_plugin.deepspeed_config == {"zero_optimization": {"stage": 3}}
    args = TrainingArguments("out", fsdp="shard_grad_op offload", fsdp_config={"min_num_params": 7})
    names = ("reshard_after_forward", "cpu_ram_efficient_loading", "activation_checkpointing")
    plugin: dict[str, Any] = dict.fromkeys(names, False)
    plugin |= {"fsdp_version": 2, "cpu_offload": True, "min_num_params": 7, "auto_wrap_policy": "SIZE_BASED_WRAP"}
    assert args.fsdp_plugin_args == {**plugin, "state_dict_type": "SHARDED_STATE_DICT"}
    args = TrainingArguments("out", fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["A", "B"]})
    assert args.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "A,B"


def test_accelerates_plugin_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin sets it
    args: Any = TrainingArguments("out", fsdp="full_shard auto_wrap offload")
    plugin = accelerate.FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)


def test_private_names_that_scripts_use_are_there() -> None:
    args: Any = TrainingArguments("out", use_cpu=True)
    assert (args._n_gpu, args._setup_devices, args._no_sync_in_gradient_accumulation) == (0, torch.device("cpu"), True)
    args._n_gpu = 1
    assert (args._n_gpu, args.n_gpu) == (1, 0)


def test_the_home_folder_is_meant_by_its_short_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = TrainingArguments("~/runs/one", logging_dir="~/logs")
    assert (args.output_dir, args.logging_dir) == (str(tmp_path / "runs" / "one"), str(tmp_path / "logs"))
    assert TrainingArguments("memory://~/a").output_dir == "memory://~/a"
    assert TrainingArguments("~old").output_dir == "~old"
