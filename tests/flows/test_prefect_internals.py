"""The undocumented names of Prefect stand in one file, and the installed version has them in the shape we use."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext, serialize_context
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.logging import configuration
from prefect.logging.handlers import APILogHandler, APILogWorker
from prefect.settings import PREFECT_SERVER_DATABASE_PASSWORD, temporary_settings

from tasks.prefect_internals import send_little
from tests.support import repository
from tests.support.repository import relative, sources, tree

HOME = "tasks/prefect_internals.py"
UNDOCUMENTED = {
    "prefect.events.clients",
    "prefect.events.worker",
    "prefect.logging.configuration",
    "prefect.logging.handlers",
}


def private_names(path: Path) -> Iterator[str]:
    """Private or undocumented names of Prefect that a file uses."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "prefect":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "prefect"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("prefect."):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if any(part.startswith("_") for part in name.split(".")) or name.startswith(tuple(UNDOCUMENTED)):
                yield name


def test_undocumented_names_of_prefect_stand_in_one_file() -> None:
    found = {relative(path) for path in sources() if any(private_names(path))}
    assert found == {HOME}


def test_the_installed_prefect_is_of_a_version_that_was_tried() -> None:
    declared = [Requirement(text) for text in repository.pyproject()["project"]["dependencies"]]
    [prefect] = [requirement for requirement in declared if requirement.name == "prefect"]
    assert prefect.specifier.contains(metadata.version("prefect"))


def test_the_undocumented_names_have_the_shape_that_is_used() -> None:
    import prefect.context

    replaced = inspect.signature(prefect.context._temporary_global_settings_context)
    assert list(replaced.parameters) == ["settings_context"]
    for worker in (EventsWorker, APILogWorker):
        assert "timeout" in inspect.signature(worker.drain_all).parameters
    assert list(inspect.signature(EventsWorker.set_client_override).parameters) == ["client_type", "client_kwargs"]
    assert "reconnection_attempts" in inspect.signature(PrefectEventsClient).parameters
    for name in ("_force_checkpoint", "_reconnect"):
        assert not inspect.signature(getattr(PrefectEventsClient, name)).parameters.keys() - {"self"}
    assert PrefectEventsClient()._unconfirmed_events == []
    assert isinstance(inspect.getattr_static(EventsWorker, "_instances"), dict)
    assert emit_events_to_cloud() is False
    assert issubclass(APILogHandler, logging.Handler)
    assert isinstance(configuration.PROCESS_LOGGING_CONFIG, dict)
    assert not inspect.signature(configuration.setup_logging).parameters.keys() - {"incremental"}


def test_tasks_on_other_machines_get_the_flow_runs_id_and_the_api_and_nothing_else(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @task(cache_policy=NO_CACHE)
    def stage(lock: Any) -> Any:
        running = FlowRunContext.get()
        assert running is not None
        assert running.flow_run is not None
        return send_little(serialize_context), str(running.flow_run.id)

    @flow
    def whole(note: str) -> Any:
        return stage(threading.Lock())  # which cannot be pickled

    pickle = importlib.import_module("cloudpickle").dumps
    with temporary_settings({PREFECT_SERVER_DATABASE_PASSWORD: "of-the-database"}):
        answer: Any = whole
        sent, run_id = answer("from-the-spec")
    data = pickle(sent)
    assert str(sent["flow_run_context"]["flow_run"]["id"]) == run_id
    assert sent["task_run_context"] == {}
    assert list(sent["settings_context"]["settings"]) == ["api"]
    assert sent["settings_context"]["settings"]["api"]["url"] == prefect_server
    assert b"from-the-spec" not in data
    assert b"of-the-database" not in data
