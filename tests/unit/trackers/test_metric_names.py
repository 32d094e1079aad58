"""Names of metrics in the MLflow run of a pipeline: in groups, and without charts of a single point."""

from __future__ import annotations

from trainer_lib.trackers.names import group_log, group_results, with_intervals


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


def test_a_result_is_grouped_by_split_without_epoch_timings_and_texts() -> None:
    measured = {"accuracy": 0.9, "runtime": 1.0, "epoch": 0.0, "samples_per_second": 9.0, "note": "x", "ok": True}
    assert group_results("evaluate", {"test": measured, "train": {"loss": 1.0}}) == {
        "test/accuracy": 0.9,
        "train-split/loss": 1.0,  # `train/loss` is the curve
    }


def test_a_result_without_splits_is_grouped_by_its_stage() -> None:
    assert group_results("count-rows", {"counted": 80}) == {"count-rows/counted": 80.0}
    assert group_results("train", {"train_loss": 0.5, "train_runtime": 9.0, "epoch": 3.0}) == {"train/mean_loss": 0.5}


def test_an_interval_stands_behind_its_metric() -> None:
    metrics = {"loss": 0.5, "accuracy": 0.95, "accuracy_low": 0.93, "accuracy_high": 0.97, "water_low": 2.0}
    assert with_intervals(metrics) == {"loss": "0.5", "accuracy": "0.95 (0.93 to 0.97)", "water_low": "2"}
