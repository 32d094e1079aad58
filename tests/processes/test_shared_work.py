"""Work that several workers share, of which one is killed: metrics that merge, and the sources of a recipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.launched import request, wait_until
from trainer_lib.errors import ConfigError
from trainer_lib.launch import LaunchConfig, launch, launch_workers
from trainer_lib.launch.pool import apart
from trainer_lib.locks.lease import Holder
from trainer_lib.requests import PreparedData, RecipeFile

SUMS_ONLY = """
def metric_sums(p):
    time.sleep(float(os.environ.get("RANGE_S", "0")))
    right = p.predictions.argmax(-1) == p.label_ids
    scores = p.predictions.astype(np.float64)
    return {"right": right.sum(), "rows": len(right), "scores": scores.sum(0), "table": [[int(right.sum())], [1]]}


def metrics_from_sums(sums):
    assert sums["scores"].shape == (2,) and sums["table"].shape == (2, 1)
    ranges = int(sums["table"][1, 0])
    return {"accuracy": sums["right"] / sums["rows"], "score": float(sums["scores"][0]), "ranges": ranges}
"""
PLAIN = """
def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
"""
SUMS = tiny.RECIPE.replace(PLAIN, SUMS_ONLY)
ONE = LaunchConfig(kind="process", processes=1, threads=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder = tmp_path_factory.mktemp("trained")
    data = tiny.prepared(folder)
    tiny.run(tiny.train_request(folder, data, str(folder / "train")), processes=1)
    return folder, data


def asked(tmp_path: Path, trained: tuple[Path, PreparedData], recipe: str = SUMS, **more: Any) -> Any:
    folder, data = trained
    return request(
        tmp_path,
        recipe,
        "evaluate",
        data=data,
        model_url=f"{folder / 'train'}/model",
        splits=("test", "train"),
        args={"use_cpu": True, "per_device_eval_batch_size": 4},
        **{"rows_per_range": 6, **more},
    )


def run(one: Any, workers: int = 1, **env: str) -> dict[str, dict[str, float]]:
    drop: Any = {"on_line": print, "on_event": lambda event: None}
    if workers == 1:
        return dict(launch(one, ONE, env=env, **drop).metrics)
    launch_workers(replace(one, step="ranges"), [ONE] * workers, env=env, **drop)
    return dict(launch(replace(one, step="finish"), ONE, env=env, **drop).metrics)


def test_several_workers_and_one_give_the_same_digits(tmp_path: Path, trained: tuple[Path, PreparedData]) -> None:
    alone = run(asked(tmp_path, trained))
    assert {"loss", "accuracy", "score", "ranges"} == set(alone["test"])
    assert (alone["test"]["ranges"], alone["train"]["ranges"]) == (5, 15)  # 25 and 90 rows, 6 at a time
    assert alone["overall"]["weights"] > 0
    for folder in ("sums", "records"):
        shutil.rmtree(tmp_path / "out" / folder)
    assert run(asked(tmp_path, trained), 3) == alone
    # As a stage's own file of metrics, which has them in place of the recipe's.
    own = RecipeFile(str(tmp_path / "metrics.py"), str(tmp_path), str(tmp_path / "recipe.py"))
    (tmp_path / "metrics.py").write_text("import os\nimport time\n\nimport numpy as np\n\n\n" + SUMS_ONLY)
    assert run(replace(asked(tmp_path, trained, tiny.RECIPE), recipe=own, output=str(tmp_path / "own"))) == alone
    # The whole split at once differs by rounding only.
    whole = run(asked(tmp_path / "whole", trained, tiny.RECIPE))
    for split in ("test", "train"):
        assert whole[split]["accuracy"] == alone[split]["accuracy"]
        assert whole[split]["loss"] == pytest.approx(alone[split]["loss"], rel=1e-6)


def kill_holder(claims: Path) -> int:
    """Wait for a claim, and kill the worker that holds it."""
    holders: list[Holder] = []

    def look() -> bool:
        for path in claims.glob("*/*/WRITING.json"):
            with contextlib.suppress(FileNotFoundError):
                if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                    holders.append(holder)
        return bool(holders)

    wait_until(look, 60)
    os.kill(holders[0].pid, signal.SIGKILL)
    return holders[0].pid


def test_the_range_of_a_worker_that_is_killed_is_measured_by_another(
    tmp_path: Path, trained: tuple[Path, PreparedData]
) -> None:
    expected = run(asked(tmp_path / "alone", trained))
    shared, metrics = asked(tmp_path, trained), list[Any]()
    thread = threading.Thread(target=lambda: metrics.append(run(shared, 2, RANGE_S="0.3")))
    thread.start()
    kill_holder(tmp_path / "out" / "sums" / "test" / "claims")
    thread.join(120)
    assert metrics == [expected]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("def metrics_from_sums", "def other"), "has only metric_sums"),
        (lambda text: text + "\ndef compute_metrics(p): ...\n", "defines both metric_sums.. and compute_metrics"),
        (lambda text: text.replace('"rows": len(right)', '"rows": "many"'), "'many' for 'rows'"),
        (lambda text: text.replace("scores.sum(0)", "scores"), "returned arrays of shapes"),
    ],
)
def test_sums_that_cannot_be_added_are_refused(
    change: Any, words: str, tmp_path: Path, trained: tuple[Path, PreparedData]
) -> None:
    with pytest.raises(ConfigError, match=words):
        launch(
            asked(tmp_path, trained, change(SUMS)),
            LaunchConfig(kind="in_process", processes=1),
            env={},
            on_line=print,
            on_event=lambda event: None,
        )


# ---------------------------------------------------------------------------------------------- the sources of a recipe
SOURCES = """
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
    whole = request(tmp_path, SOURCES, output=str(tmp_path / "whole"), shard_rows=8, options=options)
    expected = tiny.run(whole, kind="in_process")
    options = {"seconds": 0.05, "log": str(tmp_path / "shared.txt")}
    shared = replace(whole, output=str(tmp_path / "shared"), options=options)
    tiny.run(replace(shared, step="list"), kind="in_process")

    def kill_one() -> None:
        wait_until(lambda: len(list((tmp_path / "shared").glob("records/parts/*/*"))) >= 2, 90)
        kill_holder(tmp_path / "shared" / "claims")

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
    assert len(done.lost) == 1
    assert tiny.run(replace(shared, step="finish"), kind="in_process") == expected
    assert _files(tmp_path / "shared") == _files(tmp_path / "whole")
    calls = (tmp_path / "shared.txt").read_text().split()
    assert len(calls) <= 41  # one source of the killed worker again, and no other
    assert set(calls) == {str(source) for source in range(40)}
