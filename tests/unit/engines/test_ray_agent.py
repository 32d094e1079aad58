"""What runs on a machine of a Ray cluster, in this process, and how the driver asks several of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import wait_until
from tests.support.ray_stand_in import NEVER, FakeRay, Machine
from trainer_lib.engines import ray as ray_engine
from trainer_lib.engines import ray_agent
from trainer_lib.engines.base import Alive, Job
from trainer_lib.engines.ray import Ray
from trainer_lib.engines.ray_agent import Agent
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.variables import thread_variables

# Says what it is given, then so many lines, then waits for its end.
MEMBER = """
import json, os, sys, time
from pathlib import Path
print(json.dumps({name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "API_TOKEN", "OTHER")}))
for number in range(int(os.environ["LINES"])):
    print(f"line {number}", flush=True)
Path(os.environ["WRITTEN"]).touch()
time.sleep(300)
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A folder whose `trainer_lib.engines.member` is the program above."""
    folder = tmp_path / "package" / "trainer_lib" / "engines"
    folder.mkdir(parents=True)
    (folder / "member.py").write_text(MEMBER)
    for package in (folder, folder.parent):  # before the installed one, however that is found
        (package / "__init__.py").touch()
    return str(tmp_path / "package")


@pytest.fixture
def agent() -> Iterator[Agent]:
    started = Agent()
    yield started
    started.tell(json.dumps({"word": "kill"}))
    started._folder.cleanup()


def start(agent: Agent, package: str, folder: Path, *, leads: bool, lines: int, **env: str) -> None:
    given = {"LINES": str(lines), "WRITTEN": str(folder / "written"), "PYTHONPATH": package, "PYTHONSAFEPATH": "1"}
    place = {"leads": leads, "host": "127.0.0.1", "nodes": 1, "without": list(thread_variables(""))}
    assert agent.start(json.dumps({"job": "{}", "env": given | env, **place})) == "{}"


def read(agent: Agent, after: int) -> list[str]:
    lines: list[str] = json.loads(agent.read(json.dumps({"after": after})))["lines"]
    return lines


def test_lines_that_the_driver_has_are_dropped(agent: Agent, package: str, tmp_path: Path) -> None:
    start(agent, package, tmp_path, leads=True, lines=3)
    wait_until(lambda: len(read(agent, 0)) == 4, 30)
    first = read(agent, 0)
    assert first[1:] == ["line 0", "line 1", "line 2"]
    assert read(agent, 0) == first  # the answer before may have been lost
    assert read(agent, 2) == agent._lines == ["line 1", "line 2"]
    assert read(agent, 1) == ["line 1", "line 2"]  # a call that comes late
    for _ in range(2):
        assert read(agent, 4) == agent._lines == []


def test_a_member_waits_for_a_driver_that_does_not_read(
    agent: Agent, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_agent, "MOST_LINES", 10)
    lines = 20_000  # more than a pipe holds
    start(agent, package, tmp_path, leads=True, lines=lines)
    wait_until(lambda: len(agent._lines) == 10, 30)
    time.sleep(0.2)  # nothing comes
    assert len(agent._lines) == 10
    assert not (tmp_path / "written").exists()
    found: list[str] = []
    deadline = time.monotonic() + 30
    while len(found) < lines + 1 and time.monotonic() < deadline:
        found += read(agent, len(found))
        assert len(agent._lines) <= 10
    assert found[1:] == [f"line {number}" for number in range(lines)]


def test_the_lines_of_a_machine_that_follows_are_not_kept(agent: Agent, package: str, tmp_path: Path) -> None:
    start(agent, package, tmp_path, leads=False, lines=20_000)
    wait_until((tmp_path / "written").exists, 30)
    assert json.loads(agent.read(json.dumps({"after": 0}))) == {"lines": [], "code": None}
    assert agent._lines == []


def test_threads_that_ray_sets_are_overridden(
    agent: Agent, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in thread_variables(""):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OTHER", "kept")
    start(agent, package, tmp_path, leads=True, lines=0, MKL_NUM_THREADS="2", API_TOKEN="hidden")
    wait_until(lambda: bool(read(agent, 0)), 30)
    expected = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": "2", "API_TOKEN": "hidden", "OTHER": "kept"}
    assert json.loads(read(agent, 0)[0]) == expected
    assert os.environ["OMP_NUM_THREADS"] == "7"  # in the member alone


def test_every_call_takes_and_returns_text(
    agent: Agent, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = FakeRay(Machine(0))
    cluster.install(monkeypatch)
    cluster.get_runtime_context = lambda: type("Context", (), {"get_node_id": lambda _: "node-0"})()
    cluster.util.get_node_ip_address = lambda: "10.0.0.1"
    for path, seen in ((tmp_path / "no", False), (tmp_path, True), (None, True)):
        asked = json.dumps({"path": None if path is None else str(path)})
        assert json.loads(agent.describe(asked)) == {"host": "10.0.0.1", "node": "node-0", "seen": seen}
    assert agent.read(json.dumps({"after": 0})) == '{"lines": [], "code": null}'
    assert agent.tell(json.dumps({"word": "stop"})) == "{}"
    start(agent, package, tmp_path, leads=True, lines=0)
    wait_until(lambda: bool(read(agent, 0)), 30)
    assert agent.lead(json.dumps({"leader": "10.0.0.1:29500"})) == "{}"
    assert Path(agent._folder.name, "address").read_text() == "10.0.0.1:29500"
    assert agent.tell(json.dumps({"word": "kill"})) == "{}"
    code = json.loads(agent.read(json.dumps({"after": 1})))["code"]
    assert isinstance(code, int) and code != 0


def test_the_machines_that_follow_are_asked_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = FakeRay(*(Machine(number) for number in range(5)))
    cluster.install(monkeypatch)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    config = LaunchConfig(engine="ray", processes=1, nodes=5)
    engine = Ray()
    engine.place(Job({"output": str(tmp_path / "out")}, config, {}, shared=False))
    while engine._next != engine._watch:
        engine.poll()
    monkeypatch.setattr(ray_engine, "LOOK_S", -1.0)
    cluster.machines[2].answers["read"] = NEVER
    cluster.machines[4].answers["read"] = NEVER
    cluster.waits.clear()
    for machine in cluster.machines:
        machine.calls.clear()
    assert isinstance(engine.poll()[1], Alive)
    # One wait for the four that follow, whether they answer or not, and one for the lines of the leading one.
    assert cluster.waits == [(4, ray_engine.ANSWER_S), (1, ray_engine.ANSWER_S)]
    assert [machine.calls for machine in cluster.machines] == [[("read", {"after": 0})]] * 5
    assert sorted(engine._silent) == [2, 4]
    # What it has read is what the agent may forget.
    cluster.machines[0].answers["read"] = {"lines": ["a", "b"], "code": None}
    engine.poll()
    engine.poll()
    assert cluster.machines[0].called("read")[-1] == {"after": 2}
    # The address of the leading machine goes to all that do not have it, together.
    cluster.machines[0].answers["read"] = {"lines": ['{"started": "10.0.0.1:1"}'], "code": None}
    cluster.machines[2].answers["lead"] = NEVER
    cluster.waits.clear()
    engine.poll()
    assert cluster.waits == [(4, ray_engine.ANSWER_S), (1, ray_engine.ANSWER_S), (4, ray_engine.ANSWER_S)]
    del cluster.machines[2].answers["lead"]
    cluster.machines[0].answers["read"] = {"lines": [], "code": None}
    cluster.waits.clear()
    engine.poll()
    assert cluster.waits == [(4, ray_engine.ANSWER_S), (1, ray_engine.ANSWER_S), (1, ray_engine.ANSWER_S)]
    assert [len(machine.called("lead")) for machine in cluster.machines] == [0, 1, 2, 1, 1]
