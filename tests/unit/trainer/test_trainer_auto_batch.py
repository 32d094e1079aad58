"""`auto_find_batch_size` and `accelerator_config`: how many samples a process takes at a time."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import Lookahead, Outside, Several
from tests.support.toys import Classifier, Hungry, StatefulStream, classification_rows, cuda
from tests.support.training import LOGGED, At, Note, StopAt, assert_equal, final_state, preempted_at, trained, trainer
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.arguments.fields import Unset
from trainer_lib.errors import ConfigError, OutOfMemoryError

ROWS = classification_rows(26)
AUTO: dict[str, Any] = {"auto_find_batch_size": True}


FAILURES = {
    "torch": cuda,
    "device": lambda: RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
    "host": MemoryError,
}
GRADIENTS = "gradient_accumulation_kwargs"


def seeded(cls: Any, *given: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return cls(*given, **more)


hungry = functools.partial(seeded, Hungry)


@pytest.mark.parametrize("failure", FAILURES)
def test_out_of_memory_halves_micro_batches(failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Samples, losses and weights are those of a run that had the smaller micro-batch from the start."""
    given: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 10, **LOGGED}
    model = hungry(3, failure=FAILURES[failure])
    found = trained(tmp_path / "a", ROWS, model=model, per_device_train_batch_size=10, **AUTO, **given)
    told = re.findall(r"micro-batches of (\d+): training continues with (\d+)", caplog.text)
    assert told == [("10", "5"), ("5", "2")]
    assert found.state.train_batch_size == 2
    small = trained(tmp_path / "b", ROWS, model=hungry(3), per_device_train_batch_size=2, **given)
    assert_equal(final_state(found), final_state(small))
    assert model.seen == small.model.seen


def test_odd_sizes_leave_uneven_micro_batches_at_their_exact_weight(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 7, **LOGGED}
    model = hungry(4)
    model.dropout = nn.Dropout(0.0)
    found = trained(tmp_path / "a", ROWS, model=model, **AUTO, **given)
    assert model.seen[:3] == [3, 3, 1]
    whole = trained(tmp_path / "b", ROWS, model=seeded(Classifier, dropout=0.0), **given)
    for one, other in zip(found.state.log_history[:-1], whole.state.log_history[:-1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_it_goes_on_from_the_newest_checkpoint_of_the_same_training(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, **LOGGED}
    given |= {"global_batch_size": 8, "per_device_train_batch_size": 8}
    # 4 steps an epoch (8 + 8 + 8 + 2): memory runs out in step 6, step 4 is saved.
    found = trained(tmp_path / "a", ROWS, model=hungry(4, since=5), **AUTO, **given)
    assert preempted_at(trainer(tmp_path / "b", ROWS, model=hungry(9), callbacks=[StopAt(4)], **given)) == 4
    resumed = trainer(tmp_path / "b", ROWS, model=hungry(9), **{**given, "per_device_train_batch_size": 4})
    resumed.train(resume_from_checkpoint=True)
    assert_equal(final_state(found), final_state(resumed))


def test_a_resumed_run_starts_with_the_micro_batch_that_was_found(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 1, "auto_find_batch_size": True, "per_device_train_batch_size": 8}
    assert preempted_at(trainer(tmp_path, ROWS, model=hungry(4), callbacks=[StopAt(2)], **given)) == 2
    model = hungry(4)
    trainer(tmp_path, ROWS, model=model, **given).train(resume_from_checkpoint=True)
    assert model.seen == [4, 4, 2]


@pytest.mark.parametrize(
    "make", [lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), Several, Lookahead, Outside]
)
def test_what_the_user_gave_is_put_back_as_it_was(make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path) -> None:
    """An optimizer of one's own, a stream with a state: neither keeps a trace of the failed attempt."""
    model, small_model = hungry(2, since=2), hungry(9)
    optimizer = make(model.parameters())
    stream, started = StatefulStream(ROWS), Note("on_train_begin", lambda state, **_: state.global_step)
    given: dict[str, Any] = {"max_steps": 4, "global_batch_size": 4}
    mine: dict[str, Any] = {"model": model, "optimizers": (optimizer, None), "callbacks": [started]}
    found = trained(tmp_path / "a", stream, **mine, **AUTO, **given)
    assert found.optimizer is optimizer
    assert stream.started_at[:2] == [0, 0] and started.kept == [0, 0]
    mine = {"model": small_model, "optimizers": (make(small_model.parameters()), None)}
    small = trained(tmp_path / "b", StatefulStream(ROWS), per_device_train_batch_size=2, **mine, **given)
    assert_equal(final_state(found), final_state(small))


def test_a_model_is_made_again_for_the_smaller_batch(tmp_path: Path) -> None:
    made: list[Hungry] = []

    def model_init() -> nn.Module:
        made.append(Hungry(2))
        return made[-1]

    fresh = trained(tmp_path, ROWS, model_init=model_init, max_steps=4, global_batch_size=4, **AUTO)
    assert fresh.model is made[-1] and made[-1].seen[:2] == [2, 2]


def test_one_sample_that_does_not_fit_ends_in_the_typed_failure(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, model=hungry(0), max_steps=2, **AUTO)
    with pytest.raises(OutOfMemoryError, match="per_device_train_batch_size = 1: Memory ran out in step 1"):
        one.train()


def test_batches_of_a_loader_of_ones_own_are_not_ours_to_halve(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            data: Any = ROWS
            return torch.utils.data.DataLoader(data, batch_size=4, collate_fn=self.data_collator)

    one = trainer(tmp_path, None, cls=Own, model=hungry(2), max_steps=2, **AUTO)
    with pytest.raises(OutOfMemoryError, match=r"a loader of your own.*Make its batches smaller"):
        one.train()
    split = trainer(tmp_path, None, cls=Own, accelerator_config={"split_batches": True}, max_steps=2)
    with pytest.raises(ConfigError, match=r"split_batches = True: The batches of your own loader cannot be split"):
        split.train()


# -------------------------------------------------------------------------------------------------- accelerator_config


class Copied(torch.Tensor):
    """Notes how it is copied to the device."""

    asked: list[Any]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["non_blocking"])
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)


def test_non_blocking_decides_how_batches_are_copied(tmp_path: Path) -> None:
    for config, expected in ((None, True), ({"non_blocking": False}, False), ({"non_blocking": True}, True)):
        batch = torch.zeros(2).as_subclass(Copied)
        batch.asked = []
        trainer(tmp_path, ROWS, accelerator_config=config)._prepare_inputs({"x": batch})
        assert batch.asked == [expected], config


def test_defaults_written_out_in_full_are_understood(tmp_path: Path) -> None:
    """The file that the reference's `AcceleratorConfig` writes asks for what happens here anyway."""
    config = tmp_path / "accelerator.json"
    written: dict[str, Any] = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
    written |= {"use_seedable_sampler": True, "non_blocking": False, "gradient_accumulation_kwargs": None}
    config.write_text(json.dumps({**written, "use_configured_state": False}))
    one = trained(tmp_path / "out", ROWS, accelerator_config=str(config), max_steps=1)
    assert one._trainflow.world.batching.non_blocking is False
    settings: Any = one.args.accelerator_config
    assert (settings.split_batches, settings.non_blocking) == (False, False)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"dispatch_batches": True}, "dispatch_batches = True: This setting is not supported: no process reads"),
        ({"use_seedable_sampler": False}, r"accelerator_config\.use_seedable_sampler = False: .*_get_train_sampler"),
        ({"even_batch": True}, "accelerator_config = even_batch: .*Did you mean .even_batches."),
        ({"split_batches": "maybe"}, r"accelerator_config\.split_batches = maybe"),
        ({GRADIENTS: {"num_steps": 2}}, rf"^accelerator_config\.{GRADIENTS}\.num_steps = 2: .*; set gradient_accumul"),
        ({GRADIENTS: {"adjust_scheduler": False}}, "adjust_scheduler = False: This setting is not supported"),
        ({GRADIENTS: {"sync": True}}, rf"accelerator_config\.{GRADIENTS}\.sync = True: No setting has this name"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(config: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path, ROWS, accelerator_config=config)
    assert list(tmp_path.iterdir()) == []


def run_out() -> None:
    raise cuda()


def full_at(step: int) -> At:
    """Memory runs out once inside the optimizer's step, after the gradients were unscaled."""
    return At(step, run_out, "on_pre_optimizer_step")


class Overflows(Classifier):
    """The loss of 10 samples is infinite: the loss scale falls in the attempt that runs out of memory."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        return {**found, "loss": found["loss"] * (float("inf") if len(x) == 10 else 1.0)}


@pytest.mark.parametrize(("step", "model"), [(0, Classifier), (2, Overflows)])
def test_an_fp16_step_without_memory_is_taken_again(tmp_path: Path, step: int, model: Any) -> None:
    """The gradients of the second attempt are unscaled, and its loss scale is that of the beginning."""
    given: dict[str, Any] = {"max_steps": 4, "global_batch_size": 10, "fp16": True, **LOGGED}
    more: dict[str, Any] = {"callbacks": [full_at(step)], "auto_find_batch_size": True}
    found = trained(tmp_path / "a", ROWS, model=seeded(model), per_device_train_batch_size=10, **more, **given)
    small = trained(tmp_path / "b", ROWS, model=seeded(model), per_device_train_batch_size=5, **given)
    assert found.state.train_batch_size == 5
    assert_equal(final_state(found), final_state(small))
    assert found.accelerator.scaler.get_scale() == small.accelerator.scaler.get_scale()


@pytest.mark.parametrize("fp16", [False, True])
def test_a_training_after_a_step_that_failed_has_none_of_its_gradients(tmp_path: Path, fp16: bool) -> None:
    def build(folder: str, *callbacks: TrainerCallback) -> Trainer:
        given: dict[str, Any] = {"max_steps": 2, "fp16": fp16, "callbacks": list(callbacks)}
        return trainer(tmp_path / folder, ROWS, model=seeded(Classifier, dropout=0.0), **given)

    failed, plain = build("a", full_at(0)), build("b")
    with pytest.raises(torch.OutOfMemoryError):
        failed.train()
    failed.train()
    plain.train()
    assert all(map(torch.equal, failed.model.parameters(), plain.model.parameters()))


def test_a_global_batch_alone_is_one_pass_that_is_halved_until_memory_suffices(tmp_path: Path) -> None:
    """Eight samples at a time is the default of those who give neither size."""
    given: dict[str, Any] = {"per_device_train_batch_size": Unset(8), "global_batch_size": 24, "max_steps": 1}
    assert TrainingArguments().per_device_train_batch_size == 8
    sizes: dict[str, list[int]] = {}
    for name, room, more in (
        ("alone", 24, {}),
        ("short of memory", 6, {}),
        ("given", 24, {"per_device_train_batch_size": 8}),
        ("neither", 24, {"global_batch_size": None, "gradient_accumulation_steps": 3}),
        ("one for all processes", 24, {"accelerator_config": {"split_batches": True}}),
    ):
        model = hungry(room)
        model.dropout = nn.Dropout(0.0)
        trained(tmp_path / name, ROWS, model=model, **{**given, **more})
        sizes[name] = model.seen
    assert sizes["alone"] == [24] and sizes["short of memory"][-4:] == [6, 6, 6, 6]
    assert sizes["given"] == sizes["neither"] == sizes["one for all processes"] == [8, 8, 8]


def test_the_batch_that_follows_from_others_changes_with_them() -> None:
    args = TrainingArguments(global_batch_size=24)
    assert (args.per_device_train_batch_size, args.to_dict()["per_device_train_batch_size"]) == (24, 24)
    args.global_batch_size = None
    args.validate()
    assert args.per_device_train_batch_size == 8
    for more in ({"fsdp": "full_shard"}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        assert TrainingArguments(global_batch_size=24, **more).per_device_train_batch_size == 8
    words = describe_step(TrainingArguments(global_batch_size=24), data_parallel_size=2, micro_batch=5)
    assert words == "24 samples a step: micro-batch 5 x accumulation 3 x 2 processes"
