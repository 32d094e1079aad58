"""The trackers' protocol, JSON lines, parameters without secrets, and the callback that feeds them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.repository import ROOT
from trainer_lib.arguments.validation import REPORTERS
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.trackers.base import TRACKERS, create_trackers, numbers_only, tracker_names
from trainer_lib.trackers.callback import TrackingCallback
from trainer_lib.trackers.jsonl import JsonlTracker
from trainer_lib.trackers.params import flatten_params
from trainer_lib.trackers.vendors import OURS, VENDORS

# -- names and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, []),
        ("none", []),
        ([], []),
        ("all", ["jsonl", "mlflow", "tensorboard"]),
        (["mlflow", "jsonl", "mlflow"], ["mlflow", "jsonl"]),
        ("jsonl", ["jsonl"]),
    ],
)
def test_report_to_names_trackers(given: Any, names: list[str]) -> None:
    assert tracker_names(given) == names


def test_every_list_of_trackers_has_the_same_names() -> None:
    assert set(TRACKERS) == set(OURS)
    assert set(REPORTERS) == {*OURS, *VENDORS}


def test_a_near_miss_is_named() -> None:
    with pytest.raises(ConfigError, match=r"report_to = mlfow: .*'mlflow'"):
        create_trackers(["mlfow"], "out")


def test_jsonl_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        create_trackers(["jsonl"], None)


def test_only_numbers_are_tracked_and_nan_is_one() -> None:
    logs = {
        "int": 3,
        "float": 0.5,
        "nan": math.nan,
        "numpy": np.float32(0.25),
        "zero_dim": np.array(2),
        "tensor": torch.tensor(1.5),
        "vector": torch.ones(3),
        "text": "12",
        "list": [1],
        "none": None,
        "huge": 10**400,
    }
    numbers = numbers_only(logs)
    assert set(numbers) == {"int", "float", "nan", "numpy", "zero_dim", "tensor", "huge"}
    assert math.isnan(numbers["nan"])
    assert (numbers["numpy"], numbers["zero_dim"], numbers["tensor"], numbers["huge"]) == (0.25, 2.0, 1.5, math.inf)


# -- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_flat_and_short() -> None:
    flat = flatten_params({"train": {"args": {"lr": 1e-3, "betas": [0.9, 0.99]}}, "empty": {}, "long": "x" * 9000})
    assert flat["train.args.lr"] == "0.001"
    assert flat["train.args.betas"] == "[0.9, 0.99]"
    assert flat["empty"] == "{}"
    assert len(flat["long"]) == 500
    assert flatten_params({}) == {}


@pytest.mark.parametrize(
    "params",
    [
        {"hub_token": "s3cret"},
        {"a": {"b": {"api_key": "s3cret"}}},
        {"awsSecretAccessKey": "s3cret"},
        {"password": "s3cret"},
        {"options": [{"auth_token": "s3cret"}]},
        {"url": "https://user:s3cret@host/path"},
        {"anything": "hf_" + "s3cret" * 6},
    ],
)
def test_secrets_are_masked(params: dict[str, Any]) -> None:
    assert "s3cret" not in json.dumps(flatten_params(params))


@pytest.mark.parametrize("key", ["pad_token", "average_tokens_across_devices", "tokenizer", "num_tokens", "key_size"])
def test_what_only_sounds_like_a_secret_is_shown(key: str) -> None:
    assert flatten_params({key: "plain"}) == {key: "plain"}


def test_an_unset_secret_is_no_secret() -> None:
    assert flatten_params({"hub_token": None}) == {"hub_token": "None"}


# -- JSON lines -------------------------------------------------------------------------------------------------------


def _lines(store: Store) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read_bytes("metrics.jsonl").splitlines()]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store = Store.open(tmp_path / "out" if request.param == "local" else "memory://test-trackers/out")
    yield store
    store.delete_tree()


def _start(tracker: JsonlTracker, resume_step: int = 0) -> None:
    tracker.start(run_name=None, params={}, resume_step=resume_step)


def test_each_log_is_a_line_of_strict_json(store: Store) -> None:
    tracker = JsonlTracker(store.url)
    _start(tracker)
    tracker.log({"loss": 0.5, "grad_norm": math.inf}, 1)
    tracker.log({"loss": math.nan}, 2)
    tracker.close()
    lines = _lines(store)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (2, "NaN")]
    assert lines[0]["grad_norm"] == "Infinity"


def test_after_a_resume_no_step_appears_twice_and_a_torn_line_is_gone(store: Store) -> None:
    tracker = JsonlTracker(store.url)
    _start(tracker)
    for step in (10, 20, 30):
        tracker.log({"loss": step}, step)
    tracker.close()
    store.write_bytes("metrics.jsonl", store.read_bytes("metrics.jsonl") + b'{"step": 40, "lo')

    resumed = JsonlTracker(store.url)
    _start(resumed, resume_step=20)
    resumed.log({"loss": 31}, 30)
    resumed.close()
    assert [(line["step"], line["loss"]) for line in _lines(store)] == [(10, 10.0), (20, 20.0), (30, 31)]


def test_a_new_training_begins_a_new_file(store: Store) -> None:
    for loss in (1.0, 2.0):
        tracker = JsonlTracker(store.url)
        _start(tracker)
        tracker.log({"loss": loss}, 1)
        tracker.close()
    assert [line["loss"] for line in _lines(store)] == [2.0]


def test_lines_after_close_are_kept_too(store: Store) -> None:
    tracker = JsonlTracker(store.url)
    _start(tracker)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    tracker.log({"eval_loss": 2.0}, 1)
    tracker.close()
    assert len(_lines(store)) == 2


def test_a_folder_that_cannot_be_written_costs_the_file_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file is in the way")
    tracker = JsonlTracker(str(tmp_path / "out"))
    _start(tracker)
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    tracker.close()
    assert len(caplog.records) == 1
    assert "metrics.jsonl cannot be written" in caplog.text


# -- the callback -----------------------------------------------------------------------------------------------------


class Recorder:
    """A tracker that remembers what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        self.told.append(("start", run_name, dict(params), resume_step))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.told.append(("log", dict(metrics), step))

    def close(self, status: str = "FINISHED") -> None:
        self.told.append(("close", status))


ARGS = SimpleNamespace(run_name="r", to_sanitized_dict=lambda: {"lr": 1})


def _state(step: int, *, zero: bool = True) -> Any:
    return SimpleNamespace(global_step=step, is_world_process_zero=zero)


def test_a_training_is_started_logged_and_closed_and_a_later_evaluation_joins_it() -> None:
    recorder = Recorder()
    callback = TrackingCallback([recorder])
    callback.on_train_begin(ARGS, _state(5), None)
    callback.on_log(ARGS, _state(6), None, logs={"loss": 1.0, "note": "text"})
    callback.on_train_end(ARGS, _state(6), None)
    callback.on_log(ARGS, _state(6), None, logs={"eval_loss": 2.0})
    assert recorder.told == [
        ("start", "r", {"lr": 1}, 5),
        ("log", {"loss": 1.0}, 6),
        ("close", "FINISHED"),
        ("log", {"eval_loss": 2.0}, 6),
        ("close", "FINISHED"),
    ]


def test_an_evaluation_alone_is_tracked_and_closed() -> None:
    recorder = Recorder()
    callback = TrackingCallback([recorder])
    callback.on_log(ARGS, _state(0), None, logs={"eval_loss": 2.0})
    assert [told[0] for told in recorder.told] == ["start", "log", "close"]


def test_other_ranks_track_nothing() -> None:
    recorder = Recorder()
    callback = TrackingCallback([recorder])
    callback.on_train_begin(ARGS, _state(0, zero=False), None)
    callback.on_log(ARGS, _state(1, zero=False), None, logs={"loss": 1.0})
    callback.on_train_end(ARGS, _state(1, zero=False), None)
    assert recorder.told == []


def test_a_training_that_follows_a_failed_one_closes_that_first() -> None:
    recorder = Recorder()
    callback = TrackingCallback([recorder])
    callback.on_train_begin(ARGS, _state(0), None)
    callback.on_train_begin(ARGS, _state(0), None)
    callback.on_train_end(ARGS, _state(0), None)
    assert [told[:2] for told in recorder.told if told[0] == "close"] == [("close", "FAILED"), ("close", "FINISHED")]


@pytest.mark.parametrize(("ending", "status"), [("1 / 0", "FAILED"), ("raise KeyboardInterrupt", "KILLED")])
def test_a_process_that_ends_in_the_middle_says_how(ending: str, status: str) -> None:
    code = f"""if 1:
        from types import SimpleNamespace
        from trainer_lib.trackers.callback import TrackingCallback
        class Telling:
            def start(self, **kwargs): pass
            def close(self, status): print(status)
        args = SimpleNamespace(run_name="r", to_sanitized_dict=dict)
        state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        TrackingCallback([Telling()]).on_train_begin(args, state, None)
        {ending}
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [status], done.stderr
    assert done.returncode != 0
