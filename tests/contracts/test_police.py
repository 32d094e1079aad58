"""The leak police catch what they are there to catch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support import police


def test_a_variable_left_behind_is_named_and_put_back() -> None:
    before = police.Scene.look(())
    os.environ["TRAINFLOW_LEAK"] = "1"
    assert police.leaks(before, ()) == ["environment variable TRAINFLOW_LEAK: None before, '1' after"]
    assert "TRAINFLOW_LEAK" not in os.environ


def test_a_file_left_behind_is_named(tmp_path: Path) -> None:
    before = police.Scene.look((tmp_path,))
    (tmp_path / "mlflow.db").touch()
    assert police.leaks(before, (tmp_path,)) == [f"file {tmp_path / 'mlflow.db'}"]


def test_a_thread_that_goes_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)
    before = police.Scene.look(())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="lingering")
    thread.start()
    found = police.leaks(before, ())
    stop.set()
    thread.join()
    assert found == ["thread 'lingering' (not a daemon)"]


def test_a_process_in_a_session_of_its_own_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)
    before = police.Scene.look(())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    found = police.leaks(before, ())
    with child:
        assert child.wait(timeout=60) != 0
    assert len(found) == 1 and found[0].startswith(f"process {child.pid}:")


def test_a_process_whose_program_is_still_being_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)
    before = police.Scene.look(())
    looked: set[int] = set()
    read = psutil.Process.environ

    def empty_at_first(process: psutil.Process) -> dict[str, str]:
        if process.pid in looked:
            return read(process)
        looked.add(process.pid)
        return {}

    monkeypatch.setattr(psutil.Process, "environ", empty_at_first)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    found = police.leaks(before, ())
    with child:
        assert child.wait(timeout=60) != 0
    assert len(found) == 1 and found[0].startswith(f"process {child.pid}:")


def test_a_process_of_before_is_spared_when_the_clock_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = police.Scene.look(())
        at_boot = psutil.boot_time()
        monkeypatch.setattr(f"{psutil.Process().__module__}._psplatform.boot_time", lambda: at_boot + 1)
        assert police.leaks(before, ()) == []
        child.communicate(b"\n")
    assert child.returncode == 0


def test_a_process_of_another_program_is_looked_at_once_and_forgotten_when_it_ends() -> None:
    environ = {name: value for name, value in os.environ.items() if name != police.TOKEN}
    others = police._others[os.environ[police.TOKEN]]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environ) as child:
        before = police.Scene.look(())
        assert child.pid in others
        assert child.pid not in {pid for pid, _ in before.processes}
        child.communicate(b"\n")
    assert police.leaks(before, ()) == []
    assert child.pid not in others, "the number may be that of our own process"


@pytest.mark.parametrize(
    ("home", "argument", "holds_lock", "is_leak"),
    [
        ("own", "{folder}", False, False),
        ("own", "--early", True, False),  # a command of the test has put its own server in the place
        ("own", "--early", False, True),
        ("other", "{folder}", True, True),
    ],
)
def test_the_sessions_own_embedded_server_may_be_replaced_and_every_other_one_is_a_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, argument: str, holds_lock: bool, is_leak: bool
) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)
    program = tmp_path / "flows" / "server" / "embedded.py"
    program.parent.mkdir(parents=True)
    program.write_text("input()\n")
    folder = tmp_path / home / "trainflow" / "0123456789ab"
    folder.mkdir(parents=True)
    command = [sys.executable, str(program), argument.format(folder=folder)]
    with police.server_kept(tmp_path / "own"):
        before = police.Scene.look(())
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as server:
            if holds_lock:
                (folder / "server.lock").write_text(str(server.pid))
            found = police.leaks(before, ())
            server.communicate(b"\n", timeout=60)
    assert [line.partition(":")[0] for line in found] == ([f"process {server.pid}"] if is_leak else [])
    assert (server.returncode == 0) is not is_leak


def test_a_process_group_left_open_is_destroyed(tmp_path: Path) -> None:
    import torch.distributed as dist

    before = police.Scene.look(())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert police.leaks(before, ()) == ["torch.distributed is still initialised"]
    assert not dist.is_initialized()
