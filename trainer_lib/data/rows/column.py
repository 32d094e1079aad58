"""`Column`: the type of a column of rows, and its text. Imports neither NumPy nor pyarrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXT = "string"
LABELS = ("label", "label_ids", "labels")
"""Columns that hold labels whatever the model: the default collator turns the first two into `labels`."""


@dataclass(frozen=True)
class Column:
    """The type of a column."""

    kind: str  # "scalar", "string", "bytes", "list" (``[n]``, any n) or "array" (fixed shape)
    dtype: str = ""  # NumPy name of the elements' type, "string" for a list of texts; empty for text and bytes
    shape: tuple[int, ...] = ()  # shape of an "array"; empty for other kinds

    def __str__(self) -> str:
        """The type as text: ``float32[8,8]``, ``int64[*]``, ``string[*]``, ``string``."""
        if self.kind == "list":
            return f"{self.dtype}[*]"
        if self.kind == "array":
            return f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return self.dtype or self.kind

    @property
    def has_texts(self) -> bool:
        """Whether a value is a list of texts."""
        return self.dtype == TEXT

    def example(self) -> Any:
        """A value of this type, zeros and "text": it shows nothing of the data."""
        if self.kind in ("string", "bytes"):
            return "text" if self.kind == "string" else b""
        value: Any = {"string": "text", "bool": False}.get(self.dtype, 0.0 if self.dtype.startswith("float") else 0)
        for length in reversed((1,) if self.kind == "list" else self.shape):
            value = [value] * length
        return value

    @classmethod
    def parse(cls, text: str) -> Column:
        """The column whose text this is; the inverse of `str`."""
        dtype, bracket, inside = text.removesuffix("]").partition("[")
        if bracket:
            return cls("list", dtype) if inside == "*" else cls("array", dtype, tuple(map(int, inside.split(","))))
        return cls(text) if text in ("string", "bytes") else cls("scalar", text)
