"""Optimizers that keep more than `state`, in the shapes that other people's packages have."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as pytorch_optimizer has several: numbers, dicts by place, tensors in a cast."""

    def __init__(self, params: Any) -> None:
        self.inside = torch.optim.AdamW(params, lr=0.01)
        super().__init__(self.inside.param_groups, {})
        self.steps_done, self.window = 0, deque([0.0], maxlen=3)
        self.masks: dict[Any, Tensor] = {}
        for param in self._members():
            self.state[param] = {"slow": param.detach().clone()}

    def _members(self) -> list[Tensor]:
        return [param for group in self.inside.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()
        self.steps_done += 1
        self.window.append(1 / self.steps_done)
        for place, param in enumerate(self._members()):
            self.masks[0, place] = (param.detach() * sum(self.window)).float()
            if self.steps_done % 2 == 0:
                slow = self.state[param]["slow"].lerp_(param.detach(), 0.5)
                param.data.copy_(slow - 1e-3 * self.masks[0, place])

    def state_dict(self) -> dict[str, Any]:
        slow = {param: self.state[param]["slow"] for param in self._members()}
        numbers = {"steps_done": self.steps_done, "masks": dict(self.masks), "window": self.window}
        return {**numbers, "slow": slow, "inside": self.inside.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inside.load_state_dict(state_dict["inside"])
        self.param_groups = self.inside.param_groups
        self.steps_done, self.masks, self.window = (state_dict[key] for key in ("steps_done", "masks", "window"))
        for param in self._members():
            self.state[param] = {"slow": state_dict["slow"][param].to(param.dtype)}


class Several(torch.optim.Optimizer):
    """Two optimizers behind one, which has no `state_dict` of its own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.parts = [torch.optim.AdamW(params[::2], lr=0.01), torch.optim.SGD(params[1::2], lr=0.1, momentum=0.9)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Listed(Several):
    """Has a `state_dict` that is a list, as wrappers around two optimizers often have."""

    def state_dict(self) -> Any:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state_dict: Any) -> None:
        for part, state in zip(self.parts, state_dict, strict=True):
            part.load_state_dict(state)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): trains at y, evaluates at the average x, and asks which is wanted."""

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


class Outside(torch.optim.Optimizer):
    """Keeps its state in attributes and under texts, as AdaLomo and MADGRAD do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "dtype": torch.float32})
        self.count, self.total = 0, torch.zeros(())
        self.averages: dict[str, Tensor] = {}
        self.members = [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.total += 0.5
        by_text: dict[Any, Any] = self.state
        by_text["norms"] = {param: param.detach().norm() for param in self.members}
        for place, param in enumerate(self.members):
            if param.grad is not None:
                average = self.averages.setdefault(f"p{place}", torch.zeros_like(param, dtype=torch.float32))
                average.lerp_(param.grad.float(), 0.3)
                param.data.sub_(0.01 / self.count * (average + self.total * by_text["norms"][param]).to(param.dtype))
