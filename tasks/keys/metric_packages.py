"""The packages whose metrics an evaluation measures (`evaluate.metrics`): their versions count for its key."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from trainer_lib.base.metric_names import FIELD, MetricCall
from trainer_lib.errors import ConfigError

# Import name -> distribution. Others are looked up; that reads the records of everything that is installed.
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "torchmetrics": "torchmetrics", "evaluate": "evaluate"}


def metric_packages(calls: Iterable[MetricCall]) -> dict[str, str]:
    """Distribution -> version of each package that a metric is imported from; empty where all are trainflow's."""
    found: dict[str, str] = {}
    for top in {call.module.partition(".")[0] for call in calls if call.module is not None}:
        names = [_DISTRIBUTIONS[top]] if top in _DISTRIBUTIONS else sorted(set(_distributions().get(top, [top])))
        for name in names:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "not installed"
    return found


def refuse_project_modules(calls: Iterable[MetricCall], folders: Iterable[Path]) -> None:
    """Raise ConfigError for a metric of the project's own code, which no key of evaluate would follow.

    Args:
        folders: where imports of the project start.
    """
    places = list(folders)
    for call in calls:
        top = "" if call.module is None else call.module.partition(".")[0]
        if top and any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in places):
            raise ConfigError(
                "This module belongs to the project, and metrics by name are those of installed packages.",
                field=FIELD,
                value=call.name,
                remedy="Import it in the recipe, and call it in compute_metrics: then a changed one is measured again.",
            )


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {name: list(each) for name, each in metadata.packages_distributions().items()}
