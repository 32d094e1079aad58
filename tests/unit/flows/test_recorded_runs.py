"""What is read from the records of runs: names, details, differences, logs, filters, progress."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.cli.run_filters import parse_age, parse_filter, sort_key
from flows.past_runs import find_run, list_runs
from flows.results import describe_outcomes, flat_metrics
from flows.run_comparison import compare_runs
from flows.run_details import RunDetails, read_details
from flows.run_logs import LogReader, read_attempts
from flows.run_names import describe_settings, flat_settings, name_run
from flows.run_progress import describe_progress, estimate_rest
from flows.run_status import look
from tasks.stage.retry import Ledger
from tests.support.recorded import commit_stage, nightly, record_run, train_spec
from trainer_lib.errors import ConfigError, HangError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def details(storage: str, text: str) -> RunDetails:
    return read_details(storage, find_run(storage, text, field="RUN"))


# -- names ------------------------------------------------------------------------------------------------------------


def test_two_commands_at_once_get_two_names(tmp_path: Path) -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def take(place: int) -> None:
        start.wait()
        found.append(name_run(train_spec(str(tmp_path)), f"{place}" * 16))

    threads = [threading.Thread(target=take, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"toy-{number}" for number in range(1, 9))


def test_a_name_holds_no_path_no_launch_and_no_secret(tmp_path: Path) -> None:
    record = {**train_spec(str(tmp_path)).to_record(), "predict": {"launch": {"processes": 2}, "options": {"url": "x"}}}
    assert not [name for name in flat_settings(record) if "launch" in name or "storage" in name]
    words = describe_settings({}, {"prepare.options.url": "https://me:hunter-2@host/x", "train.args.a": [1, 2]})
    assert "hunter" not in " ".join(words)
    assert words[0] == "a-1+2"
    many = describe_settings({}, {f"train.args.a{number}": number for number in range(9)})
    assert len(many) == 3


# -- details and differences ------------------------------------------------------------------------------------------


def test_a_comparison_names_only_what_differs(tmp_path: Path) -> None:
    storage = str(tmp_path)
    for day, (seed, rate) in enumerate((("one", 0.1), ("two", 0.2)), start=1):
        run_id = f"{day}" * 16
        key = commit_stage(storage, "train", seed, metrics={"train_loss": rate})
        record_run(storage, run_id, day=day, stages={"train": key})
        folder = Store.open(storage).child("runs", run_id)
        folder.write_bytes("spec.yaml", f"train: {{args: {{learning_rate: {rate}, seed: 1}}}}".encode())
        arguments = {"train": {"learning_rate": rate, "warmup_steps": day, "seed": 1}}
        folder.write_bytes("arguments.json", json.dumps(arguments).encode())
    found = compare_runs(details(storage, "toy-1"), details(storage, "toy-2"))
    assert [str(each) for each in found.spec] == ["train.args.learning_rate: 0.1 -> 0.2"]
    assert found.code == ("prepare changed (recipe.py)",)
    assert [str(each) for each in found.arguments] == ["warmup_steps: 1 -> 2"]
    assert found.versions == ()
    [loss] = found.metrics
    assert (loss.old, loss.new) == (0.1, 0.2)
    assert loss.delta == pytest.approx(0.1)
    same = compare_runs(details(storage, "toy-1"), details(storage, "toy-1"))
    assert same.is_equal
    assert not found.is_equal


def test_a_stage_that_was_found_committed_keeps_the_time_that_it_took() -> None:
    from flows.results import StageOutcome

    manifest = {"key": "k", "metrics": {}}
    ran = describe_outcomes([StageOutcome("train", "ran", "never run before", 9.0, manifest)], None)
    again = describe_outcomes([StageOutcome("train", "cached", "committed", 0.0, manifest)], ran)
    assert again["train"]["seconds"] == 9.0
    other = describe_outcomes([StageOutcome("train", "cached", "committed", 0.0, {**manifest, "key": "l"})], ran)
    assert other["train"]["status"] == "cached"


def test_metrics_have_one_name_each() -> None:
    test = {"test_error": 0.1, "loss": 1, "test_runtime": 3.0, "note": "x"}
    measured = {"test": test, "train_loss": 0.5, "epoch": 1.0}
    assert flat_metrics(measured) == {"test_error": 0.1, "test_loss": 1, "train_loss": 0.5}


# -- logs -------------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    record_run(str(tmp_path), "a" * 16, day=1)
    path = tmp_path / "runs" / ("a" * 16) / "logs" / "train" / "0001-001.jsonl"
    path.parent.mkdir(parents=True)
    line = json.dumps({"t": "2026-11-22T10:00:00Z", "kind": "line", "text": "whole", "rank": 0})
    path.write_text(f"{line}\nnot json\n{line[:20]}")
    reader = LogReader(str(tmp_path), list_runs(str(tmp_path))[0])
    assert [each.text for each in reader.read()] == ["whole"]
    path.write_text(f"{line}\nnot json\n{line}\n")
    assert [each.text for each in reader.read()] == ["whole"]
    assert reader.read() == []


def test_attempts_are_listed_with_their_errors(tmp_path: Path) -> None:
    storage = str(tmp_path)
    key = commit_stage(storage, "train", "one")
    ledger = Ledger(Store.open(storage).child("stages", "train", key[:16]))
    ledger.begin(reason="never run before", batch_halvings=0)
    ledger.end(1, "failed", error=HangError("It hung.", rank=1, step=7, details="the stacks"), decision="retry 1 of 3")
    ledger.begin(reason="never run before", batch_halvings=0)
    record_run(storage, "a" * 16, day=1, status="FAILED", worked_in={"train": key})
    first, second = read_attempts(storage, list_runs(storage)[0])
    assert (first.outcome, first.error["rank"], first.error["details"]) == ("failed", 1, "the stacks")
    assert first.decision == "retry 1 of 3"
    assert (second.outcome, second.ended) == ("open", None)


# -- filters and progress ---------------------------------------------------------------------------------------------


def test_conditions_ages_and_orders_are_read_or_refused(tmp_path: Path) -> None:
    nightly(str(tmp_path), 3)
    record_run(str(tmp_path), "f" * 16, day=4)
    assert parse_filter("test_accuracy >= 0.9").accepts({"test_accuracy": 0.9})
    assert not parse_filter("test_accuracy<0.9").accepts({})
    assert parse_age("1.5h", field="--since").total_seconds() == 5400
    for condition in ("test_accuracy", "a>=b", ">=0.9"):
        with pytest.raises(ConfigError, match="a metric, a comparison and a number"):
            parse_filter(condition)
    with pytest.raises(ConfigError, match="a number and a unit"):
        parse_age("7", field="--since")
    statuses = look(str(tmp_path))
    runs = [each.run for each in statuses]
    firsts = {"test_accuracy": "toy-1", "-test_accuracy": "toy-3", "-started": "toy-4", "name": "toy-1"}
    for text, first in firsts.items():
        key, reverse = sort_key(text, runs)
        ordered = sorted(statuses, key=key, reverse=reverse)
        assert ordered[0].run.run_name == first
        if "accuracy" in text:
            assert ordered[-1].run.run_name == "toy-4", "a run without the metric comes last"
    with pytest.raises(ConfigError, match="cannot be sorted") as caught:
        sort_key("test_acuracy", runs)
    assert "test_accuracy" in str(caught.value.remedy)


def test_without_runs_only_what_every_run_has_orders_them() -> None:
    assert sort_key("-seconds", [])[1]
    with pytest.raises(ConfigError, match="no run with a metric") as caught:
        sort_key("-startd", [])
    assert (caught.value.field, caught.value.value) == ("--sort", "-startd")
    assert caught.value.remedy == 'Did you mean "started"?'


def test_progress_counts_the_stage_at_work_and_what_follows(tmp_path: Path) -> None:
    storage = str(tmp_path)
    outcomes = {"evaluate": {"status": "ran", "seconds": 5.0}, "train": {"status": "ran", "seconds": 50.0}}
    record_run(storage, "a" * 16, day=1, outcomes=outcomes)
    record_run(storage, "b" * 16, day=2, status="RUNNING", ended=None, planned=["train", "evaluate"])
    folder = Store.open(storage).child("runs", "b" * 16)
    about = {"holder": asdict(Holder.this_process()), "flow_run_id": None}
    folder.write_bytes("alive/one.json", json.dumps(about).encode())
    beat = {"beat": "1", "stage": "train", "progress": "step 5/10", "step": 5, "max_steps": 10, "eta_s": 20.0}
    folder.write_bytes("alive/one.beat", json.dumps(beat).encode())
    statuses = look(storage)
    train, evaluate = describe_progress(statuses[0], [each.run for each in statuses])
    assert (train.state, train.share, train.eta_s) == ("running", 0.5, 20.0)
    assert (evaluate.state, evaluate.eta_s) == ("waiting", 5.0)
    assert estimate_rest([train, evaluate]) == 25.0
    assert statuses[0].to_dict()["share"] == 0.5
