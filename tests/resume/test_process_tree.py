"""Nobody survives: whatever is killed, all that a launch started is gone a moment later."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Owner, request, wait_until

Start = Callable[..., Owner]
Act = Callable[[Owner, Path], None]
GUARD, AGENT = "guard.py", "trainer_lib.machines.agent"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launch of two processes, or what `config` says, and wait until all of them are ready."""
    owners: list[Owner] = []

    def begin(mode: str = "", *, ready: bool = True, **config: Any) -> Owner:
        defaults: dict[str, Any] = {"processes": 2, "grace_s": 2.0, "env": {"MODE": mode}}
        settings = {**defaults, **config}
        owner = Owner(tmp_path, request(tmp_path), **settings)
        owners.append(owner)
        if ready:
            owner.wait_for(*(tmp_path / f"ready-{rank}" for rank in range(settings["processes"])))
        return owner

    yield begin
    for owner in owners:
        owner.close()


def send(number: int) -> Act:
    return lambda owner, folder: owner.process.send_signal(number)


def kill(*names: str, owner_too: bool = False, suspended: bool = False) -> Act:
    def act(owner: Owner, folder: Path) -> None:
        victims = [owner.named(name) for name in names]
        if suspended:
            owner.process.suspend()  # so that it cannot see the guard go
        for victim in victims:
            victim.kill()
        if owner_too:
            owner.process.kill()

    return act


def kill_worker(owner: Owner, folder: Path) -> None:
    victim = int((folder / "ready-1").read_text())
    next(process for process in owner.tree() if process.pid == victim).kill()


ENDS: dict[str, tuple[Act, str | None]] = {
    "owner killed": (kill(owner_too=True), None),
    "owner terminated": (send(signal.SIGTERM), None),
    "ctrl-c": (send(signal.SIGINT), ""),
    "torchrun killed": (kill(AGENT), "The launcher was killed by SIGKILL (9)."),
    "guard killed": (kill(GUARD), "The guard process was killed by SIGKILL (9)."),
    "guard and owner killed together": (kill(GUARD, owner_too=True, suspended=True), None),
    "worker killed": (kill_worker, "Rank 1 was killed by SIGKILL (9)"),
}


@pytest.mark.parametrize("name", ENDS)
def test_whatever_ends_nothing_is_left(name: str, start: Start, tmp_path: Path) -> None:
    act, said = ENDS[name]
    owner = start()
    assert len(owner.tree()) >= 6  # guard, agent, two workers, their two children
    act(owner, tmp_path)
    assert owner.gone() == []
    if said is not None:
        outcome = owner.outcome()
        assert outcome["class"] == ("Interrupted" if name == "ctrl-c" else "InfrastructureError")
        assert said in outcome["message"]
    if name == "ctrl-c":
        assert list((tmp_path / "tmp").iterdir()) == []


def test_workers_that_do_not_listen_are_ended_after_the_grace_or_a_second_ctrl_c(start: Start, tmp_path: Path) -> None:
    owner = start("deaf", processes=1, grace_s=0.5)
    owner.process.send_signal(signal.SIGINT)
    assert owner.gone() == []
    (tmp_path / "ready-0").unlink()
    patient = start("deaf", processes=1, grace_s=1000.0)
    patient.process.send_signal(signal.SIGINT)
    assert len(patient.gone(timeout=1.0)) >= 3
    patient.process.send_signal(signal.SIGINT)
    assert patient.gone() == []


def test_rank_that_raises_ends_the_others(start: Start) -> None:
    owner = start("raise", ready=False)
    wait_until(lambda: owner.tree() != [], 30)
    assert owner.gone(timeout=60) == []
    outcome = owner.outcome()
    assert (outcome["class"], outcome["rank"]) == ("CodeError", 1)
    assert "rank one dislikes this" in outcome["message"]


def test_leftovers_of_a_launch_that_went_well(start: Start) -> None:
    owner = start("through", processes=1, ready=False)
    wait_until(lambda: owner.tree() != [], 30)
    assert owner.gone(timeout=60) == []
    assert owner.outcome()["result"]["splits"]["train"]["rows"] == 1


def test_next_launch_waits_for_the_workers_of_a_killed_owner(start: Start, tmp_path: Path) -> None:
    first = start("deaf", processes=1, grace_s=2.0)
    first.process.kill()
    (tmp_path / "ready-0").unlink()
    second = start("", processes=1, grace_s=2.0)
    assert first.tree() == []
    second.process.send_signal(signal.SIGINT)
    assert second.gone() == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("to_owner", [signal.SIGINT, signal.SIGKILL])
def test_a_guard_that_is_stopped_still_ends_all(start: Start, to_owner: int) -> None:
    owner = start(processes=1)
    owner.named(GUARD).suspend()
    owner.process.send_signal(to_owner)
    assert owner.gone() == []
