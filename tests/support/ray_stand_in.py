"""Stands in for the package ray: a cluster in this process, whose agents answer what a test says.

It has the calls that `trainer_lib.engines.ray` makes, and exceptions with what Ray's have: a text, `preempted`,
`actor_init_failed`, `cause`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

NEVER = object()
"""The answer of an agent that does not answer."""


class RayError(Exception):
    cause: BaseException | None = None


class RayTaskError(RayError): ...


class RayActorError(RayError):
    preempted = actor_init_failed = False


class ActorDiedError(RayActorError): ...


class ActorUnavailableError(RayActorError): ...


class NodeDiedError(RayError): ...


class OutOfMemoryError(RayError): ...


class RuntimeEnvSetupError(RayError): ...


class ActorUnschedulableError(RayError): ...


class GetTimeoutError(RayError, TimeoutError): ...


_EXCEPTIONS: tuple[type[RayError], ...] = (RayError, *RayError.__subclasses__(), *RayActorError.__subclasses__())


def made(cls: type[RayError], text: str, **attributes: Any) -> RayError:
    """Return an exception with attributes that Ray's has."""
    error = cls(text)
    vars(error).update(attributes)
    return error


@dataclass
class Machine:
    """A machine of the cluster with its agent; `answers` has what its methods return or raise, or `NEVER`."""

    number: int
    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 2.0})
    answers: dict[str, Any] = field(default_factory=dict)
    alive: bool = True
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"10.0.0.{self.number + 1}"

    def called(self, method: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.calls if name == method]

    def answer(self, method: str) -> Any:
        """Return what a method answers; most of them have nothing to say."""
        usual: dict[str, Any] = {
            "describe": {"host": self.host, "node": f"node-{self.number}", "seen": True},
            "read": {"lines": [], "code": None},
        }
        return self.answers.get(method, usual.get(method, {}))


class FakeRay(types.ModuleType):
    def __init__(self, *machines: Machine) -> None:
        super().__init__("ray")
        self.machines = machines
        self.exceptions = types.SimpleNamespace(**{cls.__name__: cls for cls in _EXCEPTIONS})
        group = {"placement_group": self._placement_group, "remove_placement_group": lambda _: None}
        self.util = _module("ray.util", **group)
        self.draining: dict[str, int] = {}
        self.init_error: BaseException | None = None
        self.group_answer: Any = None
        self.usage_statistics = ""
        self.waits: list[tuple[int, float]] = []
        self.options: list[dict[str, Any]] = []
        self.crossed: list[object] = []
        self.killed = 0
        self._is_initialized = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have it imported in place of the package, whether that is installed or not."""
        strategy = {"PlacementGroupSchedulingStrategy": lambda _, index: index}
        state = types.SimpleNamespace(get_draining_nodes=lambda: self.draining)
        modules = {"ray": self, "ray.util": self.util, "ray._private": _module("ray._private")}
        modules["ray.util.scheduling_strategies"] = _module("ray.util.scheduling_strategies", **strategy)
        modules["ray._private.state"] = _module("ray._private.state", state=state)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.60.0" if name == "ray" else version(name))

    def init(self, address: str, **settings: Any) -> None:
        self.usage_statistics = os.environ.get("RAY_USAGE_STATS_ENABLED", "unset")
        self.address, self.settings = address, settings
        if self.init_error is not None:
            raise self.init_error
        self._is_initialized = True

    def is_initialized(self) -> bool:
        return self._is_initialized

    def shutdown(self) -> None:
        self._is_initialized = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": f"node-{machine.number}", "Alive": machine.alive, "Resources": machine.resources}
            for machine in self.machines
        ]

    def remote(self, cls: type) -> Any:
        """Return what starts an actor on the machine that its options name."""

        def options(*, scheduling_strategy: int, **given: Any) -> Any:
            self.options.append(given)
            return types.SimpleNamespace(remote=lambda: _Handle(self, cls, self.machines[scheduling_strategy]))

        return types.SimpleNamespace(options=options)

    def kill(self, _: Any) -> None:
        self.killed += 1

    def wait(self, calls: Sequence[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        self.waits.append((len(calls), timeout))
        ready = [call for call in calls if call.answer is not NEVER]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Any, *, timeout: float | None = None) -> Any:
        if call.answer is NEVER:
            raise GetTimeoutError("Get timed out: some object(s) not ready.")
        if isinstance(call.answer, BaseException):
            raise call.answer
        return call.answer

    def _placement_group(self, bundles: Sequence[dict[str, float]], *, strategy: str) -> Any:
        self.bundles, self.strategy = bundles, strategy
        return types.SimpleNamespace(ready=lambda: _Call(self.group_answer))


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module


@dataclass(eq=False)
class _Call:
    answer: Any


class _Handle:
    """An actor: every method takes one text and answers with another."""

    def __init__(self, cluster: FakeRay, cls: type, machine: Machine) -> None:
        self._cluster, self._class, self._machine = cluster, cls, machine

    def __getattr__(self, method: str) -> Any:
        assert callable(getattr(self._class, method))

        def remote(*arguments: Any) -> Any:
            self._cluster.crossed += arguments
            self._machine.calls.append((method, json.loads(arguments[0])))
            answer = self._machine.answer(method)
            has_answered = answer is not NEVER and not isinstance(answer, BaseException)
            return _Call(json.dumps(answer) if has_answered else answer)

        return types.SimpleNamespace(remote=remote)
