"""Losses and training steps as user code overrides them: the same code on transformers' Trainer and on ours."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.patterns import ROWS, Make, Small, Table, assert_same

PATTERNS = Table()


@PATTERNS.add
def compute_loss_with_any_keyword(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + 1e-2 * outputs["logits"].pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return make(Mine)


@PATTERNS.add
def class_weights(make: Make) -> Any:
    class Weighted(make.lib.Trainer):  # type: ignore[name-defined,misc]
        takes = ("class_weights",)

        def __init__(self, *args: Any, class_weights: list[float], **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.class_weights = torch.tensor(class_weights, device=self.args.device)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.get("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = nn.CrossEntropyLoss(weight=self.class_weights)(logits.view(-1, 3), labels.view(-1))
            return (loss, outputs) if return_outputs else loss

    return make(Weighted, class_weights=[1.0, 2.0, 5.0], eval_dataset=ROWS, eval_strategy="epoch")


@PATTERNS.add
def focal_loss(make: Make) -> Any:
    class Focal(make.lib.Trainer):  # type: ignore[name-defined,misc]
        gamma = 2.0

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            likely = -functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="none")
            loss = -((1 - likely.exp()) ** self.gamma * likely).mean()
            return (loss, outputs) if return_outputs else loss

    return make(Focal)


@PATTERNS.add
def distillation(make: Make) -> Any:
    class Distilling(make.lib.Trainer):  # type: ignore[name-defined,misc]
        takes = ("teacher_model", "temperature")

        def __init__(self, *args: Any, teacher_model: nn.Module, temperature: float = 2.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = teacher_model
            self._move_model_to_device(self.teacher, self.model.head.weight.device)
            self.teacher.eval()
            self.temperature = temperature

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            student = model(**inputs)
            with torch.no_grad():
                teacher = self.teacher(**inputs)
            soft = functional.kl_div(
                functional.log_softmax(student["logits"] / self.temperature, -1),
                functional.softmax(teacher["logits"] / self.temperature, -1),
                reduction="batchmean",
            )
            loss = 0.5 * student["loss"] + 0.5 * soft * self.temperature**2
            return (loss, student) if return_outputs else loss

    torch.manual_seed(1)
    return make(Distilling, teacher_model=Small(), temperature=4.0, gradient_accumulation_steps=1)


@PATTERNS.add
def contrastive(make: Make) -> Any:
    class Contrastive(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            one = functional.normalize(model.body(inputs["x"]), dim=-1)
            other = functional.normalize(model.body(inputs["x"] * 1.1 + 0.1), dim=-1)
            scores = one @ other.T / 0.1
            loss = functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
            return (loss, {"scores": scores}) if return_outputs else loss

    return make(Contrastive)


@PATTERNS.add
def several_tasks_by_a_column(make: Make) -> Any:
    rows = [{**row, "task": index // 4 % 2} for index, row in enumerate(ROWS)]

    class Tasks(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            task = int(inputs.pop("task")[0])
            outputs = model(**inputs)
            loss = outputs["loss"] if task == 0 else functional.mse_loss(outputs["logits"].sum(-1), inputs["x"].sum(-1))
            return (loss, outputs) if return_outputs else loss

    return make(Tasks, train_dataset=rows, remove_unused_columns=False)


@PATTERNS.add
def r_drop(make: Make) -> Any:
    class RDrop(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            first, second = model(**inputs), model(**inputs)
            one, other = (functional.log_softmax(each["logits"], -1) for each in (first, second))
            apart = functional.kl_div(one, other, log_target=True, reduction="batchmean")
            apart = apart + functional.kl_div(other, one, log_target=True, reduction="batchmean")
            loss = (first["loss"] + second["loss"]) / 2 + apart
            return (loss, first) if return_outputs else loss

    return make(RDrop)


@PATTERNS.add
def adversarial_step(make: Make) -> Any:
    class Adversarial(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            weight = self.model.body.weight
            backup = weight.data.clone()
            weight.data.add_(0.1 * weight.grad / weight.grad.norm())
            attacked = self.compute_loss(model, inputs)
            self.accelerator.backward(attacked)
            weight.data.copy_(backup)
            return loss.detach()

    return make(Adversarial)


@PATTERNS.add
def whole_step_under_accumulation(make: Make) -> Any:
    class Whole(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            if self.args.n_gpu > 1:
                loss = loss.mean()
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return make(Whole, gradient_accumulation_steps=2, max_steps=2)


@PATTERNS.add
def step_with_its_own_backward(make: Make) -> Any:
    class Own(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
            model.train()
            loss: torch.Tensor = model(**self._prepare_inputs(inputs))["loss"]
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

    return make(Own)


@PATTERNS.add
def mixup_before_the_step(make: Make) -> Any:
    class Mixup(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            x = inputs["x"]
            inputs = {**inputs, "x": 0.7 * x + 0.3 * x.flip(0)}
            return super().training_step(model, inputs, num_items_in_batch)

    return make(Mixup, gradient_accumulation_steps=2, max_steps=2)


@PATTERNS.add
def extra_numbers_logged_from_the_loss(make: Make) -> Any:
    class Noted(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._metrics: dict[str, list[float]] = {"norm": []}

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self._metrics["norm"].append(outputs["logits"].norm().item())
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            own = {name: sum(values) / len(values) for name, values in self._metrics.items() if values}
            if next(iter(logs.keys())).startswith("eval_"):
                own = {f"eval_{name}": value for name, value in own.items()}
            super().log({**logs, **own}, start_time)
            self._metrics["norm"].clear()

    return make(Noted, eval_dataset=ROWS, eval_strategy="steps", eval_steps=2)


@PATTERNS.add
def gradient_penalty(make: Make) -> Any:
    class Penalised(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            inputs["x"].requires_grad_(True)
            outputs = model(**inputs)
            (slope,) = torch.autograd.grad(outputs["loss"], inputs["x"], create_graph=True)
            loss = outputs["loss"] + slope.pow(2).sum()
            return (loss, outputs) if return_outputs else loss

    return make(Penalised)


@PATTERNS.add
def mixins_and_several_levels(make: Make) -> Any:
    class Scaled:
        scale = 0.5

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
            return (loss[0] * self.scale, loss[1]) if isinstance(loss, tuple) else loss * self.scale

    class Counting:
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = [*getattr(self, "seen", []), len(args[1]["labels"])]
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    class Base(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("callbacks", [])
            super().__init__(*args, **kwargs)

    class Middle(Counting, Base):
        pass

    class Mine(Scaled, Middle):
        scale = 0.25

    return make(Mine)


@PATTERNS.add
def decorated_with_wraps(make: Make) -> Any:
    def halved(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) * 0.5

        return wrapper

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        compute_loss = halved(make.lib.Trainer.compute_loss)

    return make(Mine)


@PATTERNS.add
def replaced_on_the_instance(make: Make) -> Any:
    def loss_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return outputs["loss"] * 3

    one = make(make.lib.Trainer)
    one.compute_loss = types.MethodType(loss_of, one)
    return one


@PATTERNS.add
def replaced_on_the_class(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        pass

    one = make(Mine)
    original = Mine.training_step

    def twice(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen = [*getattr(self, "seen", []), "step"]
        return original(self, model, inputs, num_items_in_batch)

    Mine.training_step = twice
    return one


@PATTERNS.add
def a_function_for_the_loss(make: Make) -> Any:
    def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))

    return make(make.lib.Trainer, compute_loss_func=weighted)


@PATTERNS.add
def inputs_changed_and_kept(make: Make) -> Any:
    class Kept(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            self._last = {**inputs, "x": inputs["x"] * 2}
            return self._last

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert inputs is self._last
            return super().compute_loss(model, inputs, *args, **kwargs)

    return make(Kept)


@PATTERNS.add
def the_label_smoother_called_by_hand(make: Make) -> Any:
    class Smoothing(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = self.label_smoother(outputs, labels)
            return (loss, outputs) if return_outputs else loss

    model: Any = Small()
    # The reference reads its problem_type.
    model.config = types.SimpleNamespace(problem_type=None, to_json_string=lambda: "{}")
    return make(Smoothing, model=model, label_smoothing_factor=0.1)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_the_pattern_ends_where_it_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)
