"""A published model without a pipeline: a folder that `load_model` takes, made in milliseconds."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.named_recipes import prepare_sources
from tests.support.toy import RECIPE
from trainer_lib.data.rows.columns import Schema
from trainer_lib.model_folder import loaded as loaded_models
from trainer_lib.model_folder.description import FILE, ModelDescription
from trainer_lib.storage import FileEntry

Splits = dict[str, list[Any]]


def publish_line(folder: Path, *, slope: float = 2.0, recipe: str = RECIPE, info: dict[str, Any] | None = None) -> str:
    """Write the model of the toy project, y = slope · x, into `folder`; return the SHA-256 of its code."""
    import torch
    from safetensors.torch import save

    tensors = {"linear.weight": torch.tensor([[slope]]), "linear.bias": torch.zeros(1)}
    return _write(
        folder,
        {"model.safetensors": save(tensors), "code/recipe.py": recipe.encode()},
        info=info or {},
        rows={"train": 64, "test": 16},
        columns={"row_id": "int64", "x": "float64[*]", "labels": "float64[*]"},
    )


def publish_recipe(folder: Path, name: str, source: Path, options: dict[str, Any], model: dict[str, Any]) -> Splits:
    """Write an untrained model of the recipe `name` into `folder`; return the rows that it prepared of a file."""
    import torch
    from safetensors.torch import save

    recipe, splits, data = prepare_sources(name, [str(source)], options, folder)
    torch.manual_seed(0)
    state = recipe.build_model(model, data).state_dict()
    # Of tied weights one.
    tensors = {tensor.data_ptr() or key: (key, tensor) for key, tensor in state.items()}
    code = f"from trainer_lib.recipes.{name.replace('-', '_')} import *\n"
    contents = {"model.safetensors": save(dict(tensors.values())), "code/recipe.py": code.encode()}
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assets = {path.relative_to(folder / "out").as_posix(): path.read_bytes() for path in files}
    columns = {key: str(column) for key, column in Schema.infer(splits["train"], "train").columns.items()}
    columns |= data.info.get("new_columns") or {}
    rows = {split: len(rows) for split, rows in splits.items()}
    _write(folder, contents | assets, info=data.info, rows=rows, columns=columns, model=model)
    return splits


def _write(folder: Path, contents: dict[str, bytes], **facts: Any) -> str:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    entries = [FileEntry(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in contents.items()]
    description = ModelDescription(
        name="toy",
        recipe="recipe.py",
        code=(replace(entries[1], path="recipe.py"),),
        weights=(entries[0],),
        assets=tuple(entries[2:]),
        args={"use_cpu": True, "per_device_eval_batch_size": 8},
        **facts,
    )
    (folder / FILE).write_bytes(description.to_json())
    return description.code_digest


@pytest.fixture(autouse=True)
def code_is_removed() -> Iterator[None]:
    """Remove the private copies of models' code after every test of the file; a process does it when it ends."""
    yield
    while loaded_models._FETCHED:
        shutil.rmtree(loaded_models._FETCHED.popitem()[1])
