"""Training on two machines: they meet, one is lost, they go on; what failed is told where the command was given."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny
from tests.support.command import Running, running
from tests.support.launched import kept_files, patience_s, request
from tests.support.machine import free_port
from tests.support.repository import ROOT
from trainer_lib.errors import CodeError, ConfigError, InfrastructureError, TrainflowError
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import PreparedData, PrepareRequest, Request


def kill_machine(follower: Running) -> None:
    """Kill a following machine, if it runs: its owner, guard, agent and workers at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(follower.process.pid).children(recursive=True), psutil.Process(follower.process.pid)]
        for process in family:
            process.suspend()
        for process in family:
            process.kill()
    follower.process.wait()


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def asked(tmp_path: Path, prepared_data: PreparedData) -> Any:
    """A training, which no process begins where machines do not meet."""
    return tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))


Join = Callable[..., Running]


@pytest.fixture
def join(tmp_path: Path, endpoint: str) -> Iterator[Join]:
    """Start a following machine: ``trainflow join`` in a separate process."""
    with contextlib.ExitStack() as stack:

        def begin(name: str = "other", *options: str, **env: str) -> Running:
            (folder := tmp_path / name).mkdir(exist_ok=True)
            words = ("join", endpoint, "--processes", "1", "--threads", "1", "--timeout", "30", *options)
            given = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **env}
            follower = stack.enter_context(running(*words, log=folder / "follower.log", cwd=ROOT, env=given))
            stack.callback(kill_machine, follower)
            return follower

        yield begin


class Leader:
    """A launch on the leading machine, and what was heard of it."""

    def __init__(self, endpoint: str, then: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.config: dict[str, Any] = {"rendezvous": endpoint, "processes": 1, "nodes": 2, "grace_s": 5.0}
        self.events: list[dict[str, Any]] = []
        self._then = dict(then or {})  # what to do after so many saves

    def __call__(self, asked: Request[Any], env: dict[str, str] | None = None, **config: Any) -> Any:
        config = {**self.config, "join_timeout_s": 30.0, **config}
        variables = {"OMP_NUM_THREADS": "1", **(env or {})}
        return launch(asked, LaunchConfig(**config), env=variables, on_line=lambda line: None, on_event=self._event)

    def _event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "save":
            self._then.pop(len(self.told("save")), lambda: None)()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def kill(folder: Path | str, name: str) -> None:
    """Kill a process, found by the file that it wrote below `folder`."""
    [note] = Path(folder).glob(f"trainflow-{os.getuid()}/*/{name}.pid")
    os.kill(int(note.read_text().split()[0]), signal.SIGKILL)


def assert_logged_once(asked: Request[Any]) -> None:
    """However often it was started again, the run's history has each step once."""
    history = json.loads(Path(asked.output, "history.json").read_text())
    assert [entry["step"] for entry in history if "loss" in entry] == [10, 20, 30]


def test_whatever_is_killed_both_machines_train_what_two_processes_train(
    tmp_path: Path, asked: Any, uninterrupted_weights: str, endpoint: str, join: Join
) -> None:
    """First a worker of the other machine, then the leading machine's agent."""
    follower = join()
    kills = {2: lambda: kill(tmp_path / "other", "worker-1"), 4: lambda: kill(tempfile.gettempdir(), "agent")}
    leader = Leader(endpoint, kills)
    result = leader(asked, env={"STEP_S": "0.05"}, max_restarts=2)
    worker, agent = (event["message"] for event in leader.told("warning"))
    assert f"Rank 1 was killed by SIGKILL (9) on {socket.gethostname()} at step" in worker
    assert "Starting again (1 of 2)" in worker
    assert agent == "The launcher was killed by SIGKILL (9). Starting again (2 of 2)."
    assert (result.world_size, result.global_step) == (2, 36)
    first, second = (event["step"] for event in leader.told("resume"))
    saved = [event["step"] for event in leader.told("save")]
    assert first == saved[1]
    assert second >= saved[3]  # workers that see their agent gone agree on a step and save it
    assert follower.process.wait(60) == 0
    assert tiny.weights(asked.output) == uninterrupted_weights
    assert_logged_once(asked)


def test_a_machine_that_dies_for_good_is_done_without(asked: Any, endpoint: str, join: Join) -> None:
    follower = join()
    leader = Leader(endpoint, {2: lambda: kill_machine(follower)})
    result = leader(asked, env={"STEP_S": "0.05"}, max_restarts=1, nodes="1:2", join_timeout_s=5.0)
    assert (result.world_size, result.global_step) == (1, 36)
    assert result.resumed_from >= leader.told("save")[1]["step"]
    assert re.match(
        r"The machine .* was lost at step \d+: there was no sign of life", leader.told("warning")[0]["message"]
    )
    assert_logged_once(asked)


def test_an_error_on_the_other_machine_ends_both_and_is_told_here(tmp_path: Path, endpoint: str, join: Join) -> None:
    follower = join("other", MODE="raise")
    with pytest.raises(CodeError, match="rank one dislikes this") as caught:
        Leader(endpoint)(request(tmp_path), max_restarts=3)
    assert caught.value.rank == 1
    assert follower.process.wait(60) == CodeError.exit_code
    assert "your code raised" in follower.output
    assert "rank one dislikes this" in follower.output


def test_machines_that_do_not_come_are_counted(asked: Any, endpoint: str) -> None:
    with pytest.raises(InfrastructureError, match=r"Only 0 of 1 other machine\(s\) came within 1 s") as caught:
        Leader(endpoint)(asked, join_timeout_s=1.0)
    assert (caught.value.field, caught.value.value) == ("train.launch.rendezvous", endpoint)


def test_two_machines_that_claim_one_place_are_refused(asked: Any, endpoint: str, join: Join) -> None:
    followers = [join(name, "--node-rank", "1") for name in ("first", "second")]
    with pytest.raises(ConfigError, match=r"node_rank = 1: .* claim the same place"):
        Leader(endpoint)(asked, nodes=3)
    assert [follower.process.wait(60) for follower in followers] == [ConfigError.exit_code] * 2


def test_a_machine_with_too_few_cores_says_so(asked: Any, endpoint: str, join: Join) -> None:
    join("other", "--processes", "4096")
    with pytest.raises(ConfigError, match=rf"processes = 4096: .* CPU core.* \(on {socket.gethostname()}\)"):
        Leader(endpoint)(asked)


def test_a_hang_shows_the_stacks_of_both_machines(asked: Any, endpoint: str, join: Join) -> None:
    join("other", STEP_S="600")
    with pytest.raises(InfrastructureError, match="There was no progress for") as caught:
        Leader(endpoint)(asked, timeout_s=patience_s("trainer_lib.worker.train", 12.0))
    with kept_files(caught.value) as folder:
        assert {path.name for path in folder.glob("trace-*")} == {"trace-0.json", "trace-1.json"}
    details = caught.value.details or ""
    assert details.index("--- rank 0") < details.index("--- rank 1")
    assert "in forward" in details.partition("--- rank 1")[2]


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, endpoint: str) -> None:
    host, port = endpoint.split(":")
    started = time.monotonic()
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(TrainflowError, match="Address already in use"):
            Leader(endpoint)(PrepareRequest(output=str(tmp_path)))
    assert time.monotonic() - started < 5
