"""Tensors in a training's state that are neither the model's nor the optimizer's: without pickle, bit for bit.

Callbacks may keep some (an average of the weights), and `past_index` keeps what the model remembers of the last batch,
on every rank its own. What is JSON goes where it always went; a tensor in it is replaced by a reference, and goes to
the rank's ``extra/rank-00000.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpoint.values import from_json, to_json
from trainer_lib.errors import DamagedError


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors are added to `tensors`, under names that begin with `name`.

    Raises:
        ConfigError: it holds what is neither JSON, nor a tuple, nor a tensor.
    """

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        tensors[key] = tensor.detach()
        return {"__tensor__": key, "device": "cpu" if tensor.device.type == "cpu" else "own"}

    return to_json(value, name, keep)


def decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """What `encoded` was given, with those of its tensors that were not on the CPU on `device`.

    Raises:
        DamagedError: it refers to a tensor that is not there.
    """

    def find(reference: dict[str, Any]) -> Tensor:
        tensor = tensors.get(str(reference["__tensor__"]))
        if tensor is None:
            raise DamagedError(
                f"The tensor {reference['__tensor__']!r} is not in the checkpoint.", remedy="Use an earlier checkpoint."
            )
        return tensor.clone() if reference.get("device") == "cpu" else tensor.to(device, copy=True)

    return from_json(value, find)
