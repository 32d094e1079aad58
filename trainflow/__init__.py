"""trainflow from Python: the commands of the terminal as objects. Importing it imports neither Prefect nor torch.

    import trainflow

    spec = trainflow.Spec.load("pipeline.yaml", "train.args.learning_rate=1e-3")
    run = spec.run()
    run.metrics
    run.load_model().predict([{"image": image}])

Stages for flows of your own are in `trainflow.tasks`, the Trainer is in `trainer_lib`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_lib.errors import TrainflowError
    from trainer_lib.model_folder.loaded import load_model
    from trainflow.recorded_run import Run, Runs, runs
    from trainflow.specification import Spec, Sweep

# Written out, because looking into a module would import it.
_NAMES = {
    "Run": "trainflow.recorded_run",
    "Runs": "trainflow.recorded_run",
    "Spec": "trainflow.specification",
    "Sweep": "trainflow.specification",
    "TrainflowError": "trainer_lib.errors",
    "load_model": "trainer_lib.model_folder.loaded",
    "runs": "trainflow.recorded_run",
}

__all__ = ["Run", "Runs", "Spec", "Sweep", "TrainflowError", "load_model", "runs"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
