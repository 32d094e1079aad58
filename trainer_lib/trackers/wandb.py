"""Weights & Biases. Its own settings hold: WANDB_MODE=offline writes to WANDB_DIR and needs no server or key."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainer_lib.errors import first_line
from trainer_lib.trackers.params import flatten_params, sectioned

_log = logging.getLogger(__name__)


class WandbTracker:
    """Logs scalars under `train/`, `eval/` and `test/` against `train/global_step`.

    A run that the program has opened (`wandb.init`) is used, and left open. One of ours stays open after training, for
    evaluations that follow: wandb ends it when the process does, or the next training's begins.

    Args:
        project: WANDB_PROJECT overrides it.
        folder: where wandb keeps its files, unless WANDB_DIR says.
    """

    name = "wandb"

    def __init__(self, project: str | None, folder: str | None = None) -> None:
        self._project = os.environ.get("WANDB_PROJECT") or project
        self._folder = os.environ.get("WANDB_DIR") or folder
        self._run: Any = None
        self._own = False

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Open a run, or join the program's; WANDB_RUN_ID names one to go on with."""
        try:
            import wandb

            if self._own and self._run is not None:
                self._run.finish()
            self._own = wandb.run is None
            if self._own:
                resume = "allow" if os.environ.get("WANDB_RUN_ID") else None
                settings: dict[str, Any] = {"project": self._project, "name": run_name, "dir": self._folder}
                self._run = wandb.init(config=flatten_params(params), resume=resume, **settings)
            else:
                self._run = wandb.run
                self._run.config.update(flatten_params(params), allow_val_change=True)
            self._run.define_metric("train/global_step")
            self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        except Exception as error:  # whatever a tracking client raises must not end training
            self._give_up(error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the values of one step over; wandb's own process sends them."""
        if self._run is None:
            return
        try:
            self._run.log({**sectioned(metrics), "train/global_step": step})
        except Exception as error:
            self._give_up(error)

    def close(self, status: str = "FINISHED") -> None:
        """End our run when training failed."""
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
