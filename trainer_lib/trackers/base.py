"""The protocol of a tracker, and the table from a name of `report_to` to the tracker that serves it.

A tracker stores numbers. It must never slow training down and never end it: `log` neither waits for a network nor
raises. Trackers get plain floats; `numbers_only` makes them from what a Trainer logs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError, MissingExtraError


class Tracker(Protocol):
    """One destination of metrics."""

    name: str

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Begin an attempt at training.

        Args:
            run_name: the run's name; None lets the tracker choose one.
            params: the arguments and the model's configuration, secrets included: mask them (`params.flatten_params`).
            resume_step: the optimizer step that training continues from; 0 for a new training.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the values of one optimizer step. Returns at once and never raises. Usable again after `close`."""

    def close(self, status: str = "FINISHED") -> None:
        """End the attempt as "FINISHED", "FAILED" or "KILLED", after waiting a bounded time for the last values."""


@dataclass(frozen=True)
class Destination:
    """Where a tracker may keep files, and the project that it belongs to.

    Attributes:
        output_dir: the run's folder, a path or any fsspec URL.
        logging_dir: the folder of event files; output_dir/runs when not given.
        project: the project, for trackers that have projects.
    """

    output_dir: str | None
    logging_dir: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class _Row:
    """How one tracker is made.

    Attributes:
        create: makes it. Imports its module only then, and with it the vendor's package.
        package: the package that it needs and a plain installation lacks.
    """

    create: Callable[[Destination], Tracker]
    package: str | None = None


def _create_jsonl(place: Destination) -> Tracker:
    from trainer_lib.trackers.jsonl import JsonlTracker

    if not place.output_dir:
        raise ConfigError(
            'The "jsonl" tracker writes into output_dir, which is not set.',
            field="output_dir",
            remedy="Set output_dir.",
        )
    return JsonlTracker(place.output_dir)


def _create_mlflow(place: Destination) -> Tracker:
    from trainer_lib.trackers.mlflow import MLflowTracker

    return MLflowTracker(place.output_dir)


def _create_tensorboard(place: Destination) -> Tracker:
    from trainer_lib.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(place.logging_dir or f"{(place.output_dir or '.').rstrip('/')}/runs")


def _create_wandb(place: Destination) -> Tracker:
    from trainer_lib.trackers.wandb import WandbTracker

    return WandbTracker(place.project, place.logging_dir)


# A tracker is a file in this package, a row here, a callback in `vendors` and a name in `validation.REPORTERS`.
_TABLE = {
    "jsonl": _Row(_create_jsonl),
    "mlflow": _Row(_create_mlflow),
    "tensorboard": _Row(_create_tensorboard, package="tensorboard"),
    "wandb": _Row(_create_wandb, package="wandb"),
}
TRACKERS = tuple(_TABLE)


def tracker_names(report_to: str | Iterable[str] | None) -> list[str]:
    """Return the checked names of a `report_to` argument, each once.

    "none" and None stand for no tracker, "all" for every tracker whose package is installed.

    Raises:
        ConfigError: no tracker has the name.
        MissingExtraError: the package of a tracker is not installed.
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names: list[str] = []
    for name in given:
        if name == "none":
            continue
        for one in filter(is_installed, TRACKERS) if name == "all" else (name,):
            if one not in TRACKERS:
                near = nearest(one, TRACKERS)
                raise ConfigError(
                    "No tracker has this name.",
                    field="report_to",
                    value=one,
                    remedy=f"Did you mean {near!r}?" if near else f"Choose from none, all, {', '.join(TRACKERS)}.",
                )
            if one not in names:
                names.append(one)
    for name in names:
        require_package(name)
    return names


def is_installed(name: str) -> bool:
    """Return whether the package behind one of our trackers is installed. It is not imported."""
    package = _TABLE[name].package if name in _TABLE else None
    return package is None or importlib.util.find_spec(package) is not None


def require_package(name: str) -> None:
    """Raise MissingExtraError when the package behind one of our trackers is not installed."""
    if is_installed(name):
        return
    package = _TABLE[name].package
    raise MissingExtraError(
        f"This tracker needs the package {package}, which is not installed.",
        field="report_to",
        value=name,
        remedy=f"Install it (pip install {package}), or report to jsonl or mlflow.",
    )


def create_trackers(
    report_to: str | Iterable[str] | None,
    output_dir: str | None,
    *,
    logging_dir: str | None = None,
    project: str | None = None,
) -> list[Tracker]:
    """Make the trackers that `report_to` names.

    Args:
        report_to: names, as `tracker_names` reads them.
        output_dir: the run's folder, a path or any fsspec URL, where trackers may keep files.
        logging_dir: the folder of event files; output_dir/runs when not given.
        project: the project, for trackers that have projects.

    Raises:
        ConfigError: no tracker has a name, or a tracker writes into `output_dir` and there is none.
        MissingExtraError: the package of a tracker is not installed.
    """
    place = Destination(output_dir, logging_dir, project)
    return [_TABLE[name].create(place) for name in tracker_names(report_to)]


def numbers_only(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a log that are numbers, as floats.

    Numbers are those of Python and NumPy, and arrays or tensors without dimensions. Text, lists and other values are
    left out. NaN and infinities stay, because a diverged loss is what a reader looks for.
    """
    numbers: dict[str, float] = {}
    # A text such as "0.5" would become a number, and an array of one value too.
    for key, value in logs.items():
        if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0 or not isinstance(value, SupportsFloat):
            continue
        try:
            numbers[key] = float(value)
        except OverflowError:  # a Python int beyond float's range
            numbers[key] = math.inf if value > 0 else -math.inf  # type: ignore[operator]
        except (TypeError, ValueError):
            continue
    return numbers
