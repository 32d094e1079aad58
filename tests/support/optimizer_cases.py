"""The optimizers of pytorch_optimizer, one after the other: is a restored one equal to one that was never saved?

``python -m tests.support.optimizer_cases ANSWER`` writes the outcome of each as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_lib.checkpoint.optimizer import OptimizerSnapshot, restore_optimizer, snapshot_optimizer
from trainer_lib.errors import ConfigError

Make = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Parameters of one, two and four dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Linear(8, 4)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.conv(x).tanh().mean((2, 3))))
        return out


def _makers() -> Iterator[tuple[str, Make]]:
    po = importlib.import_module("pytorch_optimizer")

    def by_name(name: str) -> Make:
        cls = po.load_optimizer(name)
        takes = inspect.signature(cls.__init__).parameters
        given = {"lr": 0.01, "num_iterations": 20, "num_data": 50}
        settings = {key: value for key, value in given.items() if key in takes}

        def make(model: nn.Module) -> Any:
            if "model" in takes and "params" not in takes:
                return cls(model, **settings)
            params = list(model.parameters())
            with contextlib.suppress(Exception):
                return cls(params, **settings)
            many = [param for param in params if param.ndim > 1]
            few = [param for param in params if param.ndim < 2]
            return cls([{"params": many, "use_muon": True}, {"params": few, "use_muon": False}], **settings)

        return make

    for name in po.get_supported_optimizers():
        yield name, by_name(name)
    adamw = torch.optim.AdamW
    for name in ("Lookahead", "TRAC", "ScheduleFreeWrapper", "OrthoGrad", "PCGrad"):
        cls = getattr(po, name)
        yield name, lambda model, cls=cls: cls(adamw(model.parameters(), lr=0.01))  # type: ignore[misc]
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        cls = getattr(po, name)
        yield name, lambda model, cls=cls: cls(model.parameters(), base_optimizer=adamw, lr=0.01)  # type: ignore[misc]
    yield "WSAM", lambda model: po.WSAM(model, model.parameters(), base_optimizer=adamw, lr=0.01)


def _steps(model: nn.Module, optimizer: Any, count: int, seed: int, *, closure: bool, graph: bool) -> list[float]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    losses = []
    for _ in range(count):
        x, labels = torch.randn(5, 3, 6, 6), torch.randint(0, 4, (5,))

        def backward(x: torch.Tensor = x, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), labels)
            loss.backward(create_graph=graph)  # type: ignore[no-untyped-call]
            return loss

        losses.append(backward().item())
        optimizer.step(backward) if closure else optimizer.step()
    return losses


def _build(make: Make, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = Net(dtype)
    optimizer = make(model)
    getattr(optimizer, "train", lambda: None)()
    return model, optimizer


def _first_steps(make: Make, dtype: torch.dtype, count: int) -> tuple[nn.Module, Any, dict[str, bool]]:
    """A model and an optimizer after some steps, taken in the first way that the optimizer knows."""
    reason: Exception | None = None
    for ways in ({"closure": c, "graph": g} for g in (False, True) for c in (False, True)):
        model, optimizer = _build(make, dtype)
        try:
            _steps(model, optimizer, count, 1, **ways)
        except Exception as error:
            reason = error
            continue
        return model, optimizer, ways
    raise RuntimeError("no step") from reason


def outcome(make: Make, dtype: torch.dtype, count: int) -> str:
    """Return "equal", "refused: …", "not made" (not on a CPU, or not for these parameters), or "DIFFERENT"."""
    try:
        model, optimizer, ways = _first_steps(make, dtype, count)
    except Exception as error:
        return f"not made: {error}"
    try:
        snapshot = snapshot_optimizer(optimizer, model.named_parameters())
    except ConfigError as error:
        return f"refused: {error}"
    tensors = {name: each.clone(memory_format=torch.contiguous_format) for name, each in snapshot.tensors.items()}
    groups, scalars = json.loads(json.dumps([snapshot.groups, snapshot.scalars]))
    twin, restored = _build(make, dtype)
    twin.load_state_dict(model.state_dict())
    restore_optimizer(restored, twin.named_parameters(), OptimizerSnapshot(tensors, groups, scalars))
    losses = [_steps(net, each, 9, 2, **ways) for net, each in ((model, optimizer), (twin, restored))]
    weights = [[value.nan_to_num() for value in side.state_dict().values()] for side in (model, twin)]
    same = str(losses[0]) == str(losses[1]) and all(map(torch.equal, *weights))
    return "equal" if same else "DIFFERENT"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    written = {
        f"{name}, {text}, {count} steps": outcome(make, dtype, count)
        for name, make in _makers()
        for text, dtype in dtypes.items()
        for count in (1, 4, 5)
    }
    Path(sys.argv[1]).write_text(json.dumps(written), encoding="utf-8")
