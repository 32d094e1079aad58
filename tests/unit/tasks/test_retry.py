"""Which failures are tried again, what they are charged, and what memory running out lowers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Failed

from tasks.stage import retry as _retry
from tasks.stage.retry import (
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
from trainer_lib import errors
from trainer_lib.arguments import TrainingArguments, numeric_fields
from trainer_lib.storage import Store

RETRIED = {
    "StorageError",
    "StoreUnreachableError",
    "InfrastructureError",
    "HangError",
    "OutOfMemoryError",
    "Preempted",
}


@pytest.mark.parametrize("cls", list(errors._CLASSES.values()))
def test_a_retry_is_made_only_where_the_error_says_it_is_worth_it(cls: type[errors.TrainflowError]) -> None:
    decision = decide(cls("x"), retries=3, past=Past(used=0), can_halve=True)
    assert decision.retry is (cls.__name__ in RETRIED)
    assert decision.reason


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ValueError("a bug")])
def test_what_is_not_typed_is_never_retried(error: BaseException) -> None:
    assert not decide(error, retries=3, past=Past(used=0), can_halve=True).retry


def test_who_stops_a_stage_reads_that_the_same_command_continues() -> None:
    for error in (KeyboardInterrupt(), errors.Interrupted("Ctrl-C")):
        decision = decide(error, retries=3, past=Past(used=0), can_halve=True)
        assert decision == Decision(False, "the same command continues")


def test_the_budget_ends(tmp_path: Path) -> None:
    error = errors.StorageError("throttled")
    assert decide(error, retries=2, past=Past(used=1), can_halve=False).retry
    assert not decide(error, retries=2, past=Past(used=2), can_halve=False).retry
    assert decide(errors.Preempted("stop"), retries=0, past=Past(used=9), can_halve=False).retry
    assert decide(errors.OutOfMemoryError("full"), retries=0, past=Past(used=9), can_halve=True).retry
    assert not decide(errors.OutOfMemoryError("full"), retries=9, past=Past(used=0), can_halve=False).retry


def test_a_store_out_of_reach_is_tried_for_a_quarter_of_an_hour() -> None:
    error = errors.StoreUnreachableError("away")
    assert decide(error, retries=1, past=Past(used=9, outages=OUTAGE_TRIES - 1), can_halve=False).retry
    assert not decide(error, retries=1, past=Past(outages=OUTAGE_TRIES), can_halve=False).retry
    assert not decide(error, retries=0, past=Past(), can_halve=False).retry
    assert sum(DELAYS_S[:OUTAGE_TRIES]) > 15 * 60


@pytest.mark.parametrize(
    ("before", "now", "retried"),
    [((), 120, True), ((120,), 120, False), ((120,), 110, False), ((120,), 121, True), ((None,), None, False)],
)
def test_a_hang_that_gets_no_further_is_not_tried_again(
    before: tuple[int | None, ...], now: int | None, retried: bool
) -> None:
    error = errors.HangError("stuck", step=now)
    assert decide(error, retries=3, past=Past(used=len(before), hung_at=before), can_halve=False).retry is retried


def attempt(ledger: Ledger, error: BaseException | None, halvings: int = 0) -> int:
    number = ledger.begin(reason="test", batch_halvings=halvings)
    ledger.end(number, "failed" if error else "committed", error=error)
    return number


def test_the_ledger_charges_failures_but_not_preemptions_or_halvings(tmp_path: Path) -> None:
    ledger = Ledger(Store.open(tmp_path))
    numbers = [
        attempt(ledger, error)
        for error in (
            errors.StorageError("a"),
            errors.Preempted("b"),
            errors.OutOfMemoryError("c"),
            errors.InfrastructureError("d"),
        )
    ]
    assert numbers == [1, 2, 3, 4]
    assert ledger.past().used == 2
    attempt(ledger, errors.StoreUnreachableError("e"))
    attempt(ledger, errors.HangError("f", step=7))
    assert ledger.past() == Past(used=3, outages=1, hung_at=(7,))
    ledger.begin(reason="its end could not be written", batch_halvings=0)
    failing = ledger.begin(reason="now", batch_halvings=0)
    assert ledger.past(before=failing) == Past(used=3, outages=2, hung_at=(7,))


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
    ledger = Ledger(Store.open(tmp_path))
    attempt(ledger, errors.StorageError("why", details="x" * 100_000))
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
def test_a_can_halve_halves_the_micro_batch_and_keeps_the_global_batch(args: dict[str, Any]) -> None:
    before = TrainingArguments.from_dict(args).per_device_train_batch_size
    for halvings in range(max_halvings(before) + 2):
        lowered = halve_training_batch(args, halvings, world_size=2)
        parsed = TrainingArguments.from_dict(lowered)
        assert parsed.per_device_train_batch_size == max(1, before >> halvings)
        assert global_batch(lowered, 2) == global_batch(args, 2)
        same = numeric_fields(parsed, data_parallel_size=2) == numeric_fields(
            TrainingArguments.from_dict(args), data_parallel_size=2
        )
        assert same  # the content key does not move


def test_a_batch_that_is_split_stays_divisible_among_the_processes() -> None:
    args = {"per_device_train_batch_size": 12, "accelerator_config": {"split_batches": True}}
    sizes = [halve_training_batch(args, halvings, world_size=2)["per_device_train_batch_size"] for halvings in range(4)]
    assert sizes == [12, 6, 2, 2]  # 6, 3, 1 and 1 samples on each of two processes
    alone = {"global_batch_size": 12}  # a process takes its whole share of six
    assert halve_training_batch(alone, 0, world_size=2, varies=True) == alone
    assert halve_training_batch(alone, 1, world_size=2)["per_device_train_batch_size"] == 3
    assert {global_batch(halve_training_batch(args, halvings, world_size=2), 2) for halvings in range(4)} == {12}


def test_evaluation_halves_its_batch() -> None:
    assert halve_evaluation_batch({"per_device_eval_batch_size": 6}, 2)["per_device_eval_batch_size"] == 1
    assert halve_evaluation_batch({"seed": 1}, 0) == {"seed": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluation_halves_a_batch_of_an_old_name() -> None:
    lowered = TrainingArguments.from_dict(halve_evaluation_batch({"per_gpu_eval_batch_size": 6}, 1))
    assert lowered.per_device_eval_batch_size == 3


def test_evaluation_halves_the_shares_of_a_batch_that_is_split() -> None:
    args = {"per_device_eval_batch_size": 12, "accelerator_config": {"split_batches": True}}
    sharers = count_sharers(TrainingArguments.from_dict(args), lambda: 2)
    sizes = [halve_evaluation_batch(args, each, shared_by=sharers)["per_device_eval_batch_size"] for each in range(4)]
    assert sizes == [12, 6, 2, 2]  # 6, 3, 1 and 1 samples on each of two processes
    assert max_halvings(12, shared_by=sharers) == 2


def test_the_processes_are_not_counted_unless_they_share_a_batch() -> None:
    assert count_sharers(TrainingArguments(), lambda: pytest.fail("this looks at the machine's devices")) == 1


@pytest.mark.parametrize(("size", "halvings"), [(1, 0), (2, 1), (3, 1), (8, 3), (9, 3)])
def test_the_ladder_ends_at_one_sample(size: int, halvings: int) -> None:
    assert max_halvings(size) == halvings
    assert size >> halvings == 1


def test_delays_grow_to_minutes() -> None:
    assert DELAYS_S[0] <= 1
    assert sorted(DELAYS_S) == DELAYS_S
    assert DELAYS_S[-1] == 300


def test_the_decision_rides_on_the_error_that_prefect_hands_back() -> None:
    error = errors.StorageError("x")
    failed: State[Any] = Failed(data=error)
    ask: Callable[..., bool] = should_retry
    assert ask(None, None, failed) is False  # nothing was decided: it is not retried
    attach_decision(error, decide(error, retries=1, past=Past(used=0), can_halve=False))
    assert ask(None, None, failed) is True
    attach_decision(error, decide(error, retries=1, past=Past(used=1), can_halve=False))
    assert ask(None, None, failed) is False
