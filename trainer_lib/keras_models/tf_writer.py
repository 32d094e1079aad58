"""A writer of TensorFlow's summaries with the methods of torch's `SummaryWriter`."""

from __future__ import annotations

import importlib
from typing import Any

from trainer_lib.errors import ConfigError


class SummaryWriter:
    """Writes to a `tf.summary.SummaryWriter`, which stays open."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._summary: Any = importlib.import_module("tensorflow").summary  # imported already: it made the writer

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a number of one step."""
        with self._writer.as_default():
            self._summary.scalar(name, value, step=step)

    def add_text(self, name: str, text: str) -> None:
        """Write a text."""
        with self._writer.as_default():
            self._summary.text(name, text, step=0)

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()


def adopt_writer(writer: Any) -> Any:
    """A writer with the methods of torch's; one of TensorFlow is wrapped. Raises ConfigError for anything else."""
    if callable(getattr(writer, "add_scalar", None)):
        return writer
    if callable(getattr(writer, "as_default", None)):
        return SummaryWriter(writer)
    raise ConfigError(
        "It has neither add_scalar() nor as_default().",
        field="tb_writer",
        value=type(writer).__name__,
        remedy="Give a SummaryWriter of torch or of TensorFlow.",
    )
