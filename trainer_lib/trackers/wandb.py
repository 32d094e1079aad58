"""The tracker for Weights & Biases. Its environment variables hold: WANDB_MODE=offline needs no server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import first_line
from trainer_lib.trackers.names import flatten_params, sectioned

_log = logging.getLogger(__name__)


class WandbTracker:
    """Logs scalars under `train/`, `eval/` and `test/` against `train/global_step`.

    A run that the program has opened itself (`wandb.init`) is used and stays open. A run that the tracker opens stays
    open after training for the evaluations that follow; it ends with the process, or when the next training starts.

    Args:
        project: the project; the variable WANDB_PROJECT overrides it.
        folder: wandb's folder for its files; the variable WANDB_DIR overrides it.
    """

    name = "wandb"

    def __init__(self, project: str | None, folder: str | None = None) -> None:
        self._project = os.environ.get("WANDB_PROJECT") or project
        self._folder = os.environ.get("WANDB_DIR") or folder
        self._run: Any = None
        self._own = False

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Open a run, or join the program's own. The variable WANDB_RUN_ID names a run to continue."""
        try:
            import wandb

            if self._own and self._run is not None:
                self._run.finish()
            # A run that the program has opened is not ours to end.
            self._own = wandb.run is None
            if self._own:
                # "allow", not "must": the run may not exist yet.
                resume = "allow" if os.environ.get("WANDB_RUN_ID") else None
                settings: dict[str, Any] = {"project": self._project, "name": run_name, "dir": self._folder}
                self._run = wandb.init(config=flatten_params(params), resume=resume, **settings)
            else:
                self._run = wandb.run
                self._run.config.update(flatten_params(params), allow_val_change=True)
            self._run.define_metric("train/global_step")
            self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        except Exception as error:  # a tracking client must not end training, whatever it raises
            self._give_up(error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass the values of one step to wandb, whose own process sends them."""
        if self._run is None:
            return
        try:
            self._run.log({**sectioned(metrics), "train/global_step": step})
        except Exception as error:
            self._give_up(error)

    def close(self, status: str = "FINISHED") -> None:
        """End our own run when training failed; a run that finished stays open for evaluations."""
        if self._run is None or not self._own or status == "FINISHED":
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=1)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        _log.warning("Metrics no longer go to Weights & Biases: %s", first_line(error))
