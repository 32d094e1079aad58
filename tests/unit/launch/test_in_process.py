"""Launches in the calling process: its environment is what it was, also after several threads have launched at once."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.launch import in_process
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.worker import session

VARIABLE = "TRAINFLOW_TEST_TURN"


def test_threads_take_turns_and_a_launch_may_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_ready, seen, inside = threading.Barrier(3), [], 0

    def run_here(request: Any, run_dir: RunDir, on_event: Any) -> str | None:
        nonlocal inside
        inside += 1
        seen.append((inside, request, os.environ.get(VARIABLE)))
        if request == "outer":
            launch("inner")
        time.sleep(0.02)
        seen.append((inside, request, os.environ.get(VARIABLE)))
        inside -= 1
        return os.environ.get(VARIABLE)

    def launch(name: str) -> str | None:
        found: str | None = in_process.run_request(name, RunDir(tmp_path), {VARIABLE: name}, print)  # type: ignore[arg-type]
        return found

    def begin(name: str) -> str | None:
        all_ready.wait(10)
        return launch(name)

    monkeypatch.setattr(session, "run_here", run_here)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(begin, ("a", "b", "outer"))) == ["a", "b", "outer"]
    assert [depth for depth, request, _ in seen if request != "inner"] == [1] * 6
    assert all(request == value for _, request, value in seen)
    assert VARIABLE not in os.environ


def test_a_launch_that_fails_lets_the_next_one_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(session, "run_here", fail)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
            pool.submit(in_process.run_request, None, RunDir(tmp_path), {VARIABLE: "x"}, print).result(10)  # type: ignore[arg-type]
    assert VARIABLE not in os.environ
