"""TensorBoard event files, in `logging_dir` or output_dir/runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.trackers.names import flatten_params, sectioned

_log = logging.getLogger(__name__)


class TensorBoardTracker:
    """Writes scalars under `train/`, `eval/` and `test/`, and the arguments as text.

    Args:
        folder: a local folder for the event files, because events are appended.
        writer: the caller's own `SummaryWriter`, which stays open; also the one in use, None before a start.

    Raises:
        ConfigError: the folder is on a remote store.
    """

    name = "tensorboard"

    def __init__(self, folder: str | None, *, writer: Any = None) -> None:
        self._own = writer is None
        self.writer = writer
        self._folder = ""
        if folder is not None:
            store = Store.open(folder, field="logging_dir")
            if not store.is_local:
                raise ConfigError(
                    "The folder is not local, and TensorBoard appends to its event files.",
                    field="logging_dir",
                    value=store.url,
                    remedy="Give logging_dir a local folder, or use the jsonl or mlflow tracker.",
                )
            self._folder = str(store.local_path())

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Open a new event file. After a resume TensorBoard hides the older points beyond `resume_step`."""
        try:
            self._open(purge_step=resume_step + 1 if resume_step else None)
            self.writer.add_text("args", "```\n" + json.dumps(flatten_params(params), indent=2) + "\n```")
        except OSError as error:
            _log.warning("Metrics no longer go to TensorBoard: %s cannot be written: %s", self._folder, error)
            self.writer = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the values of one step."""
        try:
            if self.writer is None:
                # Only a writer of the caller's own has no folder.
                if not self._folder:
                    return
                self._open(purge_step=None)
            for name, value in sectioned(metrics).items():
                self.writer.add_scalar(name, value, step)
        except OSError as error:
            _log.warning("A step's metrics are missing in TensorBoard: %s", error)

    def close(self, status: str = "FINISHED") -> None:
        """Write what is buffered; close a writer that is not the caller's."""
        if self.writer is None:
            return
        self.writer.flush()
        if self._own:
            self.writer.close()
            self.writer = None

    def _open(self, *, purge_step: int | None) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self._folder, purge_step=purge_step)
