"""Which failures are tried again, what they are charged, what memory running out lowers, and where the time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Failed

from trainer_lib import errors
from trainer_lib.arguments import TrainingArguments, numeric_fields
from trainer_lib.base.outputs import find_peak, utilization
from trainer_lib.storage import Store
from trainflow.tasks.stage import retry as _retry
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.progress import StageProgress
from trainflow.tasks.stage.retry import (
    DELAYS_S,
    OUTAGE_TRIES,
    Decision,
    Ledger,
    Past,
    attach_decision,
    count_sharers,
    decide,
    halve_evaluation_batch,
    halve_training_batch,
    max_halvings,
    should_retry,
)

RETRIED = {"StorageError", "StoreUnreachableError", "InfrastructureError", "HangError", "OutOfMemoryError", "Preempted"}


STORAGE, AWAY, FULL = errors.StorageError("x"), errors.StoreUnreachableError("x"), errors.OutOfMemoryError("x")
WHOLE = Past(used=0)
START = {"started": "2026-01-01T00:00:00Z"}


def hangs(before: list[int | None], now: int | None) -> tuple[BaseException, int, Past, bool]:
    return errors.HangError("stuck", step=now), 3, Past(used=len(before), hung_at=tuple(before)), False


@pytest.mark.parametrize(
    ("failed", "retried"),
    [
        *(((cls("x"), 3, WHOLE, True), cls.__name__ in RETRIED) for cls in errors._CLASSES.values()),
        *(((error, 3, WHOLE, True), False) for error in (KeyboardInterrupt(), SystemExit(1), ValueError("a bug"))),
        # The budget ends.
        ((STORAGE, 2, Past(used=1), False), True),
        ((STORAGE, 2, Past(used=2), False), False),
        ((errors.Preempted("stop"), 0, Past(used=9), False), True),
        ((FULL, 0, Past(used=9), True), True),
        ((FULL, 9, WHOLE, False), False),
        # A store out of reach is tried for a quarter of an hour.
        ((AWAY, 1, Past(used=9, outages=OUTAGE_TRIES - 1), False), True),
        ((AWAY, 1, Past(outages=OUTAGE_TRIES), False), False),
        ((AWAY, 0, Past(), False), False),
        # A hang that gets no further is not tried again.
        (hangs([], 120), True),
        (hangs([120], 120), False),
        (hangs([120], 110), False),
        (hangs([120], 121), True),
        (hangs([None], None), False),
    ],
)
def test_a_retry_is_made_only_where_it_is_worth_it(failed: tuple[Any, int, Past, bool], retried: bool) -> None:
    error, retries, past, can_halve = failed
    decision = decide(error, retries=retries, past=past, can_halve=can_halve)
    assert decision.retry is retried
    assert decision.reason


def test_who_stops_a_stage_reads_that_the_same_command_continues() -> None:
    for error in (KeyboardInterrupt(), errors.Interrupted("Ctrl-C")):
        decision = decide(error, retries=3, past=Past(used=0), can_halve=True)
        assert decision == Decision(False, "the same command continues")


def test_delays_grow_to_minutes_and_to_a_quarter_of_an_hour() -> None:
    assert sum(DELAYS_S[:OUTAGE_TRIES]) > 15 * 60
    assert DELAYS_S[0] <= 1
    assert sorted(DELAYS_S) == DELAYS_S
    assert DELAYS_S[-1] == 300


def attempt(ledger: Ledger, error: BaseException | None, halvings: int = 0) -> int:
    number = ledger.begin(reason="test", batch_halvings=halvings)
    ledger.end(number, "failed" if error else "committed", error=error)
    return number


def test_the_ledger_charges_failures_but_not_preemptions_or_halvings(tmp_path: Path) -> None:
    ledger = Ledger(Store.open(tmp_path))
    failures = [errors.StorageError, errors.Preempted, errors.OutOfMemoryError, errors.InfrastructureError]
    assert [attempt(ledger, failure("x")) for failure in failures] == [1, 2, 3, 4]
    assert ledger.past().used == 2
    attempt(ledger, errors.StoreUnreachableError("e"))
    attempt(ledger, errors.HangError("f", step=7))
    assert ledger.past() == Past(used=3, outages=1, hung_at=(7,))
    ledger.begin(reason="its end could not be written", batch_halvings=0)
    assert ledger.past(before=ledger.begin(reason="now", batch_halvings=0)) == Past(used=3, outages=2, hung_at=(7,))


@pytest.mark.parametrize("content", ["{torn", "[]", '{"error": 5, "outcome": "failed"}', "x" * (2 << 20)])
def test_a_record_that_cannot_be_read_is_named_and_counts_as_little_as_possible(tmp_path: Path, content: str) -> None:
    ledger = Ledger(Store.open(tmp_path))
    attempt(ledger, errors.OutOfMemoryError("a"))
    attempt(ledger, errors.OutOfMemoryError("b"), halvings=1)
    (tmp_path / "attempts" / "0002.end.json").write_text(content)
    assert ledger.batch_halvings() == 1
    assert ledger.past().used <= 1
    assert bool(ledger.unreadable) is ("error" not in content)


def test_a_new_command_has_a_new_budget_but_remembers_what_memory_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(Store.open(tmp_path))
    attempt(ledger, errors.StorageError("a"))
    attempt(ledger, errors.OutOfMemoryError("b"))
    attempt(ledger, errors.OutOfMemoryError("c"), halvings=1)
    monkeypatch.setattr(_retry, "_INVOCATION", "another process")
    assert (ledger.past().used, ledger.batch_halvings()) == (0, 2)


def test_an_attempt_that_died_silently_or_a_torn_record_does_not_stop_the_next(tmp_path: Path) -> None:
    ledger = Ledger(Store.open(tmp_path))
    ledger.begin(reason="first", batch_halvings=0)
    (tmp_path / "attempts" / "0002.json").write_text("{torn")
    assert ledger.begin(reason="third", batch_halvings=0) == 3
    assert (ledger.past().used, ledger.batch_halvings()) == (0, 0)


def test_records_keep_the_failure_but_not_endless_details(tmp_path: Path) -> None:
    attempt(Ledger(Store.open(tmp_path)), errors.StorageError("why", details="x" * 100_000))
    text = (tmp_path / "attempts" / "0001.end.json").read_text()
    assert '"why"' in text
    assert len(text) < 20_000


def global_batch(args: dict[str, Any], world_size: int) -> int:
    parsed = TrainingArguments.from_dict(args)
    return int(numeric_fields(parsed, data_parallel_size=world_size)["global_batch_size"])


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 5, "global_batch_size": 30},
        {"per_gpu_train_batch_size": 4},
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_halving_halves_the_micro_batch_and_keeps_the_global_batch(args: dict[str, Any]) -> None:
    given = TrainingArguments.from_dict(args)
    before = given.per_device_train_batch_size
    for halvings in range(max_halvings(before) + 2):
        lowered = TrainingArguments.from_dict(halve_training_batch(args, halvings, world_size=2))
        assert lowered.per_device_train_batch_size == max(1, before >> halvings)
        # The global batch and the content key do not move.
        assert numeric_fields(lowered, data_parallel_size=2) == numeric_fields(given, data_parallel_size=2)


def test_a_batch_that_is_split_stays_divisible_among_the_processes() -> None:
    args = {"per_device_train_batch_size": 12, "accelerator_config": {"split_batches": True}}
    sizes = [halve_training_batch(args, halvings, world_size=2)["per_device_train_batch_size"] for halvings in range(4)]
    assert sizes == [12, 6, 2, 2]  # 6, 3, 1 and 1 samples on each of two processes
    alone = {"global_batch_size": 12}  # a process takes its whole share of six
    assert halve_training_batch(alone, 0, world_size=2, varies=True) == alone
    assert halve_training_batch(alone, 1, world_size=2)["per_device_train_batch_size"] == 3
    assert {global_batch(halve_training_batch(args, halvings, world_size=2), 2) for halvings in range(4)} == {12}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluation_halves_its_batch_and_the_shares_of_one_that_is_split() -> None:
    assert halve_evaluation_batch({"per_device_eval_batch_size": 6}, 2)["per_device_eval_batch_size"] == 1
    assert halve_evaluation_batch({"seed": 1}, 0) == {"seed": 1}
    lowered = TrainingArguments.from_dict(halve_evaluation_batch({"per_gpu_eval_batch_size": 6}, 1))  # an old name
    assert lowered.per_device_eval_batch_size == 3
    args = {"per_device_eval_batch_size": 12, "accelerator_config": {"split_batches": True}}
    sharers = count_sharers(TrainingArguments.from_dict(args), lambda: 2)
    sizes = [halve_evaluation_batch(args, each, shared_by=sharers)["per_device_eval_batch_size"] for each in range(4)]
    assert sizes == [12, 6, 2, 2]  # 6, 3, 1 and 1 samples on each of two processes
    assert [max_halvings(size) for size in (1, 2, 3, 8, 9)] == [0, 1, 1, 3, 3]
    assert max_halvings(12, shared_by=sharers) == 2
    # Processes that share no batch are not counted.
    assert count_sharers(TrainingArguments(), lambda: pytest.fail("this looks at the machine's devices")) == 1


def test_the_decision_rides_on_the_error_that_prefect_hands_back() -> None:
    error = errors.StorageError("x")
    failed: State[Any] = Failed(data=error)
    ask: Callable[..., bool] = should_retry
    assert ask(None, None, failed) is False  # nothing was decided: it is not retried
    attach_decision(error, decide(error, retries=1, past=Past(used=0), can_halve=False))
    assert ask(None, None, failed) is True
    attach_decision(error, decide(error, retries=1, past=Past(used=1), can_halve=False))
    assert ask(None, None, failed) is False


def end(outcome: str, seconds: int, **times: Any) -> dict[str, Any]:
    return {"ended": f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}Z", "outcome": outcome, **times}


def test_what_was_trained_after_the_last_save_of_a_failed_attempt_is_lost() -> None:
    failed = end("failed", 100, spent={"trained": 80.0, "saved": 5.0}, kept={"trained": 60.0, "saved": 5.0})
    done = end("committed", 60, spent={"trained": 40.0, "restored": 4.0, "evaluated": 6.0})
    found = Goodput.of([(START, failed), (START, done)])
    assert (found.trained_s, found.lost_s, found.all_s) == (100.0, 20.0, 160.0)
    assert (found.saved_s, found.restored_s, found.evaluated_s, found.other_s) == (5.0, 4.0, 6.0, 25.0)
    assert found.share == pytest.approx(100 / 160)
    assert found.metrics()["goodput"] == found.share
    assert dict(found.rows())["lost"] == "20 s"


def test_nothing_saved_is_all_lost_and_an_attempt_without_an_end_is_named() -> None:
    found = Goodput.of([(START, end("interrupted", 50, spent={"trained": 40.0})), (START, {}), ({}, {})])
    assert (found.trained_s, found.lost_s, found.unknown) == (0.0, 40.0, 2)
    assert "2 attempts" in dict(found.rows())["not recorded"]
    open_one = Goodput.of([(START, {})])
    assert (open_one.share, open_one.metrics(), open_one.rows()) == (None, {}, [])
    for times in ({}, {"spent": None}, {"spent": [1]}, {"spent": {"trained": 1.0}, "kept": "x"}):  # older versions
        assert Goodput.of([(START, end("failed", 10, **times))]).all_s == 10.0


def test_the_newest_report_of_the_worker_is_kept_with_the_attempt(tmp_path: Any) -> None:
    progress = StageProgress("train")
    progress.event({"event": "save", "spent": {"trained": 3.0}})
    progress.event({"event": "progress", "spent": {"trained": 5.0}})
    ledger = Ledger(Store.open(tmp_path))
    ledger.end(ledger.begin(reason="never run before", batch_halvings=0), "failed", times=progress.times)
    [(_, record)] = ledger.records()
    assert (record["spent"], record["kept"]) == ({"trained": 5.0}, {"trained": 3.0})
    assert Goodput.of(ledger.records()).lost_s == 2.0


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        *((device, "bf16", None) for device in ("CPU", "NVIDIA A10G", "AMD Instinct MI300X", "NVIDIA RTX A4000", "")),
    ],
)
def test_peaks_are_found_by_the_drivers_name(device: str, precision: str, tera: float | None) -> None:
    if tera is None:
        assert utilization(1e15, 1.0, devices=1, device=device, precision=precision) is None
    else:
        assert find_peak(device, precision) == pytest.approx(tera * 1e12)


def test_the_utilization_is_flops_over_time_devices_and_peak() -> None:
    found = utilization(2 * 312e12 * 10 * 0.4, 10.0, devices=2, device="NVIDIA A100-SXM4-80GB", precision="bf16")
    assert found == pytest.approx(0.4)
