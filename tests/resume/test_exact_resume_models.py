"""Stopped and resumed equals uninterrupted, bit for bit: what models, losses, optimizers and schedules keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import Lookahead, Outside, Several
from tests.support.resuming import prove
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import TWICE, StopAt, preempted_at, trainer
from trainer_lib import ExportableState, Trainer, TrainerCallback

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
ROWS = classification_rows(22)
COSINE: dict[str, Any] = {**TWICE, "lr_scheduler_type": "cosine"}


class Normed(nn.Module):
    """BatchNorm keeps a mean, a variance and a count of batches; a counter of our own is an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += len(x)
        logits = self.head(torch.relu(self.norm(self.body(x)))) * (1 + self.seen * 1e-3)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def transposed() -> nn.Module:
    """A classifier whose weights lie column by column in memory."""
    model = Classifier()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    return model


class Recurrent(nn.Module):
    """Adds what it remembers of the batch before: `past_index` hands it back, as a tensor or nested."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.layer, self.nested = nn.Linear(6, 3), nested

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: Any = None) -> dict[str, Any]:
        past = mems[1]["last"][0] if self.nested and mems is not None else mems
        logits = self.layer(x) + (0 if past is None else 0.5 * past)
        memory: Any = logits.mean(0)
        if self.nested:
            memory = (torch.arange(3), {"last": [memory, None]})
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return (
            {"loss": loss, "logits": logits, "memory": memory}
            if labels is not None
            else {"logits": logits, "memory": memory}
        )


MODELS: dict[str, dict[str, Any]] = {
    "batch_norm": {"model": Normed},
    "weights_by_column": {"model": transposed},
    "memory": {"model": lambda: Recurrent(nested=False), "past_index": 2},
    "nested_memory": {"model": lambda: Recurrent(nested=True), "past_index": 2},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "no_clipping": {"max_grad_norm": 0.0},
    "weights_in_bf16": {"model": lambda: Classifier().to(torch.bfloat16)},
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("stop", [2, 3])
def test_models_and_losses(case: str, stop: int, tmp_path: Path) -> None:
    given = {**COSINE, **MODELS[case]}
    build = given.pop("model", Classifier)
    rows = ROWS
    if case == "weights_in_bf16":
        rows = [{**row, "x": row["x"].to(torch.bfloat16)} for row in ROWS]

    def make(folder: Path, *callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        return trainer(folder, rows, model=build(), callbacks=list(callbacks), **given)

    prove(make, tmp_path, stop)


def test_noise_on_embeddings(tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        given = {**COSINE, "neftune_noise_alpha": 5.0}
        return trainer(folder, token_rows(22), model=TokenModel(), callbacks=list(callbacks), **given)

    prove(make, tmp_path, 4)


REAL: dict[str, dict[str, Any]] = {
    "bert_with_dropout": {"build": lambda: bert(hidden_dropout_prob=0.2), "rows": text_rows(12)},
    "llama_recomputed": {
        "build": lambda: llama(attention_dropout=0.2),
        "rows": lm_rows(12),
        "gradient_checkpointing": True,
    },
    "llama_in_bf16": {"build": lambda: llama(attention_dropout=0.2), "rows": lm_rows(12), "bf16": True},
}


@pytest.mark.parametrize("case", REAL)
def test_models_of_transformers(case: str, tmp_path: Path) -> None:
    given = {**COSINE, **REAL[case]}
    build, rows = given.pop("build"), given.pop("rows")

    def make(folder: Path, *callbacks: Any) -> Trainer:
        return trainer(folder, rows, model=build(), callbacks=list(callbacks), **given)

    prove(make, tmp_path, 3)


def test_adapters_with_dropout(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def make(folder: Path, *callbacks: Any) -> Trainer:
        base = llama()
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
        return trainer(folder, lm_rows(12), model=get_peft_model(base, config), callbacks=list(callbacks), **COSINE)

    prove(make, tmp_path, 3)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"optim": name} for name in ("lion", "adagrad", "nadam", "radam", "adamw_torch_fused")},
    "muon": {"optim": "muon"},
    "lookahead": {"optimizer_cls_and_kwargs": (Lookahead, {})},
    "several_behind_one": {"optimizer_cls_and_kwargs": (Several, {})},
    "state_outside_of_state": {"optimizer_cls_and_kwargs": (Outside, {})},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers(case: str, tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        return trainer(folder, ROWS, callbacks=list(callbacks), **{**COSINE, **OPTIMIZERS[case]})

    prove(make, tmp_path, 3)


class Average(TrainerCallback, ExportableState):
    """A moving average of the weights, as tensors; and what JSON has no word for."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.shadow: dict[str, torch.Tensor] = {}
        self.last: tuple[int, torch.Tensor] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, value in kwargs["model"].named_parameters():
            kept = self.shadow.setdefault(name, value.detach().clone())
            kept.lerp_(value.detach(), 1 - self.decay)
        self.last = (state.global_step, torch.tensor(state.global_step, dtype=torch.int16))

    def state(self) -> dict[str, Any]:
        return {"args": {"decay": self.decay}, "attributes": {"shadow": self.shadow, "last": self.last}}


@pytest.mark.parametrize("given", [{}, {"save_async": True}, {"restore_callback_states_from_checkpoint": True}])
def test_an_average_of_the_weights_in_a_callback(given: dict[str, Any], tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        return trainer(folder, ROWS, callbacks=[Average(), *callbacks], **{**COSINE, "save_steps": 1, **given})

    whole, resumed = prove(make, tmp_path, 3)
    averages = [one.pop_callback(Average) for one in (whole, resumed)]
    one, other = (each.shadow for each in averages if isinstance(each, Average))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert [each.last for each in averages if isinstance(each, Average)] == [
        (6, torch.tensor(6, dtype=torch.int16))
    ] * 2


def test_memory_of_other_batches_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(**given: Any) -> Trainer:
        torch.manual_seed(0)
        given = {"num_train_epochs": 2, "global_batch_size": 8, "past_index": 2, **given}
        return trainer(tmp_path, ROWS, model=Recurrent(nested=False), **given)

    assert preempted_at(make(callbacks=[StopAt(2)])) == 2
    make(per_device_train_batch_size=8).train(True)
    assert "belongs to batches of another size: training starts without it" in caplog.text


def test_memory_that_cannot_be_saved_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Recurrent):
        def forward(self, x: torch.Tensor, labels: Any = None, mems: Any = None) -> dict[str, Any]:
            return {**super().forward(x, labels), "memory": object()}

    trainer(
        tmp_path, ROWS, model=Odd(nested=False), past_index=2, save_strategy="steps", save_steps=2, max_steps=2
    ).train()
    assert "The memory of past_index is not saved" in caplog.text


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): trains at y, evaluates at the average x, and must be told which."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == training:
                continue
            group["train_mode"] = training
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for param in group["params"]:
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)

    def train(self) -> None:
        self._switch(training=True)

    def eval(self) -> None:
        self._switch(training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "the optimizer was not told that training begins"
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.detach().clone())
                share = 1 / group["k"]
                param.lerp_(z, share).add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("stop", [2, 3])
def test_an_optimizer_with_two_sets_of_weights(stop: int, tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        given = {**COSINE, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 2}
        given |= {"optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 0.05}), "eval_dataset": ROWS[:7]}
        return trainer(folder, ROWS, callbacks=list(callbacks), **given)

    prove(make, tmp_path, stop)


SCHEDULES: dict[str, dict[str, Any]] = {
    "reduce_lr_on_plateau": {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}},
    "greedy": {},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 1},
    "inverse_sqrt": {"warmup_steps": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stop", [2, 3])
def test_schedules(name: str, stop: int, tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        given = {**COSINE, "lr_scheduler_type": name, **SCHEDULES[name]}
        given |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "learning_rate": 0.3}
        return trainer(folder, ROWS, callbacks=list(callbacks), eval_dataset=ROWS[:7], **given)

    prove(make, tmp_path, stop)


def test_an_optimizer_and_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        model = Classifier()
        groups: list[dict[str, Any]] = [{"params": list(model.body.parameters()), "lr": 0.1}]
        groups += [{"params": list(model.norm.parameters())}]
        groups += [{"params": list(model.head.parameters()), "betas": (0.8, 0.9)}]
        optimizer = torch.optim.Adam(groups, 0.01)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        then = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [3])
        own: dict[str, Any] = {"optimizers": (optimizer, schedule), "callbacks": list(callbacks)}
        return trainer(folder, ROWS, model=model, **own, **COSINE)

    prove(make, tmp_path, 2)
