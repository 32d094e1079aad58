"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

Muon orthogonalises the momentum of a matrix (Jordan et al., https://kellerjordan.github.io/posts/muon/). AdamW updates
the vectors, the embeddings and the output head, as Muon's authors recommend. Muon's step is scaled to match AdamW's
(`match_rms_adamw`, arXiv:2502.16982), so that both share one learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

# Usual names of output heads: like embeddings they are matrices, but their rows are classes.
_HEADS = ("lm_head", "output_projection", "embed_out")


def parameters_for_adamw(model: nn.Module | None) -> list[nn.Parameter]:
    """Return the matrices of `model` that Muon should not update: embeddings and output heads."""
    if model is None:
        return []
    return [
        parameter
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or name.rpartition(".")[2] in _HEADS
        for parameter in module.parameters(recurse=False)
    ]


class MuonAdamW(Optimizer):
    """torch's Muon and AdamW over one list of parameter groups; each group's "algorithm" names its optimizer.

    Args:
        params: parameters, or groups of them; a group with matrices and other parameters is split.
        lr, weight_decay: settings of both; the decay is per optimizer step.
        momentum, nesterov, ns_steps: settings of Muon; `ns_steps` counts Newton-Schulz iterations.
        betas, eps: settings of AdamW.
        for_adamw: matrices that AdamW updates all the same.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        for_adamw: Iterable[nn.Parameter] = (),
    ) -> None:
        # By id, because `in` on a list of tensors compares their values.
        plain = {id(parameter) for parameter in for_adamw}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        groups = []
        for given in _as_groups(params):
            both = {"lr": lr, "weight_decay": weight_decay, **given}
            matrices = [each for each in given["params"] if each.ndim == 2 and id(each) not in plain]
            rest = [each for each in given["params"] if each.ndim != 2 or id(each) in plain]
            if matrices:
                groups.append({**both, **muon, "params": matrices, "algorithm": "muon"})
            if rest:
                groups.append({**both, "betas": betas, "eps": eps, "params": rest, "algorithm": "adamw"})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._bind()

    def _bind(self) -> None:
        # The inner optimizers share our groups and state: with copies a schedule or a loaded state would miss them.
        classes = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        self._inner: list[Optimizer] = []
        for algorithm, cls in classes.items():
            groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            if groups:
                inner: Optimizer = cls(groups)
                inner.state = self.state
                self._inner.append(inner)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` ends here too, with new groups.
        super().__setstate__(state)
        self._bind()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.state = self.state  # `load_state_dict` replaces ours
            inner.step()
        return loss


def _as_groups(params: Any) -> list[dict[str, Any]]:
    items = list(params)
    if items and isinstance(items[0], dict):
        return [{**group, "params": list(group["params"])} for group in items]
    return [{"params": items}]
