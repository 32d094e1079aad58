"""The trackers' protocol, JSON lines, parameters without secrets, names of metrics, and the callback for them."""

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

from tests.support.mlflow_store import fresh_store, points, runs
from tests.support.repository import ROOT
from trainer_lib import JsonlCallback
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.trackers.jsonl import JsonlTracker, LineFile
from trainer_lib.trackers.mlflow.delivery import Delivery
from trainer_lib.trackers.names import flatten_params, group_log, group_results, with_intervals
from trainer_lib.trackers.spool import Session
from trainer_lib.trackers.vendors import TrackingCallback, numbers_only

ARGS = SimpleNamespace(run_name="r", to_sanitized_dict=lambda: {"lr": 1})


# -- names and values -------------------------------------------------------------------------------------------------
def test_jsonl_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        JsonlCallback().create(SimpleNamespace(output_dir=None))


def test_only_numbers_are_tracked_and_nan_is_one() -> None:
    tracked = {"int": 3, "float": 0.5, "numpy": np.float32(0.25), "array": np.array(2), "tensor": torch.tensor(1.5)}
    other = {"vector": torch.ones(3), "text": "12", "list": [1], "none": None}
    numbers = numbers_only({**tracked, **other, "nan": math.nan, "huge": 10**400})
    assert math.isnan(numbers.pop("nan"))
    assert numbers == {"int": 3, "float": 0.5, "numpy": 0.25, "array": 2, "tensor": 1.5, "huge": math.inf}


def test_what_a_trainer_logs_is_grouped_and_its_timings_are_left_out() -> None:
    logs = {
        "loss": 0.5,
        "grad_norm": 1.0,
        "epoch": 1.0,
        "eval_accuracy": 0.9,
        "eval_rows_loss": 0.1,
        "eval_runtime": 3.0,
        "eval_model_preparation_time": 0.1,
        "test_loss": 0.2,
        "train_loss": 0.7,
        "train_runtime": 60.0,
        "train_tokens_per_second_per_gpu": 7.0,
        "total_flos": 1e9,
        "system/gpu": 4.0,
        "own_runtime": 5.0,
    }
    assert group_log(logs) == {
        "train/loss": 0.5,
        "train/grad_norm": 1.0,
        "train/epoch": 1.0,
        "eval/accuracy": 0.9,
        "eval/rows_loss": 0.1,
        "test/loss": 0.2,
        "train/mean_loss": 0.7,
        "system/gpu": 4.0,
        "train/own_runtime": 5.0,
    }


def test_a_result_is_grouped_by_split_or_stage_without_epoch_timings_and_texts() -> None:
    measured = {"accuracy": 0.9, "runtime": 1.0, "epoch": 0.0, "samples_per_second": 9.0, "note": "x", "ok": True}
    assert group_results("evaluate", {"test": measured, "train": {"loss": 1.0}}) == {
        "test/accuracy": 0.9,
        "train-split/loss": 1.0,  # `train/loss` is the curve
    }
    assert group_results("count-rows", {"counted": 80}) == {"count-rows/counted": 80.0}
    assert group_results("train", {"train_loss": 0.5, "train_runtime": 9.0, "epoch": 3.0}) == {"train/mean_loss": 0.5}
    metrics = {"loss": 0.5, "accuracy": 0.95, "accuracy_low": 0.93, "accuracy_high": 0.97, "water_low": 2.0}
    assert with_intervals(metrics) == {"loss": "0.5", "accuracy": "0.95 (0.93 to 0.97)", "water_low": "2"}


# -- parameters -------------------------------------------------------------------------------------------------------
def test_parameters_are_flat_and_short() -> None:
    flat = flatten_params({"train": {"args": {"lr": 1e-3, "betas": [0.9, 0.99]}}, "empty": {}, "long": "x" * 9000})
    assert len(flat.pop("long")) == 500
    assert flat == {"train.args.lr": "0.001", "train.args.betas": "[0.9, 0.99]", "empty": "{}"}
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


def test_what_only_sounds_like_a_secret_is_shown() -> None:
    for key in ("pad_token", "average_tokens_across_devices", "tokenizer", "num_tokens", "key_size"):
        assert flatten_params({key: "plain"}) == {key: "plain"}
    assert flatten_params({"hub_token": None}) == {"hub_token": "None"}


# -- lines of files ---------------------------------------------------------------------------------------------------
@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store = Store.open(tmp_path / "out" if request.param == "local" else "memory://test-trackers/out")
    yield store
    store.delete_tree()


def test_lines_are_kept_in_order_and_replaced_at_once(store: Store) -> None:
    file = LineFile(store, "some.txt")
    assert file.read() == []
    file.replace([b"a\n"])
    file.append(b"b\n")
    file.close()
    assert store.read_bytes("some.txt") == b"a\nb\n"
    again = LineFile(store, "some.txt")
    again.replace(again.read()[:1])
    again.append(b"c\n")
    again.close()
    assert file.read() == [b"a\n", b"c\n"]


def tracked(store: Store, *steps: int, resume_step: int = 0, loss: float | None = None) -> list[tuple[int, Any]]:
    """Log some steps in a new training; the steps and losses of the file then."""
    tracker = JsonlTracker(store.url)
    tracker.start(run_name=None, params={}, resume_step=resume_step)
    for step in steps:
        tracker.log({"loss": step if loss is None else loss, "grad_norm": math.inf}, step)
    tracker.close()
    lines = [json.loads(line) for line in store.read_bytes("metrics.jsonl").splitlines()]
    assert all(line["grad_norm"] == "Infinity" for line in lines)
    return [(line["step"], line["loss"]) for line in lines]


def test_each_log_is_a_line_of_strict_json(store: Store) -> None:
    """After a resume no step appears twice and a torn line is gone; a new training begins a new file."""
    assert tracked(store, 10, 20, 30) == [(10, 10), (20, 20), (30, 30)]
    store.write_bytes("metrics.jsonl", store.read_bytes("metrics.jsonl") + b'{"step": 40, "lo')
    assert LineFile(store, "metrics.jsonl").read() == store.read_bytes("metrics.jsonl").splitlines(keepends=True)[:3]
    assert tracked(store, 30, resume_step=20, loss=math.nan) == [(10, 10), (20, 20), (30, "NaN")]
    assert tracked(store, 1) == [(1, 1)]


def test_lines_after_close_are_kept_too(store: Store) -> None:
    tracker = JsonlTracker(store.url)
    tracker.start(run_name=None, params={}, resume_step=0)
    for _ in range(2):
        tracker.log({"loss": 1.0}, 1)
        tracker.close()
    assert len(store.read_bytes("metrics.jsonl").splitlines()) == 2


def test_a_folder_that_cannot_be_written_costs_the_file_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file is in the way")
    tracker = JsonlTracker(str(tmp_path / "out"))
    tracker.start(run_name=None, params={}, resume_step=0)
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    tracker.close()
    assert len(caplog.records) == 1
    assert "metrics.jsonl cannot be written" in caplog.text


# -- points that a run of MLflow has already are not written again ----------------------------------------------------
LARGEST = sys.float_info.max  # as MLflow keeps infinity
#: By metric: when each value was told, and how it counts; the values of its points.
TOLD: dict[str, tuple[list[tuple[int, float, Any]], list[float]]] = {
    # A value measured once and told by several tries of a stage; one that is measured again is a point of its own.
    "error": ([(1, 0.98, True), (2, 0.98, True), (3, 0.99, True), (4, 0.99, True)], [0.98, 0.99]),
    "infinite": ([(time_ms, math.inf, True) for time_ms in (1, 2, 3)], [LARGEST]),
    "beside": ([(1, 0.5, None), (2, 0.6, "step")], [0.5]),  # evaluated beside the training: the step has one point
}


def test_points_told_twice_are_written_once(tmp_path: Path) -> None:
    uri = fresh_store(tmp_path / "store")
    head = {"tracking_uri": uri, "token": "t", "experiment": "digits", "run_name": "run", "start_ms": 1}
    session = Session.create(tmp_path / "spool", head)
    for name, (told, _) in TOLD.items():
        for time_ms, value, once in told:
            session.write({"s": 100, "t": time_ms, "m": {name: value}, **({"once": once} if once else {})})
    session.close()
    assert Delivery(tmp_path / "spool", uri).deliver()
    [run] = runs(uri)
    for name, (_, values) in TOLD.items():
        assert points(uri, run.info.run_id, name) == [(100, value) for value in values], name


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


def _state(step: int, *, zero: bool = True) -> Any:
    return SimpleNamespace(global_step=step, is_world_process_zero=zero)


def test_a_training_is_started_logged_and_closed_and_a_later_evaluation_joins_it() -> None:
    recorder, quiet, alone = Recorder(), Recorder(), Recorder()
    for callback, zero in ((TrackingCallback(recorder), True), (TrackingCallback(quiet), False)):
        callback.on_train_begin(ARGS, _state(5, zero=zero), None)
        callback.on_log(ARGS, _state(6, zero=zero), None, logs={"loss": 1.0, "note": "text"})
        callback.on_train_end(ARGS, _state(6, zero=zero), None)
        callback.on_log(ARGS, _state(6, zero=zero), None, logs={"eval_loss": 2.0})
    assert recorder.told == [
        ("start", "r", {"lr": 1}, 5),
        ("log", {"loss": 1.0}, 6),
        ("close", "FINISHED"),
        ("log", {"eval_loss": 2.0}, 6),
        ("close", "FINISHED"),
    ]
    assert quiet.told == [], "other ranks track nothing"
    TrackingCallback(alone).on_log(ARGS, _state(0), None, logs={"eval_loss": 2.0})
    assert [told[0] for told in alone.told] == ["start", "log", "close"]


def test_a_training_that_follows_a_failed_one_closes_that_first() -> None:
    recorder = Recorder()
    callback = TrackingCallback(recorder)
    callback.on_train_begin(ARGS, _state(0), None)
    callback.on_train_begin(ARGS, _state(0), None)
    callback.on_train_end(ARGS, _state(0), None)
    assert [told[:2] for told in recorder.told if told[0] == "close"] == [("close", "FAILED"), ("close", "FINISHED")]


@pytest.mark.parametrize(("ending", "status"), [("1 / 0", "FAILED"), ("raise KeyboardInterrupt", "KILLED")])
def test_a_process_that_ends_in_the_middle_says_how(ending: str, status: str) -> None:
    code = f"""if 1:
        from types import SimpleNamespace
        from trainer_lib.trackers.vendors import TrackingCallback
        class Telling:
            def start(self, **kwargs): pass
            def close(self, status): print(status)
        args = SimpleNamespace(run_name="r", to_sanitized_dict=dict)
        state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        TrackingCallback(Telling()).on_train_begin(args, state, None)
        {ending}
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [status], done.stderr
    assert done.returncode != 0
