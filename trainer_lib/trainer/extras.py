"""Tensors in a training's state that belong to neither the model nor the optimizer, saved bit for bit without pickle.

Callbacks may keep some (an average of the weights), and `past_index` keeps what the model remembers of the last batch,
on each rank its own. JSON values stay in the JSON files; a tensor among them is replaced by a reference, and is written
to the rank's ``extra/rank-00000.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpoint.values import from_json, to_json
from trainer_lib.errors import DamagedError


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors, ``[...]`` of any shape, are added to `tensors` under names that start with `name`.

    Raises:
        ConfigError: it holds what is neither JSON, nor a tuple, nor a tensor.
    """

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        tensors[key] = tensor.detach()
        # "own" is the device of the process, which may be another one on resume.
        return {"__tensor__": key, "device": "cpu" if tensor.device.type == "cpu" else "own"}

    return to_json(value, name, keep)


def decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The value that `encoded` received; its tensors ``[...]`` are on the CPU if they were, else on `device`.

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
