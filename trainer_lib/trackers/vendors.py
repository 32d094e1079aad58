"""One callback per name that `report_to` takes, under the class name the reference has for it.

Our own trackers serve jsonl, mlflow, tensorboard and wandb. Every other name is a row of the table of vendors: the
callback that transformers ships serves it, when its package and transformers are installed. A guard logs the first
exception of such a callback and then stops calling it. A name whose package is missing is refused when the Trainer is
built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from typing_extensions import override

from trainer_lib.callbacks.base import EVENTS, TrainerCallback
from trainer_lib.errors import MissingExtraError, first_line
from trainer_lib.trackers import base as trackers
from trainer_lib.trackers.callback import TrackingCallback

_log = logging.getLogger(__name__)


class ReporterCallback(TrackingCallback):
    """A tracker of `trainer_lib.trackers`, made as soon as the arguments are known."""

    reporter: ClassVar[str]

    def __init__(self) -> None:
        trackers.require_package(self.reporter)
        super().__init__([])
        self._made_here = False  # from the arguments, not by the user

    @override
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Made here and not with the first log: a tracker that cannot be made is an error before the first step.
        if state.is_world_process_zero:
            self._prepare(args)

    @override
    def _prepare(self, args: Any) -> None:
        if not self.trackers:
            where: dict[str, Any] = {"logging_dir": args.logging_dir, "project": args.project}
            self.trackers = trackers.create_trackers(self.reporter, args.output_dir, **where)
            self._made_here = True

    @contextlib.contextmanager
    def another_run(self) -> Iterator[None]:
        """Give a run inside this one, such as a trial of a search, trackers of its own, made from its arguments."""
        kept = self.trackers, self._started
        if self._made_here:
            self.trackers, self._started = [], False
        try:
            yield
        finally:
            self.trackers, self._started = kept


class JsonlCallback(ReporterCallback):
    """Writes `metrics.jsonl` in output_dir."""

    reporter = "jsonl"


class MLflowCallback(ReporterCallback):
    """Logs to MLflow through `trackers.mlflow`."""

    reporter = "mlflow"


class TensorBoardCallback(ReporterCallback):
    """Writes TensorBoard's event files, or into a `tb_writer` (a SummaryWriter) of your own, which stays open."""

    reporter = "tensorboard"

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__()
        if tb_writer is not None:
            from trainer_lib.trackers.tensorboard import TensorBoardTracker

            self.trackers = [TensorBoardTracker(None, writer=tb_writer)]

    @property
    def tb_writer(self) -> Any:
        """The `SummaryWriter` in use, for subclasses that write images or texts; None when there is none."""
        return getattr(next(iter(self.trackers), None), "writer", None)


class WandbCallback(ReporterCallback):
    """Logs to Weights & Biases. Subclasses find what they know of transformers' callback: `_wandb` and `setup`."""

    reporter = "wandb"
    _resume_step = 0

    @property
    def _wandb(self) -> Any:
        return importlib.import_module("wandb")

    @property
    def _initialized(self) -> bool:
        return self._started

    @_initialized.setter
    def _initialized(self, value: bool) -> None:
        """Do nothing: an override of `setup` says so, and the run that it has opened is joined all the same."""

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Open a run of wandb, or join the one that is open. An override may open another one."""
        super()._start(args, state, resume_step=self._resume_step, model=model)

    @override
    def _start(self, args: Any, state: Any, *, resume_step: int, model: Any) -> None:
        self._resume_step, self._started = resume_step, False
        self.setup(args, state, model)
        if not self._started:
            super()._start(args, state, resume_step=resume_step, model=model)

    @override
    def on_log(  # type: ignore[override]  # transformers' order, for code that calls it by position
        self, args: Any, state: Any, control: Any, model: Any = None, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().on_log(args, state, control, logs=logs, model=model, **kwargs)


class VendorCallback(TrainerCallback):
    """Calls the callback that transformers has for a tracker, guarded.

    Attributes:
        title: the product's name.
        reporter: the name in `report_to`.
        package: the package that must be installed besides transformers.
        environment: a variable that the tracker's own launcher sets; None when there is none.
    """

    title: ClassVar[str]
    reporter: ClassVar[str]
    package: ClassVar[str]
    environment: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.require_package()
        # Loaded here: the package behind it may take seconds to import. From the module that defines it, because
        # `trainer_lib.install` puts ours in place of the name that others import.
        theirs = getattr(importlib.import_module("transformers.integrations.integration_utils"), type(self).__name__)
        self._theirs: Any = theirs()
        # Only the events that it handles: the handler of events skips a callback without the method.
        for event in EVENTS:
            if callable(getattr(self._theirs, event, None)):
                setattr(self, event, self._guarded(event))

    def __getattr__(self, name: str) -> Any:
        # Such as CodeCarbon's `tracker`, which model cards of other libraries read.
        theirs = self.__dict__.get("_theirs")
        if theirs is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(theirs, name)

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether this process can use the tracker. Neither its package nor transformers is imported."""
        return not cls._missing() and cls._is_launched()

    @classmethod
    def _missing(cls) -> list[str]:
        return [name for name in ("transformers", cls.package) if importlib.util.find_spec(name) is None]

    @classmethod
    def _is_launched(cls) -> bool:
        return cls.environment is None or cls.environment in os.environ

    @classmethod
    def require_package(cls) -> None:
        """Raise MissingExtraError when a package that it needs, or the launcher that it needs, is not there."""
        elsewhere = "report to jsonl, mlflow or tensorboard."
        if missing := cls._missing():
            raise MissingExtraError(
                f"This tracker needs {' and '.join(missing)}, not installed here.",
                field="report_to",
                value=cls.reporter,
                remedy=f"Install it (pip install {' '.join(missing)}), or {elsewhere}",
            )
        if not cls._is_launched():
            raise MissingExtraError(
                f"This tracker needs {cls.title}, whose controller sets {cls.environment}.",
                field="report_to",
                value=cls.reporter,
                remedy=f"Start the training there, or {elsewhere}",
            )

    def _guarded(self, event: str) -> Callable[..., None]:
        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._theirs is None:
                return
            try:
                getattr(self._theirs, event)(args, state, control, **kwargs)
            except Exception as error:  # a tracking client must not end training, whatever it raises
                self._theirs = None
                reason = first_line(error)
                _log.warning("Nothing more is reported to %s: %s", self.reporter, reason)

        return call


def _vendor(name: str, title: str, reporter: str, package: str, environment: str | None = None) -> type[VendorCallback]:
    """The callback class `name`, which transformers has under the same name."""
    facts = {"title": title, "reporter": reporter, "package": package, "environment": environment}
    return type(name, (VendorCallback,), {**facts, "__doc__": f"Logs to {title}.", "__module__": __name__})


# The table of vendors: a new one is a row here, a name in `validation.REPORTERS` and one in `trainer_lib`.
AzureMLCallback = _vendor("AzureMLCallback", "Azure Machine Learning", "azure_ml", "azureml")
ClearMLCallback = _vendor("ClearMLCallback", "ClearML", "clearml", "clearml")
CodeCarbonCallback = _vendor("CodeCarbonCallback", "CodeCarbon", "codecarbon", "codecarbon")
CometCallback = _vendor("CometCallback", "Comet", "comet_ml", "comet_ml")
DVCLiveCallback = _vendor("DVCLiveCallback", "DVCLive", "dvclive", "dvclive")
DagsHubCallback = _vendor("DagsHubCallback", "DagsHub", "dagshub", "dagshub")
FlyteCallback = _vendor("FlyteCallback", "Flyte", "flyte", "flytekit")
KubeflowCallback = _vendor(
    "KubeflowCallback", "Kubeflow Trainer", "kubeflow", "transformers", environment="KUBEFLOW_TRAINER_SERVER_URL"
)
NeptuneCallback = _vendor("NeptuneCallback", "Neptune", "neptune", "neptune")
SwanLabCallback = _vendor("SwanLabCallback", "SwanLab", "swanlab", "swanlab")
TrackioCallback = _vendor("TrackioCallback", "Trackio", "trackio", "trackio")

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
    """Return the callback classes behind the names of `report_to` (as the arguments hold it), each once.

    Raises:
        MissingExtraError: the package of a name is not installed. "all" leaves such names out instead.
    """
    found: list[type[ReporterCallback | VendorCallback]] = []
    for name in report_to:
        if name == "all":
            found += [OURS[one] for one in OURS if trackers.is_installed(one)]
            found += [cls for cls in VENDORS.values() if cls.is_installed()]
        # Ours first: transformers has callbacks of these names as well.
        elif name in OURS:
            trackers.require_package(name)
            found.append(OURS[name])
        else:
            VENDORS[name].require_package()
            found.append(VENDORS[name])
    return list(dict.fromkeys(found))
