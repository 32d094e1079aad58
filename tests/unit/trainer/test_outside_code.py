"""Code from outside: what it relies on between steps, weights of its losses, and arguments of transformers."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.searching import search_trainer
from tests.support.toys import Classifier, Hungry, TokenModel, classification_rows, token_rows
from tests.support.training import assert_equal, final_state, note_heads, trained, trainer
from trainer_lib import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trainer_lib.arguments.foreign_arguments import adopt_arguments
from trainer_lib.errors import ConfigError

ROWS = classification_rows(32)
EVERY: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
CONSTANT: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
TOKENS = token_rows(8)


def _stream() -> Any:
    import datasets

    rows = [{"x": row["x"].tolist(), "labels": int(row["labels"]), "place": place} for place, row in enumerate(ROWS)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


def test_evaluating_the_stream_that_is_trained_on_moves_neither_of_them(tmp_path: Path) -> None:
    places: list[int] = []

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        places.extend(row["place"] for row in rows)
        return {"x": torch.tensor([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}

    stream = _stream()
    given: dict[str, Any] = {"data_collator": collate, "eval_dataset": stream, "remove_unused_columns": False}
    given |= {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer(tmp_path, stream, max_steps=2, **given).train()
    resumed = trainer(tmp_path, stream, max_steps=3, resume_from_checkpoint=True, **given)
    places.clear()
    resumed.train()
    assert places[:4] == [8, 9, 10, 11]
    places.clear()
    resumed.evaluate()
    assert places == list(range(32))
    places.clear()
    trainer(tmp_path / "new", stream, max_steps=1, data_collator=collate, remove_unused_columns=False).train()
    assert places == [0, 1, 2, 3]


@pytest.mark.parametrize("replaces", [False, True])
def test_the_state_of_a_callback_of_transformers_is_restored(tmp_path: Path, replaces: bool) -> None:
    from transformers import EarlyStoppingCallback

    def build(steps: int, **given: Any) -> tuple[Trainer, Any]:
        stopping: Any = EarlyStoppingCallback(early_stopping_patience=9, early_stopping_threshold=1e9)
        settings = {**EVERY, **SAVING, "metric_for_best_model": "loss", "load_best_model_at_end": True, **given}
        one = trainer(tmp_path, ROWS, eval_dataset=ROWS[:8], callbacks=[stopping], max_steps=steps, **settings)
        return one, stopping

    one, stopping = build(4)
    one.train()
    assert stopping.early_stopping_patience_counter == 3
    one, _ = build(6, resume_from_checkpoint=True, restore_callback_states_from_checkpoint=replaces)
    one.train()
    found = one.pop_callback(EarlyStoppingCallback)  # type: ignore[arg-type]
    assert found.early_stopping_patience_counter == 5  # type: ignore[union-attr]


class Logging(Trainer):
    modes: list[tuple[str, bool]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        name = next(name for name in logs if name.endswith("loss"))
        self.modes.append((name, self.model.training))
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        self.log({"own_loss": 1.0})
        return metrics


def test_the_model_evaluates_until_the_evaluation_is_logged(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, cls=Logging, eval_dataset={"a": ROWS[:8], "b": ROWS[8:16]}, max_steps=2, **EVERY)
    one.modes = []  # type: ignore[attr-defined]
    one.train()
    step = [("loss", True), ("eval_a_loss", False), ("own_loss", False), ("eval_b_loss", False)]
    step += [("own_loss", False), ("own_loss", False)]
    assert one.modes == [*step, *step, ("train_loss", True)]  # type: ignore[attr-defined]
    assert one.model.training


def test_a_users_schedule_that_follows_a_metric_steps_with_it(tmp_path: Path) -> None:
    def build(steps: int, **given: Any) -> Trainer:
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        settings = {**EVERY, **SAVING, "max_steps": steps, **given}
        return trainer(tmp_path, ROWS, model=model, eval_dataset=ROWS[:8], optimizers=(optimizer, schedule), **settings)

    one = build(4)
    one.train()
    assert [entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry] == pytest.approx(
        [1.0, 0.1, 0.01, 0.001]
    )
    resumed = build(5, resume_from_checkpoint=True)
    resumed.train()
    assert resumed.get_learning_rates() == pytest.approx([1e-5])


def test_a_trainer_is_freed_though_a_class_of_schedules_knows_it(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            class Known(torch.optim.lr_scheduler.LambdaLR):
                trainer = self

            self.lr_scheduler = Known(optimizer, lambda step: 1.0)
            return self.lr_scheduler

    model = weakref.ref(trained(tmp_path, ROWS, cls=Own, max_steps=1).model)
    gc.collect()
    assert model() is None


def test_other_data_on_resume_names_the_way_out(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, max_steps=2, **SAVING).train()
    more = [*ROWS, *ROWS[:4]]
    with pytest.raises(ValueError, match="ignore_data_skip"):
        trainer(tmp_path, more, max_steps=4, resume_from_checkpoint=True, **SAVING).train()
    one = trained(tmp_path, more, max_steps=4, resume_from_checkpoint=True, ignore_data_skip=True, **SAVING)
    assert one.state.global_step == 4


class Scaled(nn.Module):
    """A loss with a weight, and a count that it keeps in a buffer."""

    calls: torch.Tensor

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.model = model

    def forward(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs["logits"] * self.scale.mean(), labels) + (self.scale**2).mean()


class WithLoss(Trainer):
    """Keeps a loss, or several by name, as the trainers of sentence-transformers do."""

    loss: Any

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss = self.loss["main"] if isinstance(self.loss, Mapping) else self.loss
        outputs = model(x=inputs["x"])
        value = loss(outputs, inputs["labels"])
        return (value, outputs) if return_outputs else value

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        every = nn.ModuleDict(self.loss) if isinstance(self.loss, Mapping) else self.loss
        self.optimizer = torch.optim.AdamW([{"params": list(every.parameters())}], lr=1e-2)
        return self.optimizer


class Anonymous(WithLoss):
    """The parameter is not an attribute of the Trainer."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        hidden = self.loss
        self.loss = hidden.__call__
        self.optimizer = torch.optim.AdamW([{"params": list(hidden.parameters())}], lr=1e-2)
        return self.optimizer


def _by_override(folder: Path, cls: Any = WithLoss, model: Any = Classifier, **given: Any) -> tuple[Trainer, Scaled]:
    torch.manual_seed(0)
    loss = Scaled(model())
    one = trainer(folder, ROWS, model=loss.model, cls=cls, **{**CONSTANT, **given})
    one.loss = loss  # type: ignore[attr-defined]
    return one, loss


def _by_name(folder: Path, **given: Any) -> tuple[Trainer, Scaled]:
    one, loss = _by_override(folder, **given)
    one.loss = {"main": loss}  # type: ignore[attr-defined]
    return one, loss


def _anonymous(folder: Path, **given: Any) -> tuple[Trainer, Scaled]:
    return _by_override(folder, Anonymous, **given)


def _as_loss_func(folder: Path, model: Any = Classifier, **given: Any) -> tuple[Trainer, Scaled]:
    torch.manual_seed(0)
    loss = Scaled()
    return trainer(folder, ROWS, model=model(), compute_loss_func=loss, **{**CONSTANT, **given}), loss


@pytest.mark.parametrize(
    ("build", "background"),
    [(_by_override, False), (_by_name, True), (_anonymous, False), (_as_loss_func, False), (_as_loss_func, True)],
)
def test_weights_of_a_loss_train_and_are_resumed_bit_for_bit(tmp_path: Path, build: Any, background: bool) -> None:
    whole, expected = build(tmp_path / "whole", max_steps=4, save_async=background)
    whole.train()
    assert not torch.equal(expected.scale.detach(), torch.ones(4))
    build(tmp_path / "stopped", max_steps=2, save_async=background)[0].train()
    resumed, loss = build(tmp_path / "stopped", max_steps=4, save_async=background, resume_from_checkpoint=True)
    resumed.train()
    assert torch.equal(loss.scale, expected.scale)
    if build is not _anonymous:
        assert torch.equal(loss.calls, expected.calls)
    for one in (whole, resumed):
        assert one.optimizer is not None
        one.optimizer.param_groups = [
            {**group, "params": [each for each in group["params"] if each.shape != (4,)]}
            for group in one.optimizer.param_groups
        ]
        one.optimizer.state.clear()
    assert_equal(final_state(resumed), final_state(whole))


@pytest.mark.parametrize("build", [_by_override, _by_name, _as_loss_func])
def test_a_retry_with_less_memory_begins_with_the_first_weights_of_the_loss(tmp_path: Path, build: Any) -> None:
    given: dict[str, Any] = {"max_steps": 4, "save_steps": 10, "global_batch_size": 8}
    small, expected = build(tmp_path / "small", per_device_train_batch_size=2, **given)
    small.train()
    # In the second half of a step: the first has left a gradient.
    found, loss = build(tmp_path / "found", auto_find_batch_size=True, model=partial(Hungry, 2, since=3), **given)
    found.train()
    assert found.state.train_batch_size == 2 and len(found.model.seen) > 4
    assert torch.equal(loss.scale, expected.scale) and torch.equal(loss.calls, expected.calls)


def test_every_trial_begins_with_the_first_weights_of_the_loss(tmp_path: Path) -> None:
    loss = Scaled()
    one = search_trainer(tmp_path, compute_loss_func=loss)
    best = one.hyperparameter_search(lambda trial: {"learning_rate": 1e-2}, n_trials=3)
    assert len({each["objective"] for each in best.run_summary}) == 1
    assert torch.equal(loss.scale.detach(), torch.ones(4)) and loss.calls == 0
    one.train()
    assert not torch.equal(loss.scale.detach(), torch.ones(4))


def test_a_checkpoint_without_the_weights_of_the_loss_says_so(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, max_steps=2, **CONSTANT).train()
    with pytest.raises(ConfigError, match=r"lacks compute_loss_func\.scale"):
        _as_loss_func(tmp_path, max_steps=4, resume_from_checkpoint=True)[0].train()


def test_a_models_own_load_state_dict_is_reached(tmp_path: Path) -> None:
    class Renaming(Classifier):
        """Saves under other names than its parameters have, and takes a name that only a newer version writes."""

        loads = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {f"v2.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            type(self).loads += 1
            named = {name.removeprefix("v2."): value for name, value in state_dict.items() if name.startswith("v2.")}
            return super().load_state_dict(named, strict, assign)

    def renamed(folder: str, **given: Any) -> Trainer:
        torch.manual_seed(0)
        return trained(tmp_path / folder, ROWS, model=Renaming(), **CONSTANT, **given)

    whole = renamed("whole", max_steps=4)
    renamed("stopped", max_steps=2)
    resumed = renamed("stopped", max_steps=4, resume_from_checkpoint=True)
    assert Renaming.loads == 1
    assert_equal(final_state(resumed), final_state(whole))


class Overflowing(Scaled):
    """The gradient of its weight is infinite at the second step; the model's gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0
        self.scale.register_hook(self._overflow)  # type: ignore[no-untyped-call]

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        self.gradients += 1
        return gradient * float("inf") if self.gradients == 2 else gradient


@pytest.mark.parametrize(
    ("optim", "fp16"),
    [("adamw_torch", False), ("adamw_torch_fused", False), ("adamw_torch_fused", True), ("sgd", True)],
)
def test_an_overflow_in_a_loss_skips_the_step(tmp_path: Path, optim: str, fp16: bool) -> None:
    heads = note_heads()
    given: dict[str, Any] = {"optim": optim, "fp16": fp16, "max_steps": 3, "lr_scheduler_type": "constant"}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "callbacks": [heads]}
    one = trained(tmp_path, ROWS, compute_loss_func=Overflowing(), **given)
    loss: Any = one.compute_loss_func
    assert torch.isfinite(loss.scale).all() and not torch.equal(loss.scale.detach(), torch.ones(4))
    assert torch.equal(heads.kept[1], heads.kept[0]) and not torch.equal(heads.kept[2], heads.kept[1])
    first, second, third = [entry for entry in one.state.log_history if "grad_norm" in entry]
    assert math.isfinite(second["loss"]) and math.isnan(second["grad_norm"]) and math.isfinite(third["grad_norm"])
    # With fp16, the first scale is too large for the model's own gradients.
    assert third["nonfinite_steps"] == second["nonfinite_steps"] == first.get("nonfinite_steps", 0) + 1
    assert not one.accelerator.optimizer_step_was_skipped


@dataclass
class Mixin:
    """What several configurations of a library share."""

    shared: int = 5

    def doubled(self) -> int:
        return self.shared * 2


def library_config() -> Any:
    import transformers  # seconds: not for every worker that collects this file

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

    return LibraryConfig


def colliding_config() -> Any:
    import transformers

    @dataclass
    class Collides(transformers.TrainingArguments):
        """Adds a field that means something here."""

        global_batch_size: int | None = None
        logging_dir: str | None = None  # an argument of older versions, which means the same here

    return Collides


def theirs(kind: str = "TrainingArguments", **given: Any) -> Any:
    import transformers

    return getattr(transformers, kind)("out", use_cpu=True, report_to="none", **given)


def changes(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that differ from ours at their defaults."""
    usual = type(args)("out", use_cpu=True).to_dict()
    return {name: value for name, value in args.to_dict().items() if value != usual[name]}


def test_their_arguments_at_their_defaults_said_nothing() -> None:
    assert changes(adopt_arguments(theirs())) == {}
    adopted = adopt_arguments(theirs("Seq2SeqTrainingArguments"))
    assert type(adopted) is Seq2SeqTrainingArguments and changes(adopted) == {}
    ours = TrainingArguments("out")
    assert adopt_arguments(ours) is ours


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ({"optim": "sgd", "lr_scheduler_type": "cosine"}, {}),
        ({"debug": "underflow_overflow"}, {"debug": ["underflow_overflow"]}),
        ({"eval_strategy": "epoch"}, {"do_eval": True}),
        ({"accelerator_config": {"split_batches": True}}, {}),
        ({"activation_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"lr_scheduler_kwargs": {"num_cycles": 1}}, {}),
        ({"logging_steps": 0.5, "seed": 3, "hub_model_id": "it"}, {}),
    ],
)
def test_what_was_asked_for_is_taken(given: dict[str, Any], follows: dict[str, Any]) -> None:
    assert changes(adopt_arguments(theirs(**given))) == {**given, **follows}


def test_sharding_wraps_layers_as_it_does_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # their arguments set it
    adopted = adopt_arguments(theirs(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Layer"]}))
    assert adopted.fsdp == "full_shard auto_wrap"
    adopted = adopt_arguments(theirs(fsdp=True, fsdp_config={"auto_wrap_policy": "NO_WRAP"}))
    assert adopted.fsdp == "full_shard"


def test_a_class_derived_from_theirs_keeps_its_fields_and_methods_and_trains(tmp_path: Path) -> None:
    common: dict[str, Any] = {"use_cpu": True, "report_to": "none", "max_steps": 2, "save_strategy": "no"}
    given: Any = library_config()(str(tmp_path), **common, eval_strategy="steps", eval_steps=1, names=["a"])
    given.set_by_hand = "yes"
    trainer = Trainer(TokenModel(), given, train_dataset=TOKENS, eval_dataset=TOKENS)
    args: Any = trainer.args
    assert isinstance(args, TrainingArguments) and type(args).__name__ == "LibraryConfig"
    assert (args.learning_rate, args.beta, args.double, args.names) == (0.25, 0.1, 0.2, ["a"])
    assert (args.scaled(3), args.derived, args.set_by_hand) == (pytest.approx(0.3), 7, "yes")
    assert (args.shared, args.doubled(), args.SCALE, args.unit()) == (5, 10, 3, "tokens")
    assert args.tripled == pytest.approx(0.3)
    assert "extra" not in args.to_dict()  # it calls `super()`, which only works in the class it was written for
    trainer.train()
    assert trainer.state.global_step == 2
    assert "eval_loss" in trainer.evaluate()


def test_what_cannot_be_served_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = theirs(accelerator_config={"dispatch_batches": True})
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), given)
    assert caught.value.field == "accelerator_config.dispatch_batches"
    # A newer transformers may have a field that is unknown here.
    known = dataclasses.field(default=1)
    known.name, known._field_type = "brand_new", dataclasses._FIELD  # type: ignore[attr-defined]
    monkeypatch.setitem(type(given).__dataclass_fields__, "brand_new", known)
    monkeypatch.setattr(type(given), "brand_new", 1, raising=False)
    newer: Any = theirs()
    assert changes(adopt_arguments(newer)) == {}
    newer.brand_new = 2
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), newer)
    assert (caught.value.field, caught.value.value) == ("brand_new", "2")


def test_a_field_of_a_library_is_not_taken_for_an_argument_of_ours() -> None:
    given: Any = colliding_config()("out", use_cpu=True, logging_dir="logs")
    adopted = adopt_arguments(given)
    assert (adopted.global_batch_size, adopted.logging_dir) == (None, "logs")
    given.global_batch_size = 64
    with pytest.raises(ConfigError, match=r"global_batch_size = 64: .* may mean something else\. Rename the field"):
        adopt_arguments(given)


@pytest.mark.parametrize(
    ("given", "field", "part"),
    [
        ({"learning_rate": 1.0}, "args", "TrainingArguments.from_dict(values)"),
        ("out", "args", "These are not training arguments"),
        (TrainingArguments, "args", "not their class"),
        (lambda: type(theirs()), "args", "not their class"),
        (argparse.Namespace(learning_rate=1.0, lerning=2), "args.lerning", "The arguments are a Namespace"),
        (SimpleNamespace(learning_rate=1.0), "args", "These are not training arguments"),
    ],
)
def test_what_is_not_a_set_of_arguments_is_refused(given: Any, field: str, part: str) -> None:
    given = given() if callable(given) and not isinstance(given, type) else given
    with pytest.raises(ConfigError) as caught:
        Trainer(TokenModel(), given)
    assert caught.value.field == field and caught.value.remedy
    assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_our_arguments_train_with_their_trainer(kind: str, tmp_path: Path) -> None:
    cls: Any = Seq2SeqTrainingArguments if kind == "Seq2SeqTrainer" else TrainingArguments
    args = cls(str(tmp_path), use_cpu=True, max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=2)
    args.dataloader_pin_memory = False
    rows: Any = TOKENS
    trainer = getattr(importlib.import_module("transformers"), kind)(
        TokenModel(), args, train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert "eval_loss" in trainer.evaluate()
    assert (tmp_path / "checkpoint-2").is_dir()
