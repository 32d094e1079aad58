"""Where the time of a stage went, added up from the records of its attempts; and the peaks for the MFU."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.stage.goodput import add_up
from tasks.stage.progress import StageProgress
from tasks.stage.retry import Ledger
from trainer_lib.peak_flops import find_peak, utilization
from trainer_lib.storage import Store

START = {"started": "2026-01-01T00:00:00Z"}


def end(outcome: str, seconds: int, **times: Any) -> dict[str, Any]:
    return {"ended": f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}Z", "outcome": outcome, **times}


def test_what_was_trained_after_the_last_save_of_a_failed_attempt_is_lost() -> None:
    failed = end("failed", 100, spent={"trained": 80.0, "saved": 5.0}, kept={"trained": 60.0, "saved": 5.0})
    done = end("committed", 60, spent={"trained": 40.0, "restored": 4.0, "evaluated": 6.0})
    found = add_up([(START, failed), (START, done)])
    assert (found.trained_s, found.lost_s, found.all_s) == (100.0, 20.0, 160.0)
    assert (found.saved_s, found.restored_s, found.evaluated_s, found.other_s) == (5.0, 4.0, 6.0, 25.0)
    assert found.share == pytest.approx(100 / 160)
    assert found.metrics()["goodput"] == found.share
    assert dict(found.rows())["lost"] == "20.0 s"


def test_nothing_saved_is_all_lost_and_an_attempt_without_an_end_is_named() -> None:
    found = add_up([(START, end("interrupted", 50, spent={"trained": 40.0})), (START, {}), ({}, {})])
    assert (found.trained_s, found.lost_s, found.unknown) == (0.0, 40.0, 2)
    assert "2 attempts" in dict(found.rows())["not recorded"]


def test_before_the_first_end_nothing_is_claimed() -> None:
    found = add_up([(START, {})])
    assert found.share is None
    assert not found.metrics()
    assert not found.rows()


@pytest.mark.parametrize("times", [{}, {"spent": None}, {"spent": [1]}, {"spent": {"trained": 1.0}, "kept": "x"}])
def test_records_of_older_versions_are_read(times: dict[str, Any]) -> None:
    assert add_up([(START, end("failed", 10, **times))]).all_s == 10.0


def test_the_newest_report_of_the_worker_is_kept_with_the_attempt(tmp_path: Any) -> None:
    progress = StageProgress("train")
    progress.event({"event": "save", "spent": {"trained": 3.0}})
    progress.event({"event": "progress", "spent": {"trained": 5.0}})
    ledger = Ledger(Store.open(tmp_path))
    number = ledger.begin(reason="never run before", batch_halvings=0)
    ledger.end(number, "failed", times=progress.times)
    [(_, record)] = ledger.records()
    assert (record["spent"], record["kept"]) == ({"trained": 5.0}, {"trained": 3.0})
    assert add_up(ledger.records()).lost_s == 2.0


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
    ],
)
def test_peaks_are_found_by_the_drivers_name(device: str, precision: str, tera: float) -> None:
    assert find_peak(device, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("device", ["CPU", "NVIDIA A10G", "AMD Instinct MI300X", "NVIDIA RTX A4000", ""])
def test_a_device_that_is_not_in_the_table_has_no_utilization(device: str) -> None:
    assert utilization(1e15, 1.0, devices=1, device=device, precision="bf16") is None


def test_the_utilization_is_flops_over_time_devices_and_peak() -> None:
    found = utilization(2 * 312e12 * 10 * 0.4, 10.0, devices=2, device="NVIDIA A100-SXM4-80GB", precision="bf16")
    assert found == pytest.approx(0.4)
