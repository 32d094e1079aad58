"""Logs, control, saving and the loop itself, as user code overrides them: on transformers' Trainer and on ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_lib
from tests.support.patterns import RESUMED, ROWS, Make, Small, Table, assert_same, compare, outcome
from trainer_lib.errors import ConfigError

PATTERNS = Table()
EVALUATES: dict[str, Any] = {"eval_dataset": ROWS[:8], "eval_strategy": "steps", "eval_steps": 2}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def whole_report(lib: Any, *, newest: bool) -> Any:
    """`_maybe_log_save_evaluate` written out, as overrides copy it."""

    class Reporting(lib.Trainer):  # type: ignore[misc]
        control: Any
        _globalstep_last_logged: Any

        def _report(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, ignore: Any, rate: Any = None) -> None:
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                logs: dict[str, float] = {}
                scalar = tr_loss.mean().item()
                tr_loss -= tr_loss
                logs["loss"] = round(scalar / (self.state.global_step - self._globalstep_last_logged), 4)
                if grad_norm is not None:
                    logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
                logs["learning_rate"] = self._get_learning_rate() if rate is None else rate
                logs["mine"] = 1.0
                self._total_loss_scalar += scalar
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs)
            metrics = None
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore)
                is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
                if str(self.args.save_strategy) == "best":
                    self.control.should_save = is_new_best
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    if not newest:
        return Reporting

    class Newest(Reporting):
        def _maybe_log_save_evaluate(
            self,
            tr_loss: Any,
            grad_norm: Any,
            model: Any,
            trial: Any,
            epoch: Any,
            ignore_keys_for_eval: Any,
            start_time: Any,
            learning_rate: Any = None,
        ) -> None:
            self._report(tr_loss, grad_norm, model, trial, ignore_keys_for_eval, learning_rate)

    return Newest


@PATTERNS.add
def a_report_written_out(make: Make) -> Any:
    return make(whole_report(make.lib, newest=True), logging_steps=2, max_steps=7, **EVALUATES)


@PATTERNS.add
def a_report_written_out_for_two_trainings(make: Make) -> Any:
    one = make(whole_report(make.lib, newest=True), logging_steps=2, max_steps=4, optim="sgd")
    one.train()
    one.train()
    return one


@PATTERNS.add
def a_report_with_something_before_it(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.seen = [*getattr(self, "seen", []), self.state.global_step]
            super()._maybe_log_save_evaluate(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.control.should_log = True
            return loss

    return make(Mine, max_steps=4)


@PATTERNS.add
def logs_with_names_of_ones_own(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def log(self, logs: dict[str, float], *args: Any) -> None:
            logs = {name if name.startswith("eval_") else f"train/{name}": value for name, value in logs.items()}
            logs["step_again"] = self.state.global_step
            super().log(logs, *args)

    return make(Mine, **EVALUATES)


@PATTERNS.add
def logs_that_go_nowhere(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def log(self, logs: dict[str, float], start_time: Any = None) -> None:
            self.seen = [*self.seen, *(value for name, value in logs.items() if name == "loss")]

    return make(Mine)


@PATTERNS.add
def a_callback_that_stops(make: Make) -> Any:
    class Stop(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == 3:
                control.should_training_stop = True
            return control

    return make(make.lib.Trainer, callbacks=[Stop()], max_steps=8)


@PATTERNS.add
def a_callback_that_ends_epochs(make: Make) -> Any:
    class Short(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step % 2 == 0

    return make(make.lib.Trainer, callbacks=[Short], num_train_epochs=2, max_steps=-1, logging_strategy="epoch")


@PATTERNS.add
def a_callback_that_asks_for_everything(make: Make) -> Any:
    class Ask(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_log = state.global_step in (1, 4)
            control.should_evaluate = state.global_step == 3
            return control

    return make(make.lib.Trainer, callbacks=[Ask()], logging_strategy="no", eval_dataset=ROWS[:8], max_steps=5)


@PATTERNS.add
def every_event_in_order(make: Make) -> Any:
    names = [name for name in dir(make.lib.TrainerCallback) if name.startswith("on_") and "push" not in name]

    class Note(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        seen: list[str] = []  # noqa: RUF012

    def noting(name: str) -> Any:
        def note(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(f"{name} {state.global_step}")

        return note

    for name in names:
        setattr(Note, name, noting(name))
    note = Note()
    note.seen = []
    one = make(make.lib.Trainer, callbacks=[note], gradient_accumulation_steps=2, max_steps=3, **EVALUATES, **SAVES)
    one.train()
    one.predict(ROWS[:4])
    one.seen = note.seen
    return one


@PATTERNS.add
def a_callback_that_holds_the_trainer(make: Make) -> Any:
    class Again(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trainer.evaluate(eval_dataset=ROWS[8:], metric_key_prefix="again")

    one = make(make.lib.Trainer, num_train_epochs=2, max_steps=-1)
    one.add_callback(Again(one))
    return one


@PATTERNS.add
def the_loop_wrapped(make: Make) -> Any:
    class Wrapped(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = ["before"]
            result = super()._inner_training_loop(*args, **kwargs)
            self.seen = [*self.seen, result.global_step]
            return result

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.compute_loss_context_manager()
            return super().train(*args, **kwargs)

        def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
            return super()._finalize_training(trial, num_train_samples, start_time)

    return make(Wrapped)


@PATTERNS.add
def other_lengths(make: Make) -> Any:
    class Longer(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
            values = super().set_initial_training_values(args, dataloader)
            self.seen = [each for each in values if each is not None]
            return (values[0] + 1, *values[1:-1], values[-1] + 2)

    return make(Longer, num_train_epochs=1, max_steps=-1)


@PATTERNS.add
def flops_counted_by_hand(make: Make) -> Any:
    class Counted(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def floating_point_ops(self, inputs: Any) -> int:
            return 10 * len(inputs["labels"])

        def _track_num_input_tokens(self, inputs: Any) -> None:
            self.state.num_input_tokens_seen += inputs["x"].numel()

    one = make(Counted, gradient_accumulation_steps=2)
    one.train()
    one.seen = [one.state.total_flos, one.state.num_input_tokens_seen]
    return one


@PATTERNS.add
def arguments_of_ones_own(make: Make) -> Any:
    @dataclass
    class Arguments(make.lib.TrainingArguments):  # type: ignore[name-defined,misc]
        alpha: float = field(default=0.5, metadata={"help": "A share."})
        names: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.doubled = 2 * self.alpha

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * self.args.doubled

    return make(Mine, args=make.args(Arguments, alpha=0.25, names=["a"]))


@PATTERNS.add
def a_checkpoint_resumed(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> Any:
            self.seen = ["weights"]
            return super()._load_from_checkpoint(resume_from_checkpoint, model)

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            self.seen = [*self.seen, "optimizer"]
            super()._load_optimizer_and_scheduler(checkpoint)

        def _load_rng_state(self, checkpoint: Any) -> None:
            self.seen = [*self.seen, "random"]

    make(make.lib.Trainer, max_steps=4, **SAVES).train()
    one = make(Mine, max_steps=4, **SAVES)
    one.leaves_out = (RESUMED,)
    one.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    return one


@PATTERNS.add
def weights_resumed_with_a_new_optimizer(make: Make) -> Any:
    class Fresh(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            pass

    make(make.lib.Trainer, max_steps=4, **SAVES).train()
    one = make(Fresh, max_steps=4, lr_scheduler_type="constant", **SAVES)
    one.leaves_out = (RESUMED,)
    one.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    return one


@PATTERNS.add
def saving_noted(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            self.seen = [*self.seen, folder.is_dir()]

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            raise AssertionError("nothing is pushed")

    return make(Mine, max_steps=4, **SAVES)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_the_pattern_ends_where_it_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)


# ----------------------------------------------------------------------------------------------- ours alone, every age
def _aged(make: Make, count: int) -> Any:
    base = whole_report(make.lib, newest=False)

    class Five(base):  # type: ignore[misc,valid-type]
        def _maybe_log_save_evaluate(self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore: Any) -> None:
            self._report(tr_loss, None, model, trial, ignore)

    class Six(base):  # type: ignore[misc,valid-type]
        def _maybe_log_save_evaluate(self, tr_loss: Any, norm: Any, model: Any, trial: Any, epoch: Any, i: Any) -> None:
            self._report(tr_loss, norm, model, trial, i)

    class Seven(base):  # type: ignore[misc,valid-type]
        def _maybe_log_save_evaluate(
            self, tr_loss: Any, norm: Any, model: Any, trial: Any, epoch: Any, i: Any, start: float
        ) -> None:
            assert start > 0
            self._report(tr_loss, norm, model, trial, i)

    return make({5: Five, 6: Six, 7: Seven}[count], lr_scheduler_type="constant", logging_steps=2, max_steps=7)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_report_of_every_age_logs_what_the_newest_logs(count: int, tmp_path: Path) -> None:
    def newest(make: Make) -> Any:
        cls = whole_report(make.lib, newest=True)
        return make(cls, lr_scheduler_type="constant", logging_steps=2, max_steps=7)

    ours = outcome(lambda make: _aged(make, count), trainer_lib, tmp_path / "aged")
    theirs = outcome(newest, trainer_lib, tmp_path / "newest")
    if count == 5:
        theirs["logs"] = [{name: v for name, v in each.items() if name != "grad_norm"} for each in theirs["logs"]]
    compare(ours, theirs)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_the_original_report_can_be_called_in_every_age(count: int, tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def _maybe_log_save_evaluate(self, *args: Any, **_: Any) -> None:
            given = args[:1] + args[2:6] if count == 5 else args[:count]
            super()._maybe_log_save_evaluate(*given)

    ours = outcome(lambda make: make(Mine, lr_scheduler_type="constant"), trainer_lib, tmp_path / "mine")
    theirs = outcome(lambda make: make(trainer_lib.Trainer, lr_scheduler_type="constant"), trainer_lib, tmp_path / "a")
    compare(ours, theirs)


def test_a_checkpoint_is_loaded_by_an_override_without_the_model(tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: Any) -> None:  # type: ignore[override]
            super()._load_from_checkpoint(resume_from_checkpoint)

    make = Make(trainer_lib, tmp_path)
    make(trainer_lib.Trainer, max_steps=4, **SAVES).train()
    one = make(Mine, max_steps=4, **SAVES)
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert one.state.global_step == 4


def test_saving_with_the_metrics_of_older_trainers(tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:  # type: ignore[override]
            super()._save_checkpoint(model, trial, metrics=metrics)

    Make(trainer_lib, tmp_path)(Mine, max_steps=2, **SAVES).train()
    assert (tmp_path / "checkpoint-2").is_dir()


@pytest.mark.parametrize("name", ["_rotate_checkpoints", "_sorted_checkpoints", "_run_epoch", "_inner_training_loop"])
def test_what_would_not_be_called_is_refused_by_name(name: str, tmp_path: Path) -> None:
    cls: Any = type("Mine", (trainer_lib.Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=f"Mine.{name}"):
        Make(trainer_lib, tmp_path)(cls)


def test_an_epoch_of_another_length_is_refused(tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
            values = super().set_initial_training_values(*args, **kwargs)
            return (values[0], 1, *values[2:])

    with pytest.raises(ConfigError, match="set_initial_training_values = 1: An epoch of this data has 4"):
        Make(trainer_lib, tmp_path)(Mine, model=Small()).train()
