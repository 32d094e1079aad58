"""The test harness: what it refuses is refused, the leak police catch what they are there for, the lists name tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import _NIGHTLY, _QUICK, _RUNS, _SLOW, is_nightly
from tests.support import police
from tests.support.repository import ROOT


# --------------------------------------------------------------------------------- seen from outside, by another pytest
def _pytest(folder: Path, source: str, **env: str) -> tuple[int, str]:
    imports = "import os, warnings\nimport pytest\nfrom tests.support import police\npolice.SETTLE_S = 0.2\n"
    (folder / "test_it.py").write_text(imports + source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **env}
    words = [*command, str(folder / "test_it.py")]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_skip_that_is_not_on_the_list_fails_the_run(tmp_path: Path) -> None:
    code, output = _pytest(tmp_path, "def test_later():\n    pytest.skip('some day')\n")
    assert code == 1
    assert "SKIP NOT ALLOWED" in output and "some day" in output


def test_an_absent_need_skips_and_an_unknown_one_fails_and_so_do_warnings_leaks_and_what_the_machine_sets(
    tmp_path: Path,
) -> None:
    source = (
        "@pytest.mark.needs('slurm')\ndef test_slurm(): raise AssertionError\n"
        "@pytest.mark.needs('luck')\ndef test_luck(): pass\n"
        "def test_warns(): warnings.warn('careless')\n"
        "def test_leaks(): os.environ['LEFT'] = '1'\n"
        "def test_litters(): open('litter', 'w').close()\n"
        "def test_home(): assert os.environ['HOME'] != '/somebody' and 'AWS_SECRET_ACCESS_KEY' not in os.environ\n"
    )
    machine = {"HOME": "/somebody", "AWS_SECRET_ACCESS_KEY": "x", "PATH": str(tmp_path)}
    code, output = _pytest(tmp_path, source, **machine)
    assert code == 1
    assert "1 failed, 3 passed, 1 skipped, 3 errors" in output
    for word in ("needs(slurm)", "needs('luck')", "careless", "environment variable LEFT", "litter"):
        assert word in output
    assert "SKIP NOT ALLOWED" not in output


# ---------------------------------------------------------------------------------------------------------- the police
@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "SETTLE_S", 0.05)


@contextmanager
def _waiting(*program: str, **given: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a line, or for the end of this block."""
    command = [sys.executable, *(program or ("-c", "input()"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, **given) as child:  # type: ignore[call-overload]
        yield child


def test_variables_and_files_left_behind_are_named_and_variables_put_back(tmp_path: Path) -> None:
    before = police.Scene.look((tmp_path,))
    os.environ["TRAINFLOW_LEAK"] = "1"
    (tmp_path / "mlflow.db").touch()
    named = ["environment variable TRAINFLOW_LEAK: None before, '1' after", f"file {tmp_path / 'mlflow.db'}"]
    assert police.leaks(before, (tmp_path,)) == named
    assert "TRAINFLOW_LEAK" not in os.environ


def test_a_thread_that_goes_on_is_named() -> None:
    before = police.Scene.look(())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="lingering")
    thread.start()
    found = police.leaks(before, ())
    stop.set()
    thread.join()
    assert found == ["thread 'lingering' (not a daemon)"]


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_process_in_a_session_of_its_own_is_found_and_ended(
    is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = police.Scene.look(())
    looked: set[int] = set()
    read: Callable[[psutil.Process], dict[str, str]] = psutil.Process.environ

    def empty_at_first(process: psutil.Process) -> dict[str, str]:
        if process.pid in looked:
            return read(process)
        looked.add(process.pid)
        return {}

    if is_loading:  # its program
        monkeypatch.setattr(psutil.Process, "environ", empty_at_first)
    with _waiting(start_new_session=True) as child:
        found = police.leaks(before, ())
        assert child.wait(timeout=60) != 0
    assert len(found) == 1 and found[0].startswith(f"process {child.pid}:")


def test_a_process_of_before_is_spared_when_the_clock_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with _waiting() as child:
        before = police.Scene.look(())
        at_boot = psutil.boot_time()
        monkeypatch.setattr(f"{psutil.Process().__module__}._psplatform.boot_time", lambda: at_boot + 1)
        assert police.leaks(before, ()) == []
        child.communicate(b"\n")
    assert child.returncode == 0


def test_a_process_of_another_program_is_looked_at_once_and_forgotten_when_it_ends() -> None:
    environ = {name: value for name, value in os.environ.items() if name != police.TOKEN}
    others = police._others[os.environ[police.TOKEN]]
    with _waiting(env=environ) as child:
        before = police.Scene.look(())
        assert child.pid in others
        assert child.pid not in {pid for pid, _ in before.processes}
        child.communicate(b"\n")
    assert police.leaks(before, ()) == []
    assert child.pid not in others, "the number may be that of our own process"


@pytest.mark.parametrize(("home", "is_leak"), [("own", False), ("other", True)])
def test_the_sessions_own_embedded_server_may_be_replaced_and_every_other_one_is_a_leak(
    tmp_path: Path, home: str, is_leak: bool
) -> None:
    program = tmp_path / "flows" / "server" / "embedded.py"
    program.parent.mkdir(parents=True)
    program.write_text("input()\n")
    folder = tmp_path / home / "trainflow" / "0123456789ab"
    folder.mkdir(parents=True)
    with police.server_kept(tmp_path / "own"):
        before = police.Scene.look(())
        with _waiting(str(program), str(folder), start_new_session=True) as server:
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


# ----------------------------------------------------------------------------------------------------------- the lists
def test_every_listed_file_room_and_pattern_names_a_test() -> None:
    assert [name for name in (*_SLOW, *_QUICK) if not (ROOT / "tests" / name).exists()] == []
    assert [name for name in _QUICK if name.partition("/")[0] not in _SLOW] == []
    for pattern in _NIGHTLY:
        file, _, test = pattern.partition("::")
        assert test.partition("[")[0].strip("*") in (ROOT / "tests" / file).read_text("utf-8"), pattern


def test_patterns_fit_the_names_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conftest._NIGHTLY", ["flows/test_cli.py::*[[]15-19]", "e2e/test_howto.py::test_a*"])
    for test in ("flows/test_cli.py::test_a_stopped_run_saves[15-19]", "e2e/test_howto.py::test_a_page"):
        assert is_nightly(test)
    for test in ("flows/test_cli.py::test_a_stopped_run_saves[2-130]", "e2e/test_howto.py::test_no_page"):
        assert not is_nightly(test)


def test_a_run_imports_the_files_of_which_it_has_tests_and_the_main_job_is_tested_with_every_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.conftest._NIGHTLY", ["e2e/test_howto.py::test_a*"])
    files = ("unit/storage/test_store.py", "e2e/test_howto.py", "e2e/test_digits.py")
    assert {run: [file for file in files if has(file)] for run, has in _RUNS.items()} == {
        "not slow and not nightly": ["unit/storage/test_store.py", "e2e/test_digits.py"],
        "slow": ["e2e/test_howto.py"],
        "not nightly": [*files],
        "nightly": ["e2e/test_howto.py"],
    }
    assert set(re.findall(r"call run_both,([a-z ]+)\)", (ROOT / "Makefile").read_text("utf-8"))) == set(_RUNS)
