"""`debug="underflow_overflow"`: training stops at the first non-finite value, and the modules before it are shown.

The weights, inputs and outputs of every module are checked in forward, which makes the host wait for the device at
every module: use it to find a fault, not to train.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainer_lib.errors import NonFiniteError
from trainer_lib.evaluation import nested

_log = logging.getLogger(__name__)
# As many as the reference shows.
FRAMES = 21  # modules that are shown, the faulty one included


@contextlib.contextmanager
def finite_or_stop(model: nn.Module) -> Iterator[None]:
    """Check every forward of `model` inside the block.

    Raises:
        NonFiniteError: a module has a NaN or an infinity among its weights, inputs or outputs; the error names the
            first one. `details` has the modules before it, oldest first, with least and greatest magnitudes.
    """
    frames: deque[str] = deque(maxlen=FRAMES)
    hooks = [
        module.register_forward_hook(_look(name or "the model", frames), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(name: str, frames: deque[str]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        parts: dict[str, list[torch.Tensor]] = {
            # Its own weights: the modules inside it have been looked at before it.
            "weights": [each.detach() for each in module.parameters(recurse=False)],
            "input": _floats([*args, *kwargs.values()]),
            "output": _floats(output),
        }
        lines, faulty = [f"{name} ({type(module).__name__})"], ""
        for what, tensors in parts.items():
            for tensor in tensors:
                low, high, finite = _magnitudes(tensor)
                lines.append(f"  {what:8} {low:9.2e} {high:9.2e}  {tuple(tensor.shape)}")
                faulty = faulty or ("" if finite else what)
        frames.append("\n".join(lines))
        if faulty:
            raise _found(name, module, faulty, frames)

    return hook


def _floats(tree: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    nested.map_tree(found.append, tree)
    return [leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _magnitudes(tensor: torch.Tensor) -> tuple[float, float, bool]:
    if not tensor.numel():
        return 0.0, 0.0, True
    low, high = (float(each) for each in tensor.float().abs().aminmax())
    return low, high, bool(torch.isfinite(tensor).all())


def _found(name: str, module: nn.Module, what: str, frames: deque[str]) -> NonFiniteError:
    shown = "least and greatest magnitude of every module before it, oldest first:\n" + "\n".join(frames)
    _log.error("%s of %s (%s) is not finite; %s", what, name, type(module).__name__, shown)
    return NonFiniteError(
        f"The first value that is not finite is in the {what} of {name} ({type(module).__name__}).",
        field="debug",
        value="underflow_overflow",
        remedy="Look at the modules before it in the log: where do magnitudes grow? bf16 has more range than fp16.",
        details=shown,
    )
