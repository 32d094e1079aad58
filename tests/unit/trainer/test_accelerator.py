"""`trainer.accelerator` in one process: a real Accelerator that does nothing behind the Trainer's back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.toys import classification_rows
from tests.support.training import trained, trainer
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError

ROWS = classification_rows(12)


@pytest.fixture(scope="module", autouse=True)
def accelerate() -> Any:
    return pytest.importorskip("accelerate")  # seconds: not for every worker that collects this file


# ------------------------------------------------------------------------------------------------- nothing behind us
def test_making_the_accelerator_changes_nothing_in_the_process(accelerate: Any, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, bf16=True)
    before = dict(os.environ), torch.get_num_threads(), torch.random.get_rng_state()
    helper = one.accelerator
    assert isinstance(helper, accelerate.Accelerator) and one.accelerator is helper
    assert (dict(os.environ), torch.get_num_threads()) == before[:2]
    assert torch.equal(torch.random.get_rng_state(), before[2])
    assert not torch.distributed.is_initialized()
    assert helper.mixed_precision == helper.state.mixed_precision == "bf16" and helper.scaler is None


def test_trainers_and_an_accelerator_of_ones_own_have_their_own_precision(accelerate: Any, tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        own = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        helpers = [trainer(tmp_path, ROWS, bf16=bf16).accelerator for bf16 in (True, False)]
        for each in (helpers, [helper.state for helper in helpers]):
            assert [one.mixed_precision for one in each] == ["bf16", "no"]
        assert own.mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_an_accelerator_that_a_subclass_sets_is_the_trainers(tmp_path: Path) -> None:
    class Own(Trainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            self.accelerator: Any = "mine"
            super().__init__(*given, **more)

    one = trained(tmp_path, ROWS, cls=Own, max_steps=1, eval_dataset=ROWS)
    assert one.evaluate()["eval_loss"] > 0 and len(one.predict(ROWS).predictions) == len(ROWS)
    assert one.accelerator == "mine"


# -------------------------------------------------------------------------------------------------------------- prepare
def test_prepare_returns_what_it_was_given_in_that_order(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    helper, other = one.accelerator, nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader(ROWS, batch_size=5)  # type: ignore[arg-type]
    prepared = helper.prepare(schedule, loader, "text", other, optimizer)
    assert prepared[2:4] == ("text", other) and helper.prepare(other) is other
    assert prepared[4].optimizer is optimizer and prepared[0].scheduler is schedule
    assert [len(batch["labels"]) for batch in prepared[1]] == [5, 5, 2] and prepared[1].dataset is ROWS
    assert helper.prepare() == () and helper.prepare(None) is None
    assert helper.prepare(one.model) is one.model
    with pytest.raises(ConfigError, match="2 objects to prepare"):
        helper.prepare(1, 2, device_placement=[True])
    assert not helper.dispatch_batches and helper._optimizers and helper._models
    assert helper.free_memory(other) == [None] and not helper._optimizers and not helper._models
    helper.prepare(other)
    helper.clear()
    assert not helper._models


def test_a_prepared_optimizer_and_schedule_step_as_the_trainers_own(tmp_path: Path) -> None:
    class Preparing(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = self.accelerator.prepare_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            own = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            self.lr_scheduler = self.accelerator.prepare_scheduler(own)
            return self.lr_scheduler

    one = trained(tmp_path, ROWS, cls=Preparing, max_steps=3, save_strategy="steps", save_steps=1)
    assert type(one.optimizer) is torch.optim.SGD and one.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    loaders = [one.get_train_dataloader(), one.get_eval_dataloader(ROWS), one.get_test_dataloader(ROWS)]
    mine = [*loaders, one.optimizer, one.lr_scheduler]
    assert all(each is other for each, other in zip(mine, one.accelerator.prepare(*mine), strict=True))


def test_a_reference_model_computes_in_the_trainers_precision_until_autocast_is_off(tmp_path: Path) -> None:
    from accelerate.utils import AutocastKwargs

    helper, frozen = trainer(tmp_path, ROWS, bf16=True).accelerator, nn.Linear(2, 2)
    x = torch.rand(3, 2)
    plain = frozen(x)
    prepared = helper.prepare_model(frozen, evaluation_mode=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = nn.functional.linear(x, frozen.weight, frozen.bias).float()
    assert torch.equal(prepared(x), wanted) and prepared(x).dtype is torch.float32
    restored = helper.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(restored(x), plain)
    with helper.autocast():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
        with helper.autocast(AutocastKwargs(enabled=False)):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.float32


def test_save_and_state_dict_of_models(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    helper = one.accelerator
    assert helper.unwrap_model(nn.DataParallel(one.model)) is one.model  # through the wrappers of strategies
    state = helper.get_state_dict(one.model)
    assert all(torch.equal(state[name], value) for name, value in one.model.state_dict().items())
    helper.save_model(one.model, tmp_path / "saved")
    helper.save({"x": torch.ones(1)}, tmp_path / "x.safetensors", safe_serialization=True)
    assert (tmp_path / "saved" / "model.safetensors").is_file() and (tmp_path / "x.safetensors").is_file()


# ------------------------------------------------------------------------------------------------------------- the step
class Stepping(Trainer):
    """Does in its step what subclasses do with the accelerator, and notes what it sees."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.noted: list[Any] = []
        super().__init__(*given, **more)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs, helper = self._prepare_inputs(inputs), self.accelerator
        assert helper.is_main_process and helper.is_local_main_process
        with helper.accumulate(model), helper.no_sync(model), self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, inputs)
        self.noted.append((helper.sync_gradients, helper.gradient_state.sync_gradients))
        helper.backward(loss / self.current_gradient_accumulation_steps, retain_graph=True)
        return loss.detach() / self.current_gradient_accumulation_steps


def test_the_accelerator_follows_the_accumulation_of_the_trainers_loop(tmp_path: Path) -> None:
    one: Any = trained(tmp_path, ROWS, cls=Stepping, max_steps=2, gradient_accumulation_steps=2)
    assert one.noted == [(False, False), (True, True), (True, True)]  # the epoch's second step has one micro-batch
    assert one.accelerator.gradient_accumulation_steps == 1 and one.accelerator.sync_gradients
    assert one.accelerator.optimizer_step_was_skipped is False


def test_a_loop_of_ones_own_accumulates_through_the_accelerator(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    helper, steps = one.accelerator, []
    helper.gradient_accumulation_steps = 2
    other = nn.Linear(2, 1, bias=False)
    model, optimizer = helper.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
    before = other.weight.detach().clone()
    for _ in range(2):
        with helper.accumulate(model):
            helper.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        steps.append(torch.equal(other.weight, before))
    assert steps == [True, False] and torch.allclose(before - other.weight, torch.ones(1, 2))
    helper.gradient_accumulation_steps = 1


def test_norms_other_than_l2_and_values_are_clipped(tmp_path: Path) -> None:
    helper, weight = trainer(tmp_path, ROWS).accelerator, nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -4.0])
    assert helper.clip_grad_norm_(weight, 1.0, norm_type=float("inf")) == 4.0
    assert weight.grad.tolist() == pytest.approx([0.75, -1.0])
    helper.clip_grad_value_([weight], 0.5)
    assert weight.grad.tolist() == [0.5, -0.5]


class Clipping(Trainer):
    """Clips in its step, as subclasses of old do."""

    norms: list[float]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.unscale_gradients()
        norm = self.accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        again = self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        self.norms = [float(norm), float(again)]
        return loss


def test_gradients_are_unscaled_once_before_they_are_clipped(tmp_path: Path) -> None:
    one: Any = trainer(tmp_path, ROWS, cls=Clipping, fp16=True, max_steps=1)
    assert one.accelerator.scaler is one._trainflow.engine.precision.scaler is not None
    one.train()
    plain: Any = trained(tmp_path, ROWS, cls=Clipping, max_steps=1)
    assert one.norms[0] == pytest.approx(plain.norms[0], rel=1e-2)  # and not times the scale of 65536
    assert one.norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_a_skipped_step_is_reported(tmp_path: Path) -> None:
    class Once(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            return super().compute_loss(model, inputs, *given, **more) * (float("nan") if self.state.global_step else 1)

    one = trained(tmp_path, ROWS, cls=Once, max_steps=1)
    assert not one.accelerator.optimizer_step_was_skipped
    one = trained(tmp_path, ROWS, cls=Once, max_steps=2)
    assert one.accelerator.optimizer_step_was_skipped


# ------------------------------------------------------------------------------------------------------------- the rest
def test_one_process_gathers_its_own(tmp_path: Path) -> None:
    helper, data = trainer(tmp_path, ROWS).accelerator, {"a": torch.ones(2), "b": (torch.tensor(1.0),)}
    assert helper.gather_for_metrics(["text", {}]) == ["text", {}]
    assert helper.gather(data) is helper.gather_for_metrics(data) is data
    assert helper.pad_across_processes(data)["a"] is data["a"] and helper.reduce(data, "mean")["b"][0] == 1.0
    with helper.split_between_processes([1, 2]) as share, helper.local_main_process_first():
        assert share == [1, 2]
    ran: list[int] = []
    for decorate in (helper.on_main_process, helper.on_local_main_process, helper.on_last_process):
        decorate(lambda: ran.append(1))()
    helper.on_process(lambda: ran.append(1), process_index=0)()
    helper.on_local_process(lambda: ran.append(1), local_process_index=0)()
    assert len(ran) == 5 and helper.is_last_process and not helper.use_distributed and not helper.multi_device
    helper.set_trigger()
    assert (helper.check_trigger(), helper.check_trigger()) == (True, False)
    with pytest.raises(ConfigError, match="reduction = min: The reduction is unknown"):
        helper.reduce(torch.ones(1), "min")
    with pytest.raises(ConfigError, match="Multiply what reduce returns"):
        helper.reduce(torch.ones(1), scale=2.0)


def test_print_profile_and_skipped_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer(tmp_path, ROWS)
    helper = one.accelerator
    helper.print("once", end="")
    assert capsys.readouterr().out == "once"
    loader: Any = DataLoader(ROWS, batch_size=5)  # type: ignore[arg-type]
    assert [len(batch["labels"]) for batch in helper.skip_first_batches(helper.prepare(loader), 1)] == [5, 2]
    with helper.profile() as profiler:
        torch.ones(2) + 1
    assert profiler.key_averages()
    with helper.join_uneven_inputs([one.model]), helper.maybe_context_parallel():
        pass
    with helper.trigger_sync_in_backward(one.model):
        pass
    assert not helper.verify_device_map(one.model)


def test_what_is_logged_reaches_the_trackers_of_report_to(tmp_path: Path) -> None:
    class Logging(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log(logs, start_time)
            self.accelerator.log({"mine": 1.5}, step=7)

    one = trained(tmp_path, ROWS, cls=Logging, report_to="jsonl", max_steps=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "mine" in line] == [7]
    assert not [entry for entry in one.state.log_history if "mine" in entry]


def test_a_trial_of_a_search_refreshes_the_accelerator(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    helper = one.accelerator
    one._trainflow_set_up(trainer(tmp_path, ROWS, bf16=True).args)
    assert one.accelerator is helper and helper.mixed_precision == "bf16"


def test_an_override_of_its_making_is_called_and_may_not_replace_it(tmp_path: Path) -> None:
    class Adjusting(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            assert isinstance(self.model, nn.Module) and self.args.output_dir == str(tmp_path)
            self.accelerator.even_batches = False

    class Replacing(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator: Any = "mine"

    assert not trainer(tmp_path, ROWS, cls=Adjusting).accelerator.even_batches
    with pytest.raises(ConfigError, match="would not follow an Accelerator of your own"):
        trainer(tmp_path, ROWS, cls=Replacing)
