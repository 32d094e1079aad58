"""Building Trainers for tests, and comparing what two of them ended with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.toys import Classifier, classification_rows
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.checkpoint.optimizer import snapshot_optimizer
from trainer_lib.errors import Preempted

TIMES = ("runtime", "per_second")
LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
TWICE: dict[str, Any] = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, **LOGGED}
"""Two epochs, each step logged; of 22 rows the third step of each epoch has 6 of 8."""


def arguments(folder: Path | str, **given: Any) -> TrainingArguments:
    """Arguments of a short, quiet run on the CPU."""
    settings: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 4}
    settings |= {"learning_rate": 1e-2, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return TrainingArguments(**{**settings, **given})


def trainer(
    folder: Path | str, train: Any, *, model: Any = None, cls: type[Trainer] = Trainer, **given: Any
) -> Trainer:
    """A Trainer around `Classifier` (or `model`), always with the same initial weights."""
    own = {
        name: given.pop(name)
        for name in (
            *("eval_dataset", "callbacks", "compute_metrics", "data_collator", "compute_loss_func", "optimizers"),
            *("preprocess_logits_for_metrics", "model_init", "processing_class", "optimizer_cls_and_kwargs"),
        )
        if name in given
    }
    torch.manual_seed(0)
    if model is None and "model_init" not in own:
        model = Classifier()
    return cls(model, arguments(folder, **given), train_dataset=train, **own)


def trained(folder: Path | str, train: Any, **given: Any) -> Trainer:
    made = trainer(folder, train, **given)
    made.train()
    return made


class At(TrainerCallback):
    """Calls a function once, at an `event` of a step."""

    def __init__(self, step: int, action: Callable[[], Any], event: str = "on_step_end") -> None:
        self.step, self.action = step, action
        setattr(self, event, self._act)

    def _act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.action()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class StopAt(At):
    """Sends this process a SIGTERM at the end of a step, as a scheduler would."""

    def __init__(self, step: int, event: str = "on_step_end") -> None:
        super().__init__(step, _terminate, event)


class Note(TrainerCallback):
    """Keeps what `look` returns at every `event`; it gets the state, and what the event passes by name."""

    def __init__(self, event: str, look: Callable[..., Any]) -> None:
        self.kept: list[Any] = []
        self._look = look
        setattr(self, event, self._keep)

    def _keep(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept.append(self._look(state, **kwargs))


def measured(*accuracies: float) -> dict[str, Any]:
    """Settings of a run whose evaluations give these accuracies in turn; the largest is the best."""
    values = iter(accuracies)
    data: list[Any] = classification_rows(4)
    given: dict[str, Any] = {"eval_dataset": data, "compute_metrics": lambda p: {"accuracy": next(values)}}
    return {**given, "eval_strategy": "steps", "metric_for_best_model": "accuracy"}


def note_heads() -> Note:
    """Keeps a copy of the head's weights after every step."""
    return Note("on_step_end", lambda state, model, **_: model.head.weight.detach().clone())


class NoteSaves(TrainerCallback):
    """Keeps (the step of a save, how far training is when it is announced)."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append((state.global_step, self.step))


def preempted_at(trainer: Trainer) -> int:
    """Train until the run is stopped, and return the step that was committed."""
    try:
        trainer.train()
    except Preempted as stop:
        assert stop.step is not None
        return stop.step
    raise AssertionError("training was not stopped")


def train_in_parts(make: Callable[[], Trainer], stop: int | None) -> Trainer:
    """Train; with `stop`, a first Trainer is stopped at that step, and the one that is returned resumes."""
    if stop is not None:
        first = make()
        first.add_callback(StopAt(stop))
        preempted_at(first)
    last = make()
    last.train(resume_from_checkpoint=stop is not None)
    return last


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the log history without the entries that depend on the clock."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]


def losses(trainer: Any) -> list[float]:
    """Return the losses that a trainer of any library has logged, those before a resume included."""
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> list[float]:
    """Return the gradient norms that a trainer has logged."""
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the weights of a model that processes hold in parts: whole on the first rank, none elsewhere."""
    state = trainer._trainflow.engine.strategy.model_state(trainer.model_wrapped)
    return {name: value for name, value in state.items() if not value.is_meta}


def accuracy(p: Any) -> dict[str, float]:
    """Measure the share of rows whose largest output is that of their class."""
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def final_state(trainer: Trainer) -> dict[str, Any]:
    """Return what two equal runs share, bit for bit: weights, optimizer, schedule, scaler, generators, logs."""
    assert trainer.optimizer is not None
    optimizer = snapshot_optimizer(trainer.optimizer, dict(trainer.model.named_parameters()))
    tensors = {f"model/{name}": value for name, value in trainer.model.state_dict().items()}
    tensors.update({f"optimizer/{name}": value for name, value in optimizer.tensors.items()})
    return {
        "tensors": {name: value.clone() for name, value in tensors.items()},
        "groups": optimizer.groups,
        "scalars": optimizer.scalars,
        "schedule": {k: v for k, v in trainer.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "scaler": trainer._trainflow.engine.precision.scaler_state(),
        "random": torch.get_rng_state().tolist(),
        "logs": logged(trainer),
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "position": (trainer.state.global_step, trainer.state.epoch),
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare at atol=0 and name the first difference."""
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, value in one["tensors"].items():
        assert torch.equal(value, other["tensors"][name]), f"{name} differs"
    for name in one.keys() - {"tensors"}:
        assert one[name] == other[name], f"{name} differs"
