"""A launch that reports through the job's folder, and ends when its owner asks for it or is gone."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.launched import request, wait_until
from trainer_lib.errors import StorageError
from trainer_lib.launch import LaunchConfig, reported
from trainer_lib.launch.reported import Owner, Reporter, launch_reported
from trainer_lib.requests import PrepareRequest
from trainer_lib.storage import Store

RECIPE = """
def prepare(options, out):
    if options.get("bad"):
        raise KeyError("gone")
    print("hello", flush=True)
    return {"train": [{"x": 1}], "test": [{"x": 2}]}

def build_model(options, data): ...
"""


def folder_of(owner: Owner) -> Store:
    return owner._folder


def has_report(owner: Owner) -> bool:
    """Whether a worker has reported something that its owner has not read."""
    return any(map(reported._REPORT.fullmatch, folder_of(owner).children()))


def test_the_answer_and_what_the_worker_says_come_back(tmp_path: Path) -> None:
    asked = request(tmp_path, RECIPE)
    with Owner(Store.open(asked.output)) as owner:
        text = owner.job(asked, LaunchConfig(kind="process", processes=1, threads=1), 3)
        answer = json.loads(launch_reported(text))
        found = owner.read()
        assert owner.read() == []
    assert answer["result"]["splits"]["train"]["rows"] == 1
    assert {number for number, _ in found} == {3}
    assert next(iter(found[0][1])) == "started"
    assert {"line": "hello"} in [message for _, message in found]
    assert not list((tmp_path / "out" / "claims").glob("*/*"))


def test_the_machine_of_a_worker_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is lost in its first second was not named: its reports are sent once a second."""
    monkeypatch.setattr(reported, "FLUSH_S", 1000.0)
    with Owner(Store.open(tmp_path)) as owner, Reporter(folder_of(owner), 2):
        wait_until(lambda: has_report(owner), 10)
        assert owner.read() == [(2, {"started": socket.gethostname()})]


def test_a_failure_comes_back_as_json(tmp_path: Path) -> None:
    asked = request(tmp_path, RECIPE, options={"bad": True})
    with Owner(Store.open(asked.output)) as owner:
        text = owner.job(asked, LaunchConfig(kind="process", processes=1, threads=1), 0)
        failure = json.loads(launch_reported(text))["failure"]
    assert (failure["class"], failure["message"].split(",")[0]) == ("CodeError", "KeyError: 'gone'")


def test_a_machine_that_does_not_see_the_folder_refuses_before_a_worker_starts(tmp_path: Path) -> None:
    asked = PrepareRequest(output=str(tmp_path / "elsewhere"))
    with Owner(Store.open(tmp_path / "here")) as owner:
        text = owner.job(asked, LaunchConfig(), 0)
        failure = json.loads(launch_reported(text))["failure"]
    assert (failure["class"], failure["field"]) == ("ConfigError", "storage")
    assert "does not see this folder" in failure["message"]


def test_a_worker_ends_when_its_owner_asks_for_it_is_gone_or_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "LOOK_S", 0.0)
    monkeypatch.setattr(reported, "BEAT_S", 0.02)
    store = Store.open(tmp_path)
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        first = reporter._sign
        wait_until(lambda: not reporter.is_ended() and reporter._sign != first, 10)
        owner.stop()
        assert reporter.is_ended()
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        owner._heartbeat.stop()
        wait_until(lambda: has_report(owner), 10)  # nobody writes any more
        folder_of(owner).delete_tree()
        assert reporter.is_ended()
    monkeypatch.setattr(reported, "BEAT_S", 1000.0)
    monkeypatch.setattr(reported, "SILENT_S", 0.05)
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        wait_until(reporter.is_ended, 10)


def test_a_store_that_is_out_of_reach_for_a_while_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported, "LOOK_S", 0.0)
    with Owner(Store.open(tmp_path)) as owner, Reporter(folder_of(owner), 0) as reporter:

        def fail(*_: object, **__: object) -> bytes:
            raise StorageError("away")

        with monkeypatch.context() as away:
            away.setattr(Store, "read_if_exists", fail)
            assert not reporter.is_ended()
        assert not reporter.is_ended()
