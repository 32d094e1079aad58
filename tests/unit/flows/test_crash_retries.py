"""A run that crashes again and again ends, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flows.server import automations
from trainer_lib.errors import InfrastructureError


class States:
    def __init__(self, crashes: int) -> None:
        self._crashes = crashes

    def read_flow_run_states(self, _: object) -> list[Any]:
        once = ("Running", "Crashed", "CrashedAtWork", "AwaitingRetry")
        return [SimpleNamespace(name=name) for name in (*once * self._crashes, "Running")]


def enter_run(monkeypatch: pytest.MonkeyPatch, *, run_count: int, crashes: int) -> None:
    @contextlib.contextmanager
    def client(**_: object) -> Iterator[States]:
        yield States(crashes)

    context = SimpleNamespace(flow_run=SimpleNamespace(id="1", run_count=run_count))
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: context)
    monkeypatch.setattr("prefect.client.orchestration.get_client", client)


@pytest.mark.parametrize(("run_count", "crashes"), [(1, 0), (3, 2), (9, 1)])
def test_a_run_is_tried_as_often_as_it_may_crash(monkeypatch: pytest.MonkeyPatch, run_count: int, crashes: int) -> None:
    enter_run(monkeypatch, run_count=run_count, crashes=crashes)
    automations.require_another_try({automations.CRASHES: "2"})
    automations.require_another_try({})


def test_the_crash_after_the_last_try_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_run(monkeypatch, run_count=4, crashes=3)
    with pytest.raises(InfrastructureError, match="crashed 3 times"):
        automations.require_another_try({automations.CRASHES: "2"})
    # Without a limit nothing is counted: such a run was retried by hand.
    automations.require_another_try({})
