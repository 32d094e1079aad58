"""Arguments of transformers given to our Trainer, ours given to theirs, and what is neither."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.support.surface import SURFACE
from tests.support.toys import TokenModel, token_rows
from trainer_lib import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trainer_lib.arguments.fields import field_map
from trainer_lib.arguments.foreign_arguments import OURS_ALONE, adopt_arguments
from trainer_lib.errors import ConfigError

TOKENS = token_rows(8)
COMMON: dict[str, Any] = {"use_cpu": True, "report_to": "none", "max_steps": 2, "save_strategy": "no"}


@dataclass
class Mixin:
    """What several configurations of a library share."""

    shared: int = 5

    def doubled(self) -> int:
        return self.shared * 2


@dataclass
class LibraryConfig(Mixin, transformers.TrainingArguments):
    """A configuration that a library derives from transformers' arguments."""

    SCALE = 3

    learning_rate: float = field(default=0.25)
    beta: float = field(default=0.1)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.derived = 7

    @property
    def double(self) -> float:
        return self.beta * 2

    @cached_property
    def tripled(self) -> float:
        return self.beta * self.SCALE

    @staticmethod
    def unit() -> str:
        return "tokens"

    def scaled(self, by: float) -> float:
        return self.beta * by

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "extra": 1}  # type: ignore[no-untyped-call]


def theirs(**given: Any) -> Any:
    return transformers.TrainingArguments("out", use_cpu=True, report_to="none", **given)


def changes(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that differ from ours at their defaults."""
    usual = type(args)("out", use_cpu=True).to_dict()
    return {name: value for name, value in args.to_dict().items() if value != usual[name]}


def test_their_arguments_at_their_defaults_said_nothing() -> None:
    assert changes(adopt_arguments(theirs())) == {}
    other = transformers.Seq2SeqTrainingArguments("out", use_cpu=True, report_to="none")
    adopted = adopt_arguments(other)
    assert type(adopted) is Seq2SeqTrainingArguments
    assert changes(adopted) == {}
    ours = TrainingArguments("out")
    assert adopt_arguments(ours) is ours


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optim": "sgd", "lr_scheduler_type": "cosine"}, {"optim": "sgd", "lr_scheduler_type": "cosine"}),
        ({"debug": "underflow_overflow"}, {"debug": ["underflow_overflow"]}),
        ({"eval_strategy": "epoch"}, {"eval_strategy": "epoch", "do_eval": True}),
        ({"accelerator_config": {"split_batches": True}}, {"accelerator_config": {"split_batches": True}}),
        (
            {"activation_checkpointing": True},
            {"gradient_checkpointing": True, "activation_checkpointing": True},
        ),
        ({"lr_scheduler_kwargs": {"num_cycles": 1}}, {"lr_scheduler_kwargs": {"num_cycles": 1}}),
        (
            {"logging_steps": 0.5, "seed": 3, "hub_model_id": "it"},
            {"logging_steps": 0.5, "seed": 3, "hub_model_id": "it"},
        ),
    ],
)
def test_what_was_asked_for_is_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changes(adopt_arguments(theirs(**given))) == expected


def test_sharding_wraps_layers_as_it_does_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # their arguments set it
    adopted = adopt_arguments(theirs(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Layer"]}))
    assert adopted.fsdp == "full_shard auto_wrap"
    adopted = adopt_arguments(theirs(fsdp=True, fsdp_config={"auto_wrap_policy": "NO_WRAP"}))
    assert adopted.fsdp == "full_shard"


def test_a_class_derived_from_theirs_keeps_its_fields_and_methods_and_trains(tmp_path: Path) -> None:
    given: Any = LibraryConfig(str(tmp_path), **COMMON, eval_strategy="steps", eval_steps=1, names=["a"])
    given.set_by_hand = "yes"
    trainer = Trainer(TokenModel(), given, train_dataset=TOKENS, eval_dataset=TOKENS)
    args: Any = trainer.args
    assert isinstance(args, TrainingArguments)
    assert type(args).__name__ == "LibraryConfig"
    assert (args.learning_rate, args.beta, args.double, args.names) == (0.25, 0.1, 0.2, ["a"])
    assert (args.scaled(3), args.derived, args.set_by_hand) == (pytest.approx(0.3), 7, "yes")
    assert (args.shared, args.doubled(), args.SCALE, args.unit()) == (5, 10, 3, "tokens")
    assert args.tripled == pytest.approx(0.3)
    assert "extra" not in args.to_dict()  # it calls `super()`, which only works in the class it was written for
    trainer.train()
    assert trainer.state.global_step == 2
    assert "eval_loss" in trainer.evaluate()


def test_their_generation_settings_need_the_trainer_that_generates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: Any = transformers.Seq2SeqTrainingArguments(str(tmp_path), **COMMON, predict_with_generate=True)
    Trainer(TokenModel(), given)
    assert "predict_with_generate = True has no effect without Seq2SeqTrainer" in caplog.text
    plain: Any = transformers.TrainingArguments(str(tmp_path), **COMMON)
    with pytest.raises(ConfigError, match="have no generation settings"):
        Seq2SeqTrainer(TokenModel(), plain)


def test_what_cannot_be_served_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = theirs(accelerator_config={"dispatch_batches": True})
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), given)
    assert caught.value.field == "accelerator_config.dispatch_batches"
    # A newer transformers may have a field that is unknown here.
    known = dataclasses.field(default=1)
    known.name, known._field_type = "brand_new", dataclasses._FIELD  # type: ignore[attr-defined]
    monkeypatch.setitem(transformers.TrainingArguments.__dataclass_fields__, "brand_new", known)
    monkeypatch.setattr(transformers.TrainingArguments, "brand_new", 1, raising=False)
    newer: Any = theirs()
    assert changes(adopt_arguments(newer)) == {}
    newer.brand_new = 2
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), newer)
    assert (caught.value.field, caught.value.value) == ("brand_new", "2")


@dataclass
class Collides(transformers.TrainingArguments):
    """Adds a field that means something here."""

    global_batch_size: int | None = None
    logging_dir: str | None = None  # an argument of older versions, which means the same here


def test_a_field_of_a_library_is_not_taken_for_an_argument_of_ours() -> None:
    given: Any = Collides("out", use_cpu=True, logging_dir="logs")
    adopted = adopt_arguments(given)
    assert (adopted.global_batch_size, adopted.logging_dir) == (None, "logs")
    given.global_batch_size = 64
    with pytest.raises(ConfigError, match=r"global_batch_size = 64: .* may mean something else\. Rename the field"):
        adopt_arguments(given)


def test_our_own_arguments_are_those_that_the_reference_does_not_have() -> None:
    assert set(OURS_ALONE) == set(field_map(TrainingArguments)) - {*SURFACE["TrainingArguments"], *SURFACE["old_args"]}


@pytest.mark.parametrize(
    ("given", "field", "part"),
    [
        ({"learning_rate": 1.0}, "args", "TrainingArguments.from_dict(values)"),
        ("out", "args", "These are not training arguments"),
        (TrainingArguments, "args", "not their class"),
        (transformers.TrainingArguments, "args", "not their class"),
        (argparse.Namespace(learning_rate=1.0, lerning=2), "args.lerning", "The arguments are a Namespace"),
        (SimpleNamespace(learning_rate=1.0), "args", "These are not training arguments"),
    ],
)
def test_what_is_not_a_set_of_arguments_is_refused(given: Any, field: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), given)
    assert caught.value.field == field
    assert caught.value.remedy
    assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_our_arguments_train_with_their_trainer(kind: str, tmp_path: Path) -> None:
    cls: Any = Seq2SeqTrainingArguments if kind == "Seq2SeqTrainer" else TrainingArguments
    args = cls(str(tmp_path), use_cpu=True, max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=2)
    args.dataloader_pin_memory = False
    rows: Any = TOKENS
    trainer = getattr(transformers, kind)(TokenModel(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "eval_loss" in trainer.evaluate()
    assert (tmp_path / "checkpoint-2").is_dir()
