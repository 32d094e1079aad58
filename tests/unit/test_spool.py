"""Several processes around one spool and one database."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.mlflow_store import client, fresh_store, points
from trainer_lib.trackers.mlflow import MLflowTracker, ship_leftovers
from trainer_lib.trackers.spool import Session, State

ROOT = Path(__file__).parents[2]


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = fresh_store(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def test_the_session_of_a_living_process_is_left_alone(uri: str, tmp_path: Path) -> None:
    root = tmp_path / "spool"
    code = """
        import sys
        from pathlib import Path
        from trainer_lib.trackers.spool import Session
        session = Session.create(Path(sys.argv[1]), {"tracking_uri": sys.argv[2], "run_id": "x", "dedupe": False})
        print("ready", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(root), uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert Session.leftovers(root) == []
        assert ship_leftovers(root, uri) == 0
    [left] = Session.leftovers(root)
    assert left.state == State()
    left.remove()


def test_a_torn_last_line_is_not_a_point(uri: str, tmp_path: Path) -> None:
    session = Session.create(tmp_path / "spool", {"tracking_uri": uri, "run_id": None})
    session.append({"loss": 1.0}, 1)
    with (session.path / "points.jsonl").open("ab") as file:
        file.write(b'{"t": 17, "s": 2, "m": {"lo')
    assert [point.step for point in session.read(0)[0]] == [1]
    session.end_writing()
    session.remove()


def test_our_own_live_session_is_left_alone_too(uri: str, tmp_path: Path) -> None:
    session = Session.create(tmp_path, {"tracking_uri": uri, "run_id": "x", "dedupe": False})
    assert Session.leftovers(tmp_path) == []
    session.end_writing()
    session.release()
    [left] = Session.leftovers(tmp_path)
    left.remove()
    assert list(tmp_path.glob("*-*")) == []


def test_a_damaged_session_is_set_aside_and_the_others_are_sent(uri: str, tmp_path: Path) -> None:
    run_id = client(uri).create_run("0").info.run_id
    head = {"tracking_uri": uri, "run_id": run_id, "dedupe": False}
    for content in ("{", '{"tracking_uri": "' + uri + '"}', None):
        session = Session.create(tmp_path / "spool", head)
        session.append({"loss": 1.0}, 1)
        session.end_writing()
        session.release()
        if content is not None:
            (session.path / "session.json").write_text(content)
    ship_leftovers(tmp_path / "spool", uri)
    assert points(uri, run_id, "loss") == [(1, 1.0)]
    assert [path.suffix for path in sorted((tmp_path / "spool").iterdir())] == [".damaged", ".damaged"]


def test_a_new_database_is_set_up_once_by_two_processes_at_once(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    code = "import sys; from trainer_lib.trackers.mlflow import connect; connect(sys.argv[1]).get_experiment('0')"
    both = [subprocess.Popen([sys.executable, "-c", code, uri], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr.decode()
        assert stderr == b""  # no migration log on the terminal
    assert [experiment.name for experiment in client(uri).search_experiments()] == ["Default"]


def test_a_fork_waits_for_the_end_of_the_import(tmp_path: Path) -> None:
    """A data loader worker forked while the shipper imports mlflow would inherit half a module."""
    code = """
        import os, threading, time
        from trainer_lib.trackers import mlflow, shipper
        importing, done = threading.Event(), []
        def importer():
            with mlflow._importing:
                importing.set()
                time.sleep(0.3)
                done.append(True)
        thread = threading.Thread(target=importer)
        thread.start()
        importing.wait()
        pid = os.fork()
        if pid == 0:
            with mlflow._importing:
                os._exit(0 if done else 1)
        thread.join()
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, cwd=ROOT, timeout=30)
    assert done.returncode == 0, done.stderr


def test_without_an_output_folder_the_spool_is_the_users_own(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    tracker = MLflowTracker("s3://bucket/out")
    tracker.start(run_name=None, params={}, resume_step=0)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    [spool] = (tmp_path / "data" / "trainflow" / "spool").iterdir()
    assert spool.stat().st_mode & 0o077 == 0
    shutil.rmtree(tmp_path / "data")
