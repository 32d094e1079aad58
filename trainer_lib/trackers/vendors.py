"""One callback per name that `report_to` takes, under the class name the reference has for it.

jsonl, mlflow, tensorboard and wandb are served by trackers of ours. Every other name is served by the callback that
transformers ships for its package, when both are installed, behind a guard: what a tracker raises is told once, and
that tracker is asked no more. A name whose package is missing is refused when the Trainer is built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from trainer_lib.callbacks.base import EVENTS, TrainerCallback
from trainer_lib.errors import MissingExtraError, first_line
from trainer_lib.trackers import base as trackers
from trainer_lib.trackers.callback import TrackingCallback

_log = logging.getLogger(__name__)
_INSIDE_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"


class ReporterCallback(TrackingCallback):
    """A tracker of ours, made when the arguments are known."""

    reporter: ClassVar[str]

    def __init__(self) -> None:
        trackers.demand(self.reporter)
        super().__init__([])
        self._made_here = False  # from the arguments, not by the user

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the tracker: what it cannot do is told before the first step."""
        if state.is_world_process_zero:
            self._prepare(args)

    def _prepare(self, args: Any) -> None:
        if not self.trackers:
            where: dict[str, Any] = {"logging_dir": args.logging_dir, "project": args.project}
            self.trackers = trackers.create_trackers(self.reporter, args.output_dir, **where)
            self._made_here = True

    @contextlib.contextmanager
    def another_run(self) -> Iterator[None]:
        """For a run inside this one, a search's trial: trackers of its own, made from its arguments."""
        kept = self.trackers, self._started
        if self._made_here:
            self.trackers, self._started = [], False
        try:
            yield
        finally:
            self.trackers, self._started = kept


class JsonlCallback(ReporterCallback):
    """metrics.jsonl in output_dir."""

    reporter = "jsonl"


class MLflowCallback(ReporterCallback):
    """MLflow; see `trackers.mlflow`."""

    reporter = "mlflow"


class TensorBoardCallback(ReporterCallback):
    """TensorBoard's event files; `tb_writer`: a SummaryWriter of one's own."""

    reporter = "tensorboard"

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__()
        if tb_writer is not None:
            from trainer_lib.trackers.tensorboard import TensorBoardTracker

            self.trackers = [TensorBoardTracker(None, writer=tb_writer)]


class WandbCallback(ReporterCallback):
    """Weights & Biases."""

    reporter = "wandb"


class VendorCallback(TrainerCallback):
    """The callback that transformers has for a tracker, guarded."""

    reporter: ClassVar[str]
    package: ClassVar[str]

    def __init__(self) -> None:
        self.demand()
        theirs = getattr(importlib.import_module("transformers.integrations"), type(self).__name__)
        self._theirs: Any = theirs()
        for event in EVENTS:
            if callable(getattr(self._theirs, event, None)):
                setattr(self, event, self._guarded(event))

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its package and transformers are there. Neither is imported."""
        return not cls._missing()

    @classmethod
    def _missing(cls) -> list[str]:
        return [name for name in ("transformers", cls.package) if importlib.util.find_spec(name) is None]

    @classmethod
    def demand(cls) -> None:
        """Raise MissingExtraError when its package, or transformers, is not installed."""
        if missing := cls._missing():
            raise MissingExtraError(
                f"needs {' and '.join(missing)}, not installed here.",
                field="report_to",
                value=cls.reporter,
                remedy=f"Install it (pip install {' '.join(missing)}), or report to jsonl, mlflow or tensorboard.",
            )

    def _guarded(self, event: str) -> Callable[..., None]:
        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._theirs is None:
                return
            try:
                getattr(self._theirs, event)(args, state, control, **kwargs)
            except Exception as error:  # whatever a tracking client raises must not end training
                self._theirs = None
                reason = first_line(error)
                _log.warning("Nothing more is reported to %s: %s", self.reporter, reason)

        return call


class AzureMLCallback(VendorCallback):
    """Azure Machine Learning."""

    reporter, package = "azure_ml", "azureml"


class ClearMLCallback(VendorCallback):
    """ClearML."""

    reporter, package = "clearml", "clearml"


class CodeCarbonCallback(VendorCallback):
    """CodeCarbon."""

    reporter, package = "codecarbon", "codecarbon"


class CometCallback(VendorCallback):
    """Comet."""

    reporter, package = "comet_ml", "comet_ml"


class DVCLiveCallback(VendorCallback):
    """DVCLive."""

    reporter, package = "dvclive", "dvclive"


class DagsHubCallback(VendorCallback):
    """DagsHub."""

    reporter, package = "dagshub", "dagshub"


class FlyteCallback(VendorCallback):
    """Flyte."""

    reporter, package = "flyte", "flytekit"


class KubeflowCallback(VendorCallback):
    """Kubeflow Trainer, whose controller sets KUBEFLOW_TRAINER_SERVER_URL."""

    reporter, package = "kubeflow", "transformers"

    @classmethod
    def _missing(cls) -> list[str]:
        return super()._missing() or ([] if _INSIDE_KUBEFLOW in os.environ else ["kubeflow"])

    @classmethod
    def demand(cls) -> None:
        """Raise MissingExtraError outside of Kubeflow Trainer."""
        if cls._missing() == ["kubeflow"]:
            raise MissingExtraError(
                f"needs Kubeflow Trainer, whose controller sets {_INSIDE_KUBEFLOW}.",
                field="report_to",
                value=cls.reporter,
                remedy="Start the training there, or report to jsonl, mlflow or tensorboard.",
            )
        super().demand()


class NeptuneCallback(VendorCallback):
    """Neptune."""

    reporter, package = "neptune", "neptune"


class SwanLabCallback(VendorCallback):
    """SwanLab."""

    reporter, package = "swanlab", "swanlab"


class TrackioCallback(VendorCallback):
    """Trackio."""

    reporter, package = "trackio", "trackio"


OURS: dict[str, type[ReporterCallback]] = {
    cls.reporter: cls for cls in (JsonlCallback, MLflowCallback, TensorBoardCallback, WandbCallback)
}
VENDORS: dict[str, type[VendorCallback]] = {
    cls.reporter: cls
    for cls in (
        *(AzureMLCallback, ClearMLCallback, CodeCarbonCallback, CometCallback, DVCLiveCallback, DagsHubCallback),
        *(FlyteCallback, KubeflowCallback, NeptuneCallback, SwanLabCallback, TrackioCallback),
    )
}


def reporters(report_to: Iterable[str]) -> list[type[ReporterCallback | VendorCallback]]:
    """The callbacks behind the names of `report_to` (as the arguments hold it), each once.

    Raises MissingExtraError for a name whose package is not installed; "all" leaves those out.
    """
    found: list[type[ReporterCallback | VendorCallback]] = []
    for name in report_to:
        if name == "all":
            found += [OURS[one] for one in OURS if trackers.is_installed(one)]
            found += [cls for cls in VENDORS.values() if cls.is_installed()]
        elif name in OURS:
            trackers.demand(name)
            found.append(OURS[name])
        else:
            VENDORS[name].demand()
            found.append(VENDORS[name])
    return list(dict.fromkeys(found))
