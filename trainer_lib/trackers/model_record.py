"""`ModelRecord`: what MLflow records of a trained model whose weights stay on the storage. Imports no mlflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_lib.data.column import Column

DIGEST_TAG = "trainflow.model_digest"
FOLDER = "trainflow"
"""The folder of our files among a logged model's artifacts."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model as a LoggedModel of MLflow: a few kilobytes that name the weights by address and SHA-256.

    Attributes:
        name: its name; several models may have one.
        digest: SHA-256 of all that decides its predictions: a run has one LoggedModel of it.
        step: optimizer step.
        columns: column of a row -> its type (`float32[8,8]`): the signature. Labels are left out.
        params, tags: what MLflow shows beside it.
    """

    name: str
    digest: str
    step: int
    columns: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def all_tags(self) -> dict[str, str]:
        """The tags, with the digest by which the model is found again."""
        return {**self.tags, DIGEST_TAG: self.digest}


def example_row(columns: dict[str, str]) -> dict[str, Any]:
    """A row of the right types, with zeros: an input example that shows nothing of the data."""
    return {name: _example(kind) for name, kind in columns.items()}


def _example(text: str) -> Any:
    column = Column.parse(text)
    if column.kind in ("string", "bytes"):
        return "text" if column.kind == "string" else b""
    value: Any = False if column.dtype == "bool" else 0.0 if column.dtype.startswith("float") else 0
    for length in reversed((1,) if column.kind == "list" else column.shape):
        value = [value] * length
    return value
