"""What each failure of Ray becomes, with a stand-in for it; `tests/services/test_ray.py` has a real cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_stand_in import (
    NEVER,
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    FakeRay,
    Machine,
    NodeDiedError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    made,
)
from tests.support.ray_stand_in import OutOfMemoryError as OutOfMemoryOfRay
from trainer_lib.engines import ray as ray_engine
from trainer_lib.engines.base import Alive, Ended, Job, Lost, State
from trainer_lib.engines.ray import Ray
from trainer_lib.errors import ConfigError, InfrastructureError, OutOfMemoryError, Preempted, TrainflowError
from trainer_lib.launch.settings.config import LaunchConfig

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: Agent\n"
STARTED = "The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.11.9\n"
OURS = "This process on node 10.0.0.9 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No waits, and the variables and the signal handler as they were."""
    monkeypatch.setattr(ray_engine, "LOOK_S", -1.0)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A cluster of two machines."""
    cluster = FakeRay(Machine(0), Machine(1))
    cluster.install(monkeypatch)
    return cluster


def placed(folder: Path, *, env: dict[str, str] | None = None, output: str | None = None, **config: Any) -> Ray:
    engine = Ray()
    given: dict[str, Any] = {"engine": "ray", "processes": 1, "nodes": 2, "join_timeout_s": 0.0, **config}
    request = {"output": output or str(folder / "out"), "args": {"use_cpu": True}}
    engine.place(Job(request, LaunchConfig(**given), env or {}, shared=False))
    return engine


def state_of(engine: Ray, polls: int = 20) -> State:
    """Poll until the machines are gone or have ended, or for a while."""
    state: State = Alive("")
    for _ in range(polls):
        state = engine.poll()[1]
        if not isinstance(state, Alive):
            break
    return state


def failure_of(engine: Ray) -> TrainflowError:
    state = state_of(engine)
    assert isinstance(state, Lost), state
    return state.failure


def running(folder: Path, **config: Any) -> Ray:
    """An engine whose machines work."""
    engine = placed(folder, **config)
    assert state_of(engine) == Alive("runs on 10.0.0.1, 10.0.0.2")
    return engine


LOST = "The machine 10.0.0.2 was lost: its agent does not answer."
CONTINUES, LEFT = "The same command continues.", "on the machines that are left."
LOW = "Task was killed due to the node running low on memory."
FULL = "Ray ended an agent for lack of memory: "
LESS = "Ask for more (engine_options.memory), or lower per_device_train_batch_size."
UNSCHEDULABLE = "The actor is not schedulable: its group was removed."
TASK = "ray::Agent.read() (pid=1)\n  Traceback …"
NO_ENVIRONMENT = made(RuntimeEnvSetupError, "Failed to set up runtime environment.\nNo module named pip")


@pytest.mark.parametrize(
    ("error", "expected", "message", "remedy"),
    [
        (made(OutOfMemoryOfRay, f"{LOW}\nMemory: 99 %"), OutOfMemoryError, f"{FULL}{LOW} Memory: 99 %", LESS),
        (made(ActorDiedError, f"{DIED}The actor died of memory pressure (OOM)."), OutOfMemoryError, FULL, LESS),
        (
            NO_ENVIRONMENT,
            ConfigError,
            "environment: Failed to set up runtime environment. No module named pip.",
            "Correct the runtime environment of the cluster's job.",
        ),
        (
            made(ActorDiedError, f"{DIED}The node was preempted.", preempted=True),
            Preempted,
            "The cluster took a machine back.",
            CONTINUES,
        ),
        (made(ActorDiedError, f"{DIED}Its node has died."), InfrastructureError, LOST, "continues from the last save"),
        (made(NodeDiedError, "Node node-1 is dead."), InfrastructureError, "The machine of an agent was lost", LEFT),
        (made(ActorUnschedulableError, UNSCHEDULABLE), InfrastructureError, f"Ray failed: {UNSCHEDULABLE}", CONTINUES),
        (
            made(RayTaskError, TASK, cause=OSError("No space left on device")),
            InfrastructureError,
            "Ray failed: No space left on device.",
            CONTINUES,
        ),
    ],
)
def test_what_an_error_of_ray_means(
    tmp_path: Path, two: FakeRay, error: RayError, expected: type[TrainflowError], message: str, remedy: str
) -> None:
    engine = running(tmp_path)
    two.machines[1].answers["read"] = error
    failure = failure_of(engine)
    assert type(failure) is expected
    assert message in failure.message
    assert failure.remedy is not None and remedy in failure.remedy
    assert failure.field == ("train.launch.nodes" if "was lost" in message else None)


@pytest.mark.parametrize("initialised", [True, False])
def test_a_machine_without_trainflow_is_not_a_lost_one(tmp_path: Path, two: FakeRay, initialised: bool) -> None:
    """Ray starts a stand-in for a class that a machine cannot import; it raises this in its first call, or in all."""
    reason = "ModuleNotFoundError: No module named 'trainer_lib'"
    text = f"The actor with name Agent failed to import on the worker.\n{reason}"
    cls: type[RayError] = ActorDiedError if initialised else RayTaskError
    two.machines[1].answers["describe"] = made(cls, text, **({"actor_init_failed": True} if initialised else {}))
    failure = failure_of(placed(tmp_path))
    assert isinstance(failure, ConfigError)
    assert (failure.field, failure.value) == ("train.launch.engine", "ray")
    assert failure.message.endswith(f"cannot load trainflow's agent: {reason}.")
    assert failure.remedy == "Install the same trainflow, with its extra ray, on every machine of the cluster."


@pytest.mark.parametrize("silence", [NEVER, made(ActorUnavailableError, "RPC error: Socket closed")])
def test_a_silent_agent_is_lost_with_its_machine_or_after_a_while(
    tmp_path: Path, two: FakeRay, silence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = running(tmp_path)
    two.machines[1].answers["read"] = silence
    assert isinstance(state_of(engine, 3), Alive)
    del two.machines[1].answers["read"]
    assert isinstance(state_of(engine, 3), Alive)
    two.machines[1].answers["read"] = silence
    two.machines[1].alive = False
    assert failure_of(engine).message == LOST
    two.machines[1].alive = True
    monkeypatch.setattr(ray_engine, "SILENT_S", -1.0)
    assert failure_of(engine).message == LOST


@pytest.mark.parametrize(
    ("method", "answer", "where"),
    [
        ("describe", made(ActorUnavailableError, "RPC error: Socket closed"), "of an agent"),
        ("start", NEVER, "10.0.0.2"),
        ("start", made(ActorDiedError, DIED), "10.0.0.2"),
    ],
)
def test_an_agent_that_does_not_start_is_lost_by_name(
    tmp_path: Path, two: FakeRay, method: str, answer: Any, where: str
) -> None:
    two.machines[1].answers[method] = answer
    failure = failure_of(placed(tmp_path))
    assert isinstance(failure, InfrastructureError)
    assert failure.message == f"The machine {where} was lost: its agent does not answer."


def test_a_drained_machine_is_left_with_a_save(tmp_path: Path, two: FakeRay) -> None:
    engine = running(tmp_path)
    two.draining = {"node-1": 0}
    assert isinstance(state_of(engine, 3), Alive)
    assert two.machines[0].called("tell") == [{"word": "stop"}]
    two.machines[0].answers["read"] = {"lines": ['{"failure": {}}'], "code": 19}
    failure = failure_of(engine)
    assert type(failure) is Preempted
    assert failure.message == "The cluster took the machine 10.0.0.2 back."


def test_the_last_lines_come_with_the_exit_code(tmp_path: Path, two: FakeRay) -> None:
    engine = running(tmp_path)
    two.machines[0].answers["read"] = {"lines": ["one", "two"], "code": 1}
    assert engine.poll() == (["one", "two"], Ended(1, "one\ntwo"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("Could not find any running Ray instance."), "Could not find any running Ray instance."),
        (
            RuntimeError(f"Version mismatch: {STARTED}{OURS}"),
            f"Version mismatch: {' '.join(STARTED.split())} {' '.join(OURS.split())}.",
        ),
        (made(RayError, "The token is missing.\nEnsure that"), "The token is missing. Ensure that."),
        (ValueError("The namespace is wrong."), "The namespace is wrong."),
    ],
)
def test_a_cluster_that_cannot_be_used(tmp_path: Path, two: FakeRay, error: Exception, reason: str) -> None:
    two.init_error = error
    with pytest.raises(ConfigError) as caught:
        placed(tmp_path)
    assert (caught.value.field, caught.value.value) == ("train.launch.address", "auto")
    assert caught.value.message == f"The Ray cluster cannot be used from this machine: {reason}"
    assert "a cluster that has Ray 2.60.0 and Python" in str(caught.value.remedy)


def test_an_address_where_nothing_listens_is_refused_soon(tmp_path: Path, two: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        placed(tmp_path, address=address)
        assert two.address == address
    two.usage_statistics = ""
    with pytest.raises(ConfigError, match="Connection refused") as gone:
        placed(tmp_path, address=address)
    assert (gone.value.field, gone.value.value) == ("train.launch.address", address)
    assert two.usage_statistics == ""  # Ray was not asked


def test_more_than_the_cluster_has_and_machines_that_others_use(tmp_path: Path, two: FakeRay) -> None:
    failure = failure_of(placed(tmp_path, nodes=3, processes=2, engine_options={"memory": 1e9}))
    assert isinstance(failure, ConfigError)
    offer = "the cluster offers CPU 4, memory 0 on 2 machines, of which 0 have CPU 2, memory 1e+09; 3 with that"
    assert failure.message == f"The machines could not be placed within 0 s: {offer} were asked for."
    assert (failure.field, failure.value) == ("train.launch.nodes", "3")
    assert failure.remedy == "Ask for less (nodes, processes, engine_options), or add machines to the cluster."
    two.group_answer = NEVER
    failure = failure_of(placed(tmp_path))
    assert isinstance(failure, ConfigError)
    assert "the cluster offers CPU 4 on 2 machines, of which 2 have CPU 1; 2 with that" in failure.message
    assert (two.bundles, two.strategy) == ([{"CPU": 1.0}] * 2, "STRICT_SPREAD")


def test_a_range_of_machines_takes_those_that_are_free(
    tmp_path: Path, two: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "SMALLER_S", -1.0)
    two.group_answer = NEVER
    engine = placed(tmp_path, nodes="1:2", join_timeout_s=60.0)
    engine.poll()
    assert len(two.bundles) == 2
    engine.poll()
    assert len(two.bundles) == 1


def test_a_storage_that_a_machine_does_not_see(tmp_path: Path, two: FakeRay) -> None:
    running(tmp_path, output="s3://bucket/runs/train").end(now=True)
    # A store is not looked for in the machines' folders.
    assert two.machines[1].called("describe") == [{"path": None}]
    two.killed = 0
    two.machines[1].calls.clear()
    two.machines[1].answers["describe"] = {"host": "10.0.0.2", "node": "node-1", "seen": False}
    engine = placed(tmp_path)
    failure = failure_of(engine)
    assert isinstance(failure, ConfigError)
    assert failure.message == "The machine 10.0.0.2 does not see this folder as this machine does."
    assert failure.field == "storage" and str(tmp_path) in str(failure.value)
    assert failure.remedy == "Use a store, or a folder, that all machines of the cluster share."
    [marker] = (tmp_path / "out" / "attempts").iterdir()
    assert two.machines[1].called("describe") == [{"path": str(marker)}]
    engine.end(now=True)
    assert list((tmp_path / "out" / "attempts").iterdir()) == []
    assert (two.killed, two.is_initialized()) == (2, False)


def test_usage_statistics_are_off_and_the_token_is_on_before_ray_starts(
    tmp_path: Path, two: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    placed(tmp_path)
    assert two.usage_statistics == "0"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert two.address == "auto"
    assert (two.settings["log_to_driver"], two.settings["configure_logging"]) == (False, False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    placed(tmp_path)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_only_text_crosses_and_secrets_are_in_no_file(tmp_path: Path, two: FakeRay) -> None:
    engine = running(tmp_path, env={"API_TOKEN": "hidden"})
    two.machines[0].answers["read"] = {"lines": [json.dumps({"started": "10.0.0.1:29500"})], "code": None}
    state_of(engine, 3)
    engine.end(now=False)
    engine.end(now=True)
    methods = {method for machine in two.machines for method, _ in machine.calls}
    assert methods == {"describe", "start", "read", "lead", "tell"}
    assert {type(each) for each in two.crossed} == {str}
    [first], [second] = (machine.called("start") for machine in two.machines)
    assert (first["leads"], second["leads"]) == (True, False)
    assert first["env"] == {"API_TOKEN": "hidden", "PYTHONSAFEPATH": "1"}
    assert "hidden" not in first["job"]  # which the agent writes to a file
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} <= set(first["without"])
    assert two.machines[1].called("lead") == [{"leader": "10.0.0.1:29500"}]  # once
    assert [each["max_restarts"] for each in two.options] == [0, 0]
