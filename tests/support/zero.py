"""Small ZeRO configurations, and a model with everything that DeepSpeed finds hard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.training import logged, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint.optimizer import snapshot_optimizer


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """A configuration whose buffers fit a toy, and that divides every parameter in stage 3."""
    sizes = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    if stage == 3:
        sizes |= {"stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {"stage": stage, **sizes, **settings}}


class Awkward(nn.Module):
    """Decaying and other parameters, a frozen one, an unused one, tied ones, dropout, and buffers."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 9)
        self.frozen = nn.Linear(9, 9)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(9)
        self.first = nn.Linear(9, 9, bias=False)
        self.second = nn.Linear(9, 9, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(9, 3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += int(x.sum() * 1000)  # another number on every process
        hidden = self.norm(torch.relu(self.frozen(self.inside(x))))
        logits = self.head(self.dropout(self.second(torch.relu(self.first(hidden)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class StopAfter(TrainerCallback):
    """Saves and ends training after a step, as a user does who continues on another machine."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def state_of(one: Trainer) -> dict[str, Any]:
    """Everything that two equal runs share; tensors are whole on rank 0 and absent elsewhere. Collective."""
    assert one.optimizer is not None
    strategy, model = one._trainflow.engine.strategy, one.model_wrapped
    optimizer = snapshot_optimizer(one.optimizer, strategy.named_parameters(model))
    tensors = {f"model/{name}": each for name, each in strategy.gathered(strategy.local_state(model)).items()}
    tensors |= {f"optimizer/{name}": value for name, value in strategy.gathered(optimizer.tensors).items()}
    return {
        "tensors": {name: value.clone() for name, value in tensors.items() if not value.is_meta},
        "groups": [{key: value for key, value in group.items() if key != "fused"} for group in optimizer.groups],
        "schedule": {key: value for key, value in one.lr_scheduler.state_dict().items() if key != "lr_lambdas"},
        "random": torch.get_rng_state().tolist(),
        "logs": logged(one),
        "position": (one.state.global_step, one.state.epoch),
    }


def awkward(
    folder: Path | str, rows: Any, *, stop: int | None = None, resume: bool = False, dropout: float = 0.1, **given: Any
) -> dict[str, Any]:
    """Train `Awkward`, perhaps only up to a step, perhaps going on from there; losses, weights and state after it."""
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "global_batch_size": 6,
        "per_device_train_batch_size": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.3,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    torch.manual_seed(0)
    one = trainer(folder, rows, model=Awkward(dropout), callbacks=[StopAfter(stop)], **{**settings, **given})
    one.train("auto" if resume else None)
    return state_of(one)
