"""What flows keep and find on a store or a server: runs, garbage, new data, a follower's evaluations, sources."""

from __future__ import annotations

import http.server
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.following import FollowedStage
from tests.support.machine import serving
from tests.support.recorded import (
    collect,
    commit_stage,
    committed,
    folders,
    nightly,
    publish_run,
    record_run,
    train_spec,
)
from tests.support.s3 import S3Server
from trainer_lib.checkpoint.catalogue import rotate_checkpoints
from trainer_lib.errors import ConfigError, StoreUnreachableError
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT
from trainflow.flows.records.past_runs import find_run, list_runs
from trainflow.flows.records.run_logs import LogReader, follow_lines, keep_logs
from trainflow.flows.records.run_names import name_run
from trainflow.flows.runs.garbage import find_garbage
from trainflow.flows.runs.run_details import RunDetails, read_details
from trainflow.flows.server.schedule import Watch
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.keys.sources import fingerprints
from trainflow.tasks.stage.progress import publish


@pytest.fixture(params=["file", "s3"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> str:
    """Both ways of keeping files; what all stores promise is in test_stores.py."""
    return str(tmp_path / "store") if request.param == "file" else str(request.getfixturevalue("s3_url"))


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
    facts = {"global_step": 8, "global_samples": 64}
    train = commit_stage(any_url, "train", "one", metrics={"train_loss": 0.5, "train_runtime": 3.0}, facts=facts)
    evaluate = commit_stage(any_url, "evaluate", "one", metrics={"test": {"test_accuracy": 0.9}})
    folder = Store.open(any_url).child("runs", "a" * 16)
    outcomes = {"train": {"status": "ran", "seconds": 4.0, "reason": "never run before", "key": train}}
    stages = {"train": train, "evaluate": evaluate}
    record_run(any_url, "a" * 16, day=1, stages=stages, outcomes=outcomes, planned=["train", "evaluate", "predict"])
    folder.write_bytes("spec.yaml", b"name: toy\ntrain: {args: {seed: 1}}\n")
    folder.write_bytes("arguments.json", b'{"train": {"seed": 1}}')
    folder.write_bytes("report.html", b"<html>")
    found = details(any_url, "toy-1")
    states = [("train", "ran"), ("evaluate", "committed"), ("predict", "not reached")]
    assert [(stage.stage, stage.state) for stage in found.stages] == states
    assert found.metrics == {"train_loss": 0.5, "test_accuracy": 0.9}
    assert found.places["model"].endswith(f"stages/train/{train[:16]}/model")
    assert found.places["report"].endswith("report.html")
    assert json.loads(json.dumps(found.to_dict()))["arguments"] == {"train": {"seed": 1}}


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
    kinds = [("stage", None, 2), ("line", 0, 2), ("line", 1, 2), ("warning", None, 2)]
    assert [(line.kind, line.rank, line.attempt) for line in lines] == kinds
    assert lines[0].text == "started: never run before"
    assert "hunter" not in lines[1].text
    assert lines[2].text == "here as well"
    assert [line.text for line in LogReader(any_url, run, rank=1).read()] == ["here as well"]
    assert LogReader(any_url, run, stages=["evaluate"]).read() == []
    assert list(follow_lines(reader, lambda: True, every_s=0.0))[-1:] in ([], [lines[-1]])


def test_without_a_number_every_run_stays_and_what_no_run_names_goes(any_url: str) -> None:
    ids = nightly(any_url, 3)
    kept = folders(any_url, *ids)
    commit_stage(any_url, "train", "of no run")
    found = find_garbage(any_url)
    [item] = found.items
    assert (item.kind, item.store.url.split("/")[-2], item.why) == ("stage", "train", "no run refers to it")
    assert found.bytes > 1000
    assert committed(any_url) > kept, "looking changes nothing"
    _, gone = collect(any_url)
    assert len(gone) == 1
    assert committed(any_url) == kept
    assert [run.id for run in list_runs(any_url)] == ids[::-1]
    assert find_garbage(any_url).items == []


def test_old_runs_go_with_what_only_they_refer_to(any_url: str) -> None:
    ids = nightly(any_url, 5)
    nightly(any_url, 1, pipeline="other")
    kept = folders(any_url, *ids[3:]) | {each for each in committed(any_url) if each not in folders(any_url, *ids)}
    found, _ = collect(any_url, keep=2)
    assert [run.id for run in list_runs(any_url) if run.name == "toy"] == ids[:2:-1]
    assert committed(any_url) == kept, "the data of the first day is that of the last"
    assert {run.id for run in list_runs(any_url) if run.name == "other"} <= set(found.kept)
    root = Store.open(any_url)
    assert not [info.path for info in root.list() if any(each in info.path for each in ids[:3])]
    if root.is_local:
        assert len(list(root.local_path("stages/train").iterdir())) == 3, "no empty folder is left"


def test_a_published_run_stays_as_long_as_its_publication_is_there(any_url: str) -> None:
    ids = nightly(any_url, 3)
    run = find_run(any_url, ids[0], field="RUN")
    target = Store.open(any_url).child("hub", "toy")
    publish_run(any_url, target, ids[0])
    found, _ = collect(any_url, keep=1)
    assert found.kept[ids[0]].startswith("published as ")
    assert ("train", run.stages["train"][:16]) in committed(any_url)
    # Also without the run's record, which a person has deleted.
    Store.open(any_url).child("runs", ids[0]).delete_tree()
    collect(any_url)
    assert ("train", run.stages["train"][:16]) in committed(any_url)
    target.child("revisions", "00001-abc").delete(COMMIT)
    found, _ = collect(any_url)
    assert ("train", run.stages["train"][:16]) not in committed(any_url)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what Prefect was asked to start, each once."""
    found: list[str] = []

    def start(watch: Watch, once: str) -> str:
        found.append(once)
        return "run"

    monkeypatch.setattr(Watch, "_start", start)
    return found


def test_what_comes_changes_or_goes_under_a_url_starts_one_run_each(any_url: str, started: list[str]) -> None:
    data = Store.open(any_url).child("data")
    spec = PipelineSpec(name="toy", recipe="recipe.py", storage=f"{any_url}/store")

    def watch() -> Watch:
        return Watch(data.url, "pipeline/toy", spec, lambda _: None)

    def has_started() -> bool:
        """Look as often as a change needs to settle; afterwards nothing is new."""
        first, second, third = (looking.look() for _ in range(3))
        assert (first, third) == (False, False)
        return second

    data.write_bytes("day/1.csv", b"1")
    looking = watch()
    assert not has_started(), "what is there at first"
    data.write_bytes("day/2.csv", b"1")
    assert has_started()
    data.write_bytes("day/2.csv", b"12")
    assert has_started(), "another size"
    knows_content = data.list()[0].tag is not None or data.is_local
    data.write_bytes("day/2.csv", b"21")
    if data.is_local:  # the clock of a disk may stand still for some milliseconds
        os.utime(data.local_path("day/2.csv"), (1, 1))
    assert has_started() is knows_content, "the same size"
    data.delete("day/1.csv")
    looking = watch()  # a restart
    assert has_started()
    looking = watch()
    assert not has_started(), "the note has what was seen before"
    assert len(set(started)) == len(started) == 3 + knows_content


def test_each_checkpoint_is_evaluated_once_oldest_first_and_the_best_is_kept(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = FollowedStage(tmp_path, monkeypatch, any_store)
    project.save(1, 3)
    follower = project.follower()
    assert (follower.begin(), follower.work()) == ([], 2)
    project.save(2, 4, 5)
    assert follower.work() == 3
    # Of equal ones the earlier is the best, and NaN never is.
    assert project.evaluated == [(1, True), (3, True), (2, True), (4, False), (5, False)]
    assert project.kept == ["checkpoint-2"]
    assert rotate_checkpoints(project.root, keep=1, protect=()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]

    again = project.follower()
    known = again.begin()
    assert again.work() == 0
    assert [each.step for each in known] == [1, 2, 3, 4, 5]
    assert math.isnan(known[-1].metrics["eval_loss"])
    assert again.best is not None
    assert again.best.step == 2
    # Nothing is left of the leases, and the records are strict JSON.
    assert not project.stage.child("follow", "claims").list()
    for file in project.stage.child("follow").list():
        json.loads(project.stage.read_bytes(f"follow/{file.path}"), parse_constant=pytest.fail)


def digest(source: str) -> str:
    [found] = fingerprints([source])
    return found["digest"]


class _Server(http.server.BaseHTTPRequestHandler):
    tags: ClassVar[dict[str, str | None]] = {}
    log_message = staticmethod(lambda *_: None)  # type: ignore[assignment]

    def do_HEAD(self) -> None:
        if self.path == "/odd":
            self.wfile.write(b"SSH-2.0\r\n")
        if self.path not in self.tags:
            self.send_error(404)
            return
        self.send_response(200)
        tag = self.tags[self.path]
        if tag is not None:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", "5")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    _Server.tags = {"/a": '"one"', "/none": None}
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_url_counts_by_its_etag(server: str) -> None:
    before = digest(f"{server}/a")
    _Server.tags["/a"] = 'W/"one"'
    assert digest(f"{server}/a") == before
    _Server.tags["/a"] = '"two"'
    assert digest(f"{server}/a") != before
    with pytest.raises(ConfigError, match="no ETag"):
        digest(f"{server}/none")
    with pytest.raises(ConfigError, match="404"):
        digest(f"{server}/missing")
    with pytest.raises(StoreUnreachableError, match="something else answers in its place"):
        digest(f"{server}/odd")


def test_objects_count_by_the_stores_own_tags(s3_url: str) -> None:
    store, elsewhere = Store.open(s3_url), Store.open(f"{s3_url}-other")
    store.write_bytes("a.csv", b"one")
    store.write_bytes("sub/b.csv", b"two")
    elsewhere.write_bytes("x.csv", b"three")
    folder, file = digest(f"{s3_url}/"), digest(f"{s3_url}/a.csv")
    elsewhere.write_bytes("x.csv", b"changed")
    assert digest(s3_url) == folder
    store.write_bytes("sub/b.csv", b"TWO")
    assert digest(s3_url) != folder
    assert digest(f"{s3_url}/a.csv") == file
    with pytest.raises(ConfigError, match="nothing at this address"):
        digest(f"{s3_url}/nowhere")
