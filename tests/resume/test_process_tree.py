"""Nobody survives: whatever is killed, all that a launch started is gone a moment later."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Owner, request, wait_until
from trainer_lib.launch.conditions import SWITCH

Start = Callable[..., Owner]
FORKED, STARTED = "1", "0"
# Guard, agent and workers come from a warm parent, or from new interpreters.
in_both_ways = pytest.mark.parametrize("way", [FORKED, STARTED])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    owners: list[Owner] = []

    def begin(mode: str = "", way: str = FORKED, **config: Any) -> Owner:
        defaults: dict[str, Any] = {"processes": 2, "grace_s": 2.0, "env": {"MODE": mode, SWITCH: way}}
        owner = Owner(tmp_path, request(tmp_path), **{**defaults, **config})
        owners.append(owner)
        return owner

    yield begin
    for owner in owners:
        owner.close()


def both(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "ready-0", tmp_path / "ready-1"


@in_both_ways
def test_owner_killed(start: Start, tmp_path: Path, way: str) -> None:
    owner = start(way=way)
    owner.wait_for(*both(tmp_path))
    assert len(owner.tree()) >= 6  # guard, agent, two workers, their two children
    owner.process.kill()
    assert owner.gone() == []


def test_warm_parent_and_owner_killed(start: Start, tmp_path: Path) -> None:
    owner = start()
    owner.wait_for(*both(tmp_path))
    owner.named("trainer_lib.worker.warm_parent").kill()
    owner.process.kill()
    assert owner.gone() == []


def test_owner_killed_while_the_warm_parent_starts(start: Start) -> None:
    owner = start()
    wait_until(lambda: owner.tree() != [], 30)
    owner.process.kill()
    assert owner.gone() == []


def test_owner_terminated(start: Start, tmp_path: Path) -> None:
    owner = start()
    owner.wait_for(*both(tmp_path))
    owner.process.terminate()
    assert owner.gone() == []


@in_both_ways
def test_ctrl_c(start: Start, tmp_path: Path, way: str) -> None:
    owner = start(way=way)
    owner.wait_for(*both(tmp_path))
    owner.process.send_signal(signal.SIGINT)
    assert owner.gone() == []
    assert owner.outcome()["class"] == "Interrupted"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ctrl_c_of_workers_that_do_not_listen(start: Start, tmp_path: Path) -> None:
    owner = start("deaf", processes=1, grace_s=0.5)
    owner.wait_for(tmp_path / "ready-0")
    owner.process.send_signal(signal.SIGINT)
    assert owner.gone() == []


def test_second_ctrl_c_waits_no_longer(start: Start, tmp_path: Path) -> None:
    owner = start("deaf", processes=1, grace_s=1000.0)
    owner.wait_for(tmp_path / "ready-0")
    owner.process.send_signal(signal.SIGINT)
    assert len(owner.gone(timeout=1.0)) >= 3
    owner.process.send_signal(signal.SIGINT)
    assert owner.gone() == []


@in_both_ways
def test_torchrun_killed(start: Start, tmp_path: Path, way: str) -> None:
    owner = start(way=way)
    owner.wait_for(*both(tmp_path))
    owner.named("trainer_lib.machines.agent").kill()
    assert owner.gone() == []
    assert owner.outcome()["message"] == "The launcher was killed by SIGKILL (9)."


@in_both_ways
def test_guard_killed(start: Start, tmp_path: Path, way: str) -> None:
    owner = start(way=way)
    owner.wait_for(*both(tmp_path))
    owner.named("guard.py").kill()
    assert owner.gone() == []
    assert owner.outcome()["message"] == "The guard process was killed by SIGKILL (9)."


@in_both_ways
def test_guard_and_owner_killed_together(start: Start, tmp_path: Path, way: str) -> None:
    owner = start(way=way)
    owner.wait_for(*both(tmp_path))
    guard = owner.named("guard.py")
    owner.process.suspend()  # so that it cannot see the guard go
    guard.kill()
    owner.process.kill()
    assert owner.gone() == []


def test_worker_killed(start: Start, tmp_path: Path) -> None:
    owner = start()
    owner.wait_for(*both(tmp_path))
    victim = int((tmp_path / "ready-1").read_text())
    next(process for process in owner.tree() if process.pid == victim).kill()
    assert owner.gone() == []
    outcome = owner.outcome()
    assert outcome["class"] == "InfrastructureError"
    assert "Rank 1 was killed by SIGKILL (9)" in outcome["message"]


def test_rank_that_raises_ends_the_others(start: Start) -> None:
    owner = start("raise")
    wait_until(lambda: owner.tree() != [], 30)
    assert owner.gone(timeout=60) == []
    outcome = owner.outcome()
    assert (outcome["class"], outcome["rank"]) == ("CodeError", 1)
    assert "rank one dislikes this" in outcome["message"]


def test_leftovers_of_a_launch_that_went_well(start: Start) -> None:
    owner = start("through", processes=1)
    wait_until(lambda: owner.tree() != [], 30)
    assert owner.gone(timeout=60) == []
    assert owner.outcome()["result"]["splits"]["train"]["rows"] == 1


def test_next_launch_waits_for_the_workers_of_a_killed_owner(start: Start, tmp_path: Path) -> None:
    first = start("deaf", processes=1, grace_s=2.0)
    first.wait_for(tmp_path / "ready-0")
    first.process.kill()
    (tmp_path / "ready-0").unlink()
    second = start("", processes=1, grace_s=2.0)
    second.wait_for(tmp_path / "ready-0")
    assert first.tree() == []
    second.process.send_signal(signal.SIGINT)
    assert second.gone() == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("to_owner", [signal.SIGINT, signal.SIGKILL])
def test_a_guard_that_is_stopped_still_ends_all(start: Start, tmp_path: Path, to_owner: int) -> None:
    owner = start(processes=1)
    owner.wait_for(tmp_path / "ready-0")
    owner.named("guard.py").suspend()
    owner.process.send_signal(to_owner)
    assert owner.gone() == []
