"""`ModelRecord`: what MLflow records of a trained model whose weights stay on the storage. Imports no mlflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_lib.data.rows.column import Column

DIGEST_TAG = "trainflow.model_digest"
FOLDER = "trainflow"
"""The folder of our files among a logged model's artifacts."""
TYPES = {"bool": "boolean", "string": "string", "bytes": "binary", "binary": "binary"}
"""Types -> MLflow's. A number is as wide as JSON's: MLflow narrows none, and the model converts what it is given."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model as a LoggedModel of MLflow: a few kilobytes that name the weights by address and SHA-256.

    `digest` is of all that decides its predictions: a run has one LoggedModel of it. `columns` is the signature, types
    by column (`float32[8,8]`) without labels. Of a table, `required` columns may have any type that its files had.
    """

    name: str
    digest: str
    step: int
    columns: dict[str, str]
    required: tuple[str, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FlavorFile:
    """A file, as committed, that a flavor of MLflow needs at `path` among the artifacts: `name` in the URL `folder`."""

    path: str
    folder: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """A flavor of MLflow besides the reference to the weights: the model loads by a library's own functions.

    `config` is its section of the MLmodel file; `files` are what it needs, weights included.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    files: tuple[FlavorFile, ...] = ()


def nested(kind: str, depth: int) -> dict[str, Any]:
    """A type of MLflow's signatures inside so many arrays."""
    found: dict[str, Any] = {"type": kind}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def example_row(columns: dict[str, str]) -> dict[str, Any]:
    """A row of the right types, with zeros: an input example that shows nothing of the data."""
    return {name: _example(kind) for name, kind in columns.items()}


def _example(text: str) -> Any:
    column = Column.parse(text)
    if column.kind in ("string", "bytes"):
        return "text" if column.kind == "string" else b""
    value: Any = {"string": "text", "bool": False}.get(column.dtype, 0.0 if column.dtype.startswith("float") else 0)
    for length in reversed((1,) if column.kind == "list" else column.shape):
        value = [value] * length
    return value
