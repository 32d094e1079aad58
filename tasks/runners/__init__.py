"""A stage's workers as mapped tasks of Prefect, which run on the machines of a cluster. One kind of cluster, one file.

::

    stage task ── map ──▶ worker's task ── launch ──▶ guard ──▶ worker      on whichever machine has room
              ◀────────── the job's folder ───────────                      reports, and the owner's sign of life
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL

from trainer_lib.errors import ConfigError, first_line

_HERE = {"127.0.0.1", "localhost", "::1"}


class Cluster(ABC):
    """A cluster that is connected, and Prefect's runner for it, whose futures these are."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def map(self, work: Task[[int, str], State[Any]], texts: Sequence[str]) -> Sequence[Any]:
        """Map a task over texts and their numbers."""
        return list(self._runner.map(work, {"number": list(range(len(texts))), "text": list(texts)}))

    @abstractmethod
    def is_done(self, future: Any) -> bool:
        """Whether a task has ended, or was lost."""

    @abstractmethod
    def state(self, future: Any) -> State[Any]:
        """Return how a task has ended; raise what its cluster says where it was lost."""

    @abstractmethod
    def cancel(self, future: Any) -> None:
        """Take back a task that has not started."""


def require_api(hosts: Sequence[str]) -> None:
    """Raise ConfigError for `hosts`, other machines, where Prefect's API listens on this machine's loopback only."""
    if hosts and urlsplit(PREFECT_API_URL.value() or "http://localhost").hostname in _HERE:
        raise unreachable_api(hosts)


def unreachable_api(hosts: Sequence[str] = ()) -> ConfigError:
    """Return the error of machines, `hosts` where they are known, that do not reach Prefect's API."""
    where = f" from {', '.join(sorted(hosts)[:3])}" if hosts else ""
    what = f"Prefect's API cannot be reached{where}, and each worker of a runner is a task of Prefect."
    remedy = "Start a Prefect server that all machines reach, and set PREFECT_API_URL to it for this command."
    return ConfigError(what, field="PREFECT_API_URL", value=PREFECT_API_URL.value(), remedy=remedy)


@contextlib.contextmanager
def no_cluster(kind: str, address: str | None, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Inside the block, what a cluster's client raises while it connects becomes a typed error."""
    try:
        yield
    except errors as error:
        what = f"The {kind} cluster cannot be used: {first_line(error).rstrip('.')}."
        remedy = "Give the address of a cluster that runs, with the versions of Python and packages of this machine."
        raise ConfigError(what, field="prepare.runner.address", value=address or "unset", remedy=remedy) from error
