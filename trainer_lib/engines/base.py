"""The protocol of engines: four calls, made by the driver in a separate process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.launch.settings.config import LaunchConfig

_CLASSES = {"ray": "Ray", "slurm": "Slurm"}


@dataclass(frozen=True)
class Job:
    """A job for an engine: a request's record, and variables of the workers, of which some may be secrets.

    The `node_range` of the launch is the number of machines. `shared`: other jobs work on the same output.
    """

    request: Mapping[str, Any]
    config: LaunchConfig
    env: Mapping[str, str]
    shared: bool

    @property
    def output(self) -> str:
        """The URL of what the job makes."""
        return str(self.request.get("output", ""))

    @property
    def takes_gpus(self) -> bool:
        """Whether its workers take the GPUs that they see."""
        args = self.request.get("args")
        return isinstance(args, Mapping) and str(args.get("use_cpu", "")).lower() not in ("true", "1", "yes")

    def to_text(self) -> str:
        """Return what a member needs as JSON text, without the variables."""
        settings = {**asdict(self.config), "engine": None, "address": None, "engine_options": {}}
        return json.dumps({"request": dict(self.request), "config": settings, "shared": self.shared})


def no_gpus_asked(machines: int) -> ConfigError:
    """The workers would see no GPU of the machines that have some, and train on the CPU without a word."""
    what = f"{machines} machine(s) of the cluster have GPUs, and none is asked for, so the workers would see none."
    remedy = "Ask for those of each machine (engine_options.gpus=8), or train on the CPU (train.args.use_cpu=true)."
    return ConfigError(what, field="train.launch.engine_options.gpus", remedy=remedy)


@dataclass(frozen=True)
class Alive:
    """The machines wait or work; `doing` says so as a clause."""

    doing: str


@dataclass(frozen=True)
class Ended:
    """The leading member ended with an exit code; `tail` is what the engine wrote last."""

    code: int
    tail: str = ""


@dataclass(frozen=True)
class Lost:
    """The machines are gone: `failure` says why. `Preempted` where the cluster took them back."""

    failure: TrainflowError


State = Alive | Ended | Lost


class Engine(Protocol):
    """Places one job. Every call returns within seconds."""

    outlives_driver: bool
    """Whether what was placed continues without the driver, and `place` of another driver finds it."""
    restarts_workers: bool
    """Whether the leading member starts lost workers again; else the machines are placed again."""

    def place(self, job: Job) -> None:
        """Ask for the machines and have a member start on each, or take up what was placed for this job before.

        Raises:
            ConfigError: the cluster cannot offer what is asked for, or cannot be reached.
            InfrastructureError: it fails now.
        """

    def addresses(self) -> tuple[str, ...]:
        """Return the machines, the leading one first; empty while there are none."""

    def poll(self) -> tuple[list[str], State]:
        """Return the lines that the leading member has written since the last call, and the state."""

    def end(self, *, now: bool) -> None:
        """Ask the workers to save and end; with `now`, end everything at once, and free and remove what is left."""


def open_engine(name: str) -> Engine:
    """Return a new engine by its name; its module is imported here, and nowhere else."""
    module = importlib.import_module(f"trainer_lib.engines.{name}")
    engine: Engine = getattr(module, _CLASSES[name])()
    return engine
