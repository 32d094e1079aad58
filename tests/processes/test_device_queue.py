"""Launches that want one device of a machine: one works, the others wait, and a dead one frees it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launched import WAITING_RECIPE, Owner, request, wait_until
from trainer_lib.errors import Interrupted
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.locks import tickets

HOLDS = """
import os
held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
print("holds", sum("/devices/" in path for path in held), flush=True)

def prepare(options, out):
    return {"train": [{"x": 1}]}

def build_model(options, data):
    raise NotImplementedError
"""


@contextmanager
def owner(folder: Path, recipe: str = WAITING_RECIPE, **config: Any) -> Iterator[Owner]:
    settings = {"kind": "process", "per_device": 1, "grace_s": 1.0, **config}
    started = Owner(folder, request(folder, recipe), **settings)
    try:
        yield started
    finally:
        started.close()


def waiting() -> list[tickets.Ticket]:
    """The launches that wait now."""
    with contextlib.closing(tickets.Queue()) as queue, queue._locked(lambda: False):
        return [ticket for _, ticket in queue._living() if ticket.waits]


def test_the_second_launch_waits_until_the_killed_first_one_has_left_the_device(tmp_path: Path) -> None:
    recipe = WAITING_RECIPE.replace('os.environ.get("MODE", "")', '"through"')
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(owner(tmp_path / "a", env={"MODE": "deaf"}, grace_s=3.0))
        first.wait_for(ready := tmp_path / "a" / "ready-0")
        second = stack.enter_context(owner(tmp_path / "b", recipe))
        worker = psutil.Process(int(ready.read_text()))
        wait_until(lambda: len(waiting()) == 1, 60)
        os.kill(first.process.pid, signal.SIGKILL)
        assert waiting(), "the worker of the killed command still saves"
        second.wait_for(tmp_path / "b" / "ready-0", timeout=60)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert second.process.wait(60) == 0
        outcome = second.outcome()
    assert outcome["class"] is None, outcome
    said = [event for event in outcome["events"] if event["event"] == "wait"]
    assert said[0]["message"].startswith(f"waits for the CPU, in use by prepare (process {first.process.pid}), since ")
    assert said[-1]["message"] == "The CPU can be used."
    assert said[-1]["waited_s"] > 0


def test_a_launch_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    with owner(tmp_path / "a") as first:
        first.wait_for(tmp_path / "a" / "ready-0")
        with pytest.raises(Interrupted, match=r"Cancelled while it waited for the CPU\."):
            launch(
                request(tmp_path / "b"),
                LaunchConfig(kind="process", per_device=1),
                env={},
                on_line=lambda line: None,
                on_event=events.append,
                should_cancel=lambda: bool(events),
            )
        assert not waiting()
    assert not (tmp_path / "b" / "ready-0").exists()


def test_without_a_limit_launches_share_the_cpu(tmp_path: Path) -> None:
    with owner(tmp_path / "a"), owner(tmp_path / "b", per_device=None) as second:
        second.wait_for(tmp_path / "b" / "ready-0")
        assert not waiting()


def test_workers_hold_the_device_themselves_forked_or_started(tmp_path: Path) -> None:
    lines: list[str] = []
    for number in range(3):  # the second and third are forked from a warm parent
        launch(
            request(tmp_path / str(number), HOLDS),
            LaunchConfig(kind="process", per_device=1),
            env={},
            on_line=lines.append,
            on_event=lambda event: None,
        )
    assert [line for line in lines if line.startswith("holds")] == ["holds 1"] * 3


def test_threads_of_one_process_wait_for_each_other_in_the_order_of_asking(tmp_path: Path) -> None:
    order: list[int] = []
    never = threading.Event()

    def use(number: int) -> None:
        queue = tickets.Queue()
        try:
            with queue.draw(["GPU 0"], str(number), never.is_set) as place:
                while queue.find_before(place, 1, never.is_set):
                    never.wait(0.01)
                order.append(number)
        finally:
            queue.close()

    queue = tickets.Queue()
    with queue.draw(["GPU 0"], "first", never.is_set) as place:
        assert queue.find_before(place, 1, never.is_set) == []
        threads = []
        for number in range(3):
            threads.append(threading.Thread(target=use, args=(number,)))
            threads[-1].start()
            wait_until(lambda number=number: len(waiting()) == number + 1, 20)  # type: ignore[misc]
    for thread in threads:
        thread.join(20)
    queue.close()
    assert order == [0, 1, 2]
