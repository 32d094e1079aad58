"""Names, details and logs of runs, recorded on every kind of store."""

from __future__ import annotations

import json
from typing import Any

from flows.cli.runs import _compared_lines
from flows.past_runs import find_run, list_runs
from flows.plan_record import write_half
from flows.run_details import RunDetails, read_details
from flows.run_logs import LogReader, follow_lines, keep_logs
from flows.run_names import name_run
from tasks.stage.progress import publish
from tests.support.recorded import commit_stage, record_run, train_spec
from trainer_lib.storage import Store


def details(storage: str, text: str) -> RunDetails:
    return read_details(storage, find_run(storage, text, field="RUN"))


def test_names_differ_and_say_what_differs_from_the_first_run(any_url: str) -> None:
    plain: dict[str, Any] = {"learning_rate": 0.003, "max_steps": 8}
    names = [
        name_run(train_spec(any_url, **plain), "a" * 16),
        name_run(train_spec(any_url, **plain | {"learning_rate": 0.01}), "b" * 16),
        name_run(train_spec(any_url, **plain | {"learning_rate": 0.01, "bf16": True}), "c" * 16),
        name_run(train_spec(any_url, **plain), "d" * 16),
    ]
    assert names == ["toy-1", "toy-lr0.01-2", "toy-bf16-on-lr0.01-3", "toy-4"]


def test_the_details_of_a_run_are_what_was_recorded(any_url: str) -> None:
    train = commit_stage(any_url, "train", "one", metrics={"train_loss": 0.5, "train_runtime": 3.0})
    evaluate = commit_stage(any_url, "evaluate", "one", metrics={"test": {"test_accuracy": 0.9}})
    folder = Store.open(any_url).child("runs", "a" * 16)
    outcomes = {"train": {"status": "ran", "seconds": 4.0, "reason": "never run before", "key": train}}
    stages = {"train": train, "evaluate": evaluate}
    record_run(any_url, "a" * 16, day=1, stages=stages, outcomes=outcomes, planned=["train", "evaluate", "predict"])
    folder.write_bytes("spec.yaml", b"name: toy\ntrain: {args: {seed: 1}}\n")
    folder.write_bytes("arguments.json", b'{"train": {"seed": 1}}')
    folder.write_bytes("report.html", b"<html>")
    write_half(folder, "planned", {"stages": {"train": {"seconds": 3.0, "steps": 8}}})
    write_half(folder, "actual", {"stages": {"train": {"seconds": 4.5, "steps": 8}}})
    found = details(any_url, "toy-1")
    assert [(each.stage, each.state) for each in found.stages] == [
        ("train", "ran"),
        ("evaluate", "committed"),
        ("predict", "not reached"),
    ]
    assert found.metrics == {"train_loss": 0.5, "test_accuracy": 0.9}
    assert found.places["model"].endswith(f"stages/train/{train[:16]}/model")
    assert found.places["report"].endswith("report.html")
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["arguments"] == {"train": {"seed": 1}}
    assert [(each["quantity"], each["difference"]) for each in plain["compared"]] == [("seconds", 0.5), ("steps", 0.0)]
    lines = [line.plain for line in _compared_lines(found)]
    assert lines[-3:] == [
        "stage  of what  planned   came  difference",
        "train  time       3.0 s  4.5 s      +50.0%",
        "train  steps          8      8       +0.0%",
    ]


def say(stage: str, text: str, kind: str = "line") -> None:
    publish({"event": kind, "stage": stage, "message": text})


def test_what_workers_write_is_kept_and_read_while_it_grows(any_url: str) -> None:
    record_run(any_url, "a" * 16, day=1, status="RUNNING")
    run = list_runs(any_url)[0]
    reader = LogReader(any_url, run)
    with keep_logs(Store.open(any_url).child("runs", run.id)):
        say("train", "before its attempt began: not kept")
        publish({"event": "stage", "stage": "train", "status": "started", "reason": "never run before", "attempt": 2})
        say("train", "loading https://me:hunter-2@host/x")
        say("train", "[rank 1] here as well")
        say("train", "careful", "warning")
        if Store.open(any_url).is_local:
            assert [line.text for line in reader.read()][-1] == "careful"
    lines = LogReader(any_url, run).read()
    assert [(line.kind, line.rank, line.attempt) for line in lines] == [
        ("stage", None, 2),
        ("line", 0, 2),
        ("line", 1, 2),
        ("warning", None, 2),
    ]
    assert lines[0].text == "started: never run before"
    assert "hunter" not in lines[1].text
    assert lines[2].text == "here as well"
    assert [line.text for line in LogReader(any_url, run, rank=1).read()] == ["here as well"]
    assert LogReader(any_url, run, stages=["evaluate"]).read() == []
    assert list(follow_lines(reader, lambda: True, every_s=0.0))[-1:] in ([], [lines[-1]])
