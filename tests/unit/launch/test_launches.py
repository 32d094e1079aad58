"""Launches: through a job's folder, in a private folder, and in the calling process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import request, wait_until
from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, StorageError
from trainer_lib.guard import Process, start_time
from trainer_lib.launch import base, pool
from trainer_lib.launch.base import held_devices
from trainer_lib.launch.pool import Owner, Reporter, launch_reported
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings import gpu_selection
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.supervise import Listener
from trainer_lib.protocol.requests import PrepareRequest
from trainer_lib.storage import Store
from trainer_lib.worker.process import session

RECIPE = """
def prepare(options, out):
    if options.get("bad"):
        raise KeyError("gone")
    print("hello", flush=True)
    return {"train": [{"x": 1}], "test": [{"x": 2}]}

def build_model(options, data): ...
"""
VARIABLE = "TRAINFLOW_TEST_TURN"


def folder_of(owner: Owner) -> Store:
    return owner._folder


def has_report(owner: Owner) -> bool:
    """Whether a worker has reported something that its owner has not read."""
    return any(map(pool._REPORT.fullmatch, folder_of(owner).children()))


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
    monkeypatch.setattr(pool, "FLUSH_S", 1000.0)
    with Owner(Store.open(tmp_path)) as owner, Reporter(folder_of(owner), 2):
        wait_until(lambda: has_report(owner), 10)
        assert owner.read() == [(2, {"started": socket.gethostname()})]


def test_a_failure_comes_back_as_json(tmp_path: Path) -> None:
    asked = request(tmp_path, RECIPE, options={"bad": True})
    with Owner(Store.open(asked.output)) as owner:
        failure = json.loads(launch_reported(owner.job(asked, LaunchConfig(kind="in_process"), 0)))["failure"]
    assert (failure["class"], failure["message"].split(",")[0]) == ("CodeError", "KeyError: 'gone'")
    # A machine that does not see the folder refuses before a worker starts.
    elsewhere = PrepareRequest(output=str(tmp_path / "elsewhere"))
    with Owner(Store.open(tmp_path / "here")) as owner:
        failure = json.loads(launch_reported(owner.job(elsewhere, LaunchConfig(), 0)))["failure"]
    assert (failure["class"], failure["field"]) == ("ConfigError", "storage")
    assert "does not see this folder" in failure["message"]


@pytest.mark.parametrize(("name", "theirs"), [("Python", "3.9"), ("trainflow", "0.0.1")])
def test_a_machine_with_another_installation_is_refused_before_it_works(tmp_path: Path, name: str, theirs: str) -> None:
    asked = request(tmp_path, RECIPE)
    with Owner(Store.open(asked.output)) as owner:
        job = json.loads(owner.job(asked, LaunchConfig(kind="in_process"), 0))
        job["installation"][name] = theirs
        failure = json.loads(launch_reported(json.dumps(job)))["failure"]
        assert owner.read() == []
    assert (failure["class"], failure["field"]) == ("ConfigError", "prepare.runner")
    assert f"has {name} " in failure["message"] and theirs in failure["message"]


def test_a_worker_ends_when_its_owner_asks_for_it_is_gone_or_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LOOK_S", 0.0)
    monkeypatch.setattr(pool, "BEAT_S", 0.02)
    store = Store.open(tmp_path)
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        first = reporter._sign
        wait_until(lambda: not reporter.is_ended() and reporter._sign != first, 10)
        with monkeypatch.context() as away:  # a store that is out of reach for a while ends nothing
            away.setattr(Store, "read_if_exists", fail)
            assert not reporter.is_ended()
        assert not reporter.is_ended()
        owner.stop()
        assert reporter.is_ended()
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        owner._stop_beating()
        wait_until(lambda: has_report(owner), 10)  # no process writes any more
        folder_of(owner).delete_tree()
        assert reporter.is_ended()
    monkeypatch.setattr(pool, "BEAT_S", 1000.0)
    monkeypatch.setattr(pool, "SILENT_S", 0.05)
    with Owner(store) as owner, Reporter(folder_of(owner), 0) as reporter:
        wait_until(reporter.is_ended, 10)


def fail(*_: object, **__: object) -> bytes:
    raise StorageError("away")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_of_somebody_else_is_not_trusted(temporary: Path) -> None:
    folder = temporary / f"trainflow-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not private"):
        RunDir.create({}, 1.0, lambda: False)
    folder.chmod(0o700)
    assert stat.S_IMODE(RunDir.create({}, 1.0, lambda: False).path.stat().st_mode) == 0o700


def test_a_second_launch_on_the_same_output_is_refused_while_the_first_is_at_work(temporary: Path) -> None:
    first = RunDir.create({"output": "s3://bucket/a"}, 1.0, lambda: False)
    first.record_process("worker-0", os.getpid())
    with pytest.raises(InfrastructureError, match="already writes"):
        RunDir.create({"output": "s3://bucket/a"}, 1.0, lambda: False)
    other = RunDir.create({"output": "s3://bucket/b"}, 1.0, lambda: False)
    assert first.path.exists()
    first.remove()
    other.remove()
    assert list(temporary.iterdir()) == []


def test_a_process_whose_program_is_still_being_loaded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Process(os.getpid(), start_time(os.getpid()) or "")
    looks = iter([set(), {mine}])  # until then the environment that it will have cannot be read
    monkeypatch.setattr(RunDir, "_find_marked", lambda folder: next(looks))
    assert RunDir(tmp_path).find_processes() == {mine}


def test_threads_take_turns_and_a_launch_may_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_ready, seen, inside = threading.Barrier(3), [], 0

    def run_here(request: Any, run_dir: RunDir, on_event: Any) -> str | None:
        nonlocal inside
        inside += 1
        for _ in range(2):
            seen.append((inside, request, os.environ.get(VARIABLE)))
            if request == "outer" and _ == 0:
                launch("inner")
            time.sleep(0.02)
        inside -= 1
        return os.environ.get(VARIABLE)

    def launch(name: str) -> str | None:
        found: str | None = base.run_here(name, RunDir(tmp_path), {VARIABLE: name}, print)  # type: ignore[arg-type]
        return found

    def begin(name: str) -> str | None:
        all_ready.wait(10)
        return launch(name)

    monkeypatch.setattr(session, "run_here", run_here)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(begin, ("a", "b", "outer"))) == ["a", "b", "outer"]
    assert [depth for depth, request, _ in seen if request != "inner"] == [1] * 6
    assert all(request == value for _, request, value in seen)
    assert VARIABLE not in os.environ

    def gone(*_: Any) -> None:
        raise KeyError("gone")

    # A launch that fails lets the next one begin.
    monkeypatch.setattr(session, "run_here", gone)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
            pool.submit(launch, "x").result(10)
    assert VARIABLE not in os.environ


# ------------------------------------------------------------------------------------------------------------ devices
@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices, as their files show them."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_selection, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1"]), ("1", ["1"]), ("GPU-cc", ["GPU-cc"]), ("MIG-77", ["MIG-77"]), ("", [])],
)
def test_a_device_has_one_name(visible: str | None, names: list[str]) -> None:
    assert gpu_selection.list_visible({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == names


def held(
    events: list[dict[str, Any]], *, on_devices: bool = True, **config: Any
) -> contextlib.AbstractContextManager[Any]:
    """The devices of a launch, for the length of the block; one that has to wait says so, and is cancelled."""
    listener = Listener(print, events.append, lambda: any(event["event"] == "wait" for event in events))
    return held_devices(LaunchConfig(**{"processes": 1, **config}), listener, on_devices=on_devices, what="train")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_for_one_launch_unless_the_settings_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    with held(events, devices=(1,)) as files:
        assert len(files) == 1
        with held(events, devices=(0,)) as others, held(events, devices=(1,), per_device=2) as second:
            assert len(others) == len(second) == 1
        with held(events, per_device="any") as none, held(events, on_devices=False) as prepared:
            assert none == prepared == (), "data is prepared beside a training"
        with monkeypatch.context() as worker:
            worker.setenv("TRAINFLOW_OWNER", f"{os.getpid()}:{start_time(os.getpid())}")
            with held(events, devices=(1,)) as nested:
                assert nested == (), "a worker uses the devices of its launch"
        assert events == []
        with pytest.raises(Interrupted, match="Cancelled while it waited for GPU 1"):
            held(events, devices=(0, 1), processes=2).__enter__()
        [wait] = events
        assert wait["message"].startswith(f"waits for GPU 1, in use by train (process {os.getpid()}), since ")
        with held([], devices=(0,)):
            inherited = os.dup(files[0])
            with pytest.raises(Interrupted, match="Cancelled while it waited for GPU 0"):  # in one order: no deadlock
                held([{"event": "wait"}], devices=(1, 0), processes=2).__enter__()
    with pytest.raises(Interrupted):
        held([{"event": "wait"}], devices=(1,)).__enter__()
    os.close(inherited)
    with held([], devices=(0, 1), processes=2) as both:
        assert len(both) == 2


@pytest.mark.usefixtures("two_gpus")
def test_a_limit_that_cannot_be_kept_is_refused_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    events: list[dict[str, Any]] = []
    with (
        pytest.raises(ConfigError, match="It cannot be seen which launches use") as refused,
        held(events, per_device=1),
    ):
        pass
    assert refused.value.field == "train.launch.per_device"
    with held(events) as files:
        assert files == ()
    [warning] = events
    assert warning["event"] == "warning"
    assert warning["message"].endswith("This one starts next to them.")
