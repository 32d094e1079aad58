"""Lion: the sign of an interpolated momentum, decoupled weight decay (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from trainer_lib.errors import ConfigError


class Lion(Optimizer):
    """The optimizer Lion, with one state tensor per parameter (`exp_avg`, of the parameter's shape).

    Its learning rate should be 3 to 10 times below AdamW's, because every element moves by the full rate.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: interpolation for the update, and decay of the momentum; each in [0, 1).
        weight_decay: decoupled, per optimizer step.

    Raises:
        ConfigError: a beta is out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        for beta in betas:
            if not 0.0 <= beta < 1.0:
                raise ConfigError(
                    "The value must be in [0, 1).", field="optim_args.betas", value=beta, remedy="Give 0.9 and 0.99."
                )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            # The closure runs a backward pass, for which the decorator above has switched gradients off.
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                average = state["exp_avg"]
                # The update looks ahead with beta1, the average follows with beta2: that order is the algorithm.
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.lerp(gradient, average, beta1).sign_().mul_(group["lr"]))
                average.lerp_(gradient, 1.0 - beta2)
        return loss
