"""A program that ends waits until the threads of gloo have dropped the tensors of its collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trainer_lib import distributed, in_flight


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    in_flight._recent.clear()
    yield
    in_flight._recent.clear()


def test_it_waits_for_the_thread_that_is_late() -> None:
    held = [in_flight.remember(torch.zeros(1))]
    dropped = threading.Timer(0.2, held.clear)
    started = time.monotonic()
    dropped.start()
    assert in_flight.wait_until_released(20)
    assert not held
    assert time.monotonic() - started >= 0.2
    dropped.join()


def test_a_thread_that_never_drops_its_tensor_delays_the_end_no_longer_than_the_limit() -> None:
    held = in_flight.remember(torch.zeros(1))
    assert not in_flight.wait_until_released(0.05)
    assert held.item() == 0


def test_large_tensors_are_not_kept_alive_and_small_ones_only_the_newest() -> None:
    in_flight.remember(torch.zeros(1_000_000))
    assert not in_flight._recent
    for _ in range(1_000):
        in_flight.remember(torch.zeros(1))
    assert len(in_flight._recent) == 64
    assert in_flight.wait_until_released(5)


def test_the_group_ends_after_the_threads_have_dropped_what_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.form_alone(torch.device("cpu"))
    held = [in_flight.remember(torch.zeros(1))]
    held_at_the_end: list[int] = []
    end = dist.destroy_process_group

    def note_and_end() -> None:
        held_at_the_end.append(len(held))
        end()

    monkeypatch.setattr(dist, "destroy_process_group", note_and_end)
    dropped = threading.Timer(0.2, held.clear)
    dropped.start()
    distributed.shutdown()
    assert held_at_the_end == [0]
    assert not dist.is_initialized()
    dropped.join()


def test_a_tensor_in_the_frames_of_an_error_that_is_over_does_not_delay_the_end() -> None:
    distributed.form_alone(torch.device("cpu"))
    cycle: list[object] = [in_flight.remember(torch.zeros(1))]
    cycle.append(cycle)
    del cycle
    started = time.monotonic()
    distributed.shutdown()
    assert time.monotonic() - started < distributed._LEAVE_S
    assert not in_flight._recent
