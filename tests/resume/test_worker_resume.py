"""The real worker under torchrun: killed, stopped or failing on one rank, and continued to the very same weights."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.errors import CodeError, InfrastructureError, Interrupted
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.requests import PreparedData, Request


class Listener:
    """Hears the events of a launch, and does something once a step has been saved."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.saved: list[int] = []
        self.resumed: int | None = None
        self._then = then

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "resume":
            self.resumed = event["step"]
        if event["event"] == "save":
            self.saved.append(event["step"])
            if len(self.saved) == 2:
                self._then()


def launched(asked: Request[Any], listener: Listener, **more: Any) -> dict[str, Any]:
    config = LaunchConfig(processes=2, grace_s=20.0)
    env = {"STEP_S": "0.05", "OMP_NUM_THREADS": "1"}
    return launch(asked, config, env=env, on_line=lambda line: None, on_event=listener, **more)


def kill_worker(rank: int) -> None:
    """SIGKILL a worker of the launch under way, found by the file it wrote."""
    base = Path(tempfile.gettempdir(), f"trainflow-{os.getuid()}")
    (note,) = base.glob(f"*/worker-{rank}.pid")
    os.kill(int(note.read_text().split()[0]), signal.SIGKILL)


def test_cancelled_then_killed_then_finished(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    listener = Listener()
    with pytest.raises(Interrupted, match="saved at step") as cancelled:
        launched(asked, listener, should_cancel=lambda: bool(listener.saved))

    listener = Listener(lambda: kill_worker(1))
    background = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"), save_async=True)
    with pytest.raises(InfrastructureError, match=r"Rank 1 was killed by SIGKILL \(9\) at step \d+"):
        launched(background, listener)
    assert listener.resumed == cancelled.value.step

    result = tiny.run(asked, processes=2)
    assert result.resumed_from >= listener.saved[-1]
    assert tiny.weights(asked.output) == uninterrupted_weights


def test_an_error_on_one_rank_is_that_ranks(tmp_path: Path, prepared_data: PreparedData) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    with pytest.raises(CodeError, match="this rank cannot collate") as caught:
        tiny.run(asked, processes=2, env={"BAD_RANK": "1"})
    assert caught.value.rank == 1
    assert f"{tmp_path}/recipe.py" in str(caught.value)


def test_two_ranks_share_out_evaluation_and_prediction(tmp_path: Path, prepared_data: PreparedData) -> None:
    output = str(tmp_path / "train")
    tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=4), kind="in_process")
    more = {"data": prepared_data, "model_url": f"{output}/model", "model": {}, "args": tiny.ARGS}
    results = []
    for config in ({"processes": 2}, {"kind": "in_process"}):
        base = {"output": str(tmp_path / str(config)), **more}
        evaluated = tiny.run(request(tmp_path, tiny.RECIPE, "evaluate", splits=["test"], **base), **config)
        tiny.run(request(tmp_path, tiny.RECIPE, "predict", split="test", rows_per_file=10, **base), **config)
        files = (tmp_path / str(config) / "predictions" / "test").glob("*.parquet")
        results.append((evaluated.metrics["test"]["accuracy"], {file.name: file.read_bytes() for file in files}))
    assert len(results[0][1]) == 3
    assert results[0] == results[1]
