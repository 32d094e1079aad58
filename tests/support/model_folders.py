"""A published model without a pipeline: a folder that `load_model` takes, made in milliseconds."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from tests.support.toy import RECIPE
from trainer_lib.model_folder import loaded as loaded_models
from trainer_lib.model_folder.description import FILE, ModelDescription
from trainer_lib.storage import FileEntry


def publish_line(folder: Path, *, slope: float = 2.0, recipe: str = RECIPE, info: dict[str, Any] | None = None) -> str:
    """Write the model of the toy project, y = slope · x, into `folder`; return the SHA-256 of its code."""
    import torch
    from safetensors.torch import save

    tensors = {"linear.weight": torch.tensor([[slope]]), "linear.bias": torch.zeros(1)}
    contents = {"model.safetensors": save(tensors), "code/recipe.py": recipe.encode()}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    weights, code = (
        FileEntry(path.rpartition("/")[2], len(content), hashlib.sha256(content).hexdigest())
        for path, content in contents.items()
    )
    description = ModelDescription(
        name="toy",
        recipe="recipe.py",
        code=(code,),
        weights=(weights,),
        args={"use_cpu": True, "per_device_eval_batch_size": 8},
        info=info or {},
        rows={"train": 64, "test": 16},
        columns={"row_id": "int64", "x": "float64[*]", "labels": "float64[*]"},
    )
    (folder / FILE).write_bytes(description.to_json())
    return description.code_digest


def remove_fetched_code() -> None:
    """Remove the private copies of models' code now; a process does it when it ends."""
    while loaded_models._FETCHED:
        shutil.rmtree(loaded_models._FETCHED.popitem()[1])
