"""The metrics of evaluated checkpoints on their way to the MLflow run of their training.

They are added as a worker of the training adds its own: to the spool beside the storage, from which a thread delivers
them. So a slow or dead server delays nothing, the run stays as its training opened and ended it, and a metric that the
run has at a step is not written twice.
"""

from __future__ import annotations

import logging
from pathlib import Path

from trainer_lib.trackers.names import group_log
from trainer_lib.trackers.params import clean_key
from trainer_lib.trackers.spool import Session
from trainflow.tasks.follow.evaluations import Evaluation
from trainflow.tasks.tracking.mlflow_run import Background
from trainflow.tasks.tracking.run_handle import RunHandle

# Where the training was: its own points have that.
_POSITION = {"epoch", "num_input_tokens_seen"}
_log = logging.getLogger(__name__)


class RunPoints:
    """The MLflow run of a training, as an evaluation beside it writes it. Only `close` waits for the server."""

    def __init__(self, handle: RunHandle) -> None:
        self.handle = handle
        self._session: Session | None = None
        self._background: Background | None = None

    def log(self, evaluation: Evaluation) -> bool:
        """Log the metrics at the checkpoint's step; False when the spool cannot be written (logged)."""
        measured = {name: value for name, value in evaluation.metrics.items() if name not in _POSITION}
        named = {clean_key(name): value for name, value in group_log(measured).items()}
        try:
            # With the time of the measurement: logged again, these are the very same points.
            self._open().write({"t": evaluation.measured_ms, "s": evaluation.step, "m": named, "once": "step"})
        except OSError as error:
            what = f"the evaluation of step {evaluation.step}"
            _log.warning("MLflow misses %s; the spool cannot be written: %s", what, error)
            return False
        return True

    def close(self) -> None:
        """Wait for the rest, as long as a stage does; what does not arrive stays in the spool."""
        if self._session is not None:
            self._session.close()
        if self._background is not None:
            self._background.close(stages=1)

    def _open(self) -> Session:
        # Only now: a command that logs nothing need not load MLflow's client.
        if self._session is None:
            handle, root = self.handle, Path(self.handle.spool_dir)
            # No "run_name": the run belongs to the process that trains.
            head = {"tracking_uri": handle.server, "token": handle.token, "experiment": handle.experiment}
            self._session = Session.create(root, head)
            self._background = Background(root, handle.tracking_uri)
        return self._session
