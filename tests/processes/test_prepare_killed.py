"""A recipe's sources, shared by workers of which one is killed: the data is that of one worker, made once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

from tests.support import tiny
from tests.support.launched import request, wait_until
from trainer_lib.launch import LaunchConfig, launch_workers
from trainer_lib.launch.pool import apart
from trainer_lib.locks.lease import Holder

RECIPE = """
import time


def list_sources(options, out):
    return list(range(40))


def prepare_shard(source, options):
    time.sleep(options["seconds"])
    with open(options["log"], "a") as log:
        log.write(f"{source}\\n")
    return {"train": [{"x": [float(source), float(n)]} for n in range(20)], "test": [{"x": [0.0, float(source)]}]}


def build_model(options, data): ...
"""


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted((folder / "data").rglob("*.arrow"))}


def test_a_killed_workers_sources_are_taken_over_and_the_data_is_that_of_one_worker(tmp_path: Path) -> None:
    options = {"seconds": 0.0, "log": str(tmp_path / "whole.txt")}
    whole = request(tmp_path, RECIPE, output=str(tmp_path / "whole"), shard_rows=8, options=options)
    expected = tiny.run(whole, kind="in_process")
    options = {"seconds": 0.05, "log": str(tmp_path / "shared.txt")}
    shared = replace(whole, output=str(tmp_path / "shared"), options=options)
    tiny.run(replace(shared, step="list"), kind="in_process")
    killed: list[int] = []

    def kill_one() -> None:
        folder = tmp_path / "shared"
        wait_until(lambda: len(list(folder.glob("records/parts/*/*"))) >= 2, 90)
        while not killed:
            for path in folder.glob("claims/*/*/WRITING.json"):
                with contextlib.suppress(FileNotFoundError):
                    if not killed and (holder := Holder.from_bytes(path.read_bytes())) is not None:
                        os.kill(holder.pid, signal.SIGKILL)
                        killed.append(holder.pid)

    killer = threading.Thread(target=kill_one)
    killer.start()
    done = launch_workers(
        replace(shared, step="parts"),
        apart(LaunchConfig(kind="torchrun", processes=2, threads=1), on_devices=False),
        env={},
        on_line=lambda line: None,
        on_event=lambda event: None,
    )
    killer.join()
    assert (len(killed), len(done.lost)) == (1, 1)
    result = tiny.run(replace(shared, step="finish"), kind="in_process")
    assert result == expected
    assert _files(tmp_path / "shared") == _files(tmp_path / "whole")
    calls = (tmp_path / "shared.txt").read_text().split()
    assert len(calls) <= 41  # one source of the killed worker again, and no other
    assert set(calls) == {str(source) for source in range(40)}
