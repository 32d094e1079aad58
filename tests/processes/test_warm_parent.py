"""Forked workers: equal to started ones in all that a recipe can see, and gone with whatever ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny
from tests.support.command import command_words
from tests.support.launched import request
from tests.support.repository import ROOT
from trainer_lib.errors import InfrastructureError
from trainer_lib.guard import Process
from trainer_lib.launch import LaunchConfig, gpu_selection, launch, warm
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.warm import SWITCH
from trainer_lib.protocol.requests import PreparedData
from trainer_lib.worker import warm_parent

ONE = LaunchConfig(kind="process", processes=1, grace_s=2.0)
ROWS = """
def prepare(options, out):
    return {"train": [{"x": 1}]}

def build_model(options, data):
    raise NotImplementedError
"""
# All that a process has of its own, as a recipe sees it before it does anything.
LOOK = """
import gc, json, logging, multiprocessing, os, random, resource, signal, sys, threading, warnings
from pathlib import Path
import numpy, torch

rank, port = os.environ.get("RANK", "0"), os.environ.get("MASTER_PORT", "none")
run_dir = os.environ["TRAINFLOW_RUN_DIR"]
changing = "TRAINFLOW_RUN_DIR TRAINFLOW_GUARD TRAINFLOW_WARM MASTER_PORT TORCHELASTIC_ERROR_FILE PYTEST_CURRENT_TEST"
variables = {name: value for name, value in os.environ.items() if name not in changing.split()}

def lists(file):
    return Path("/proc/self", file).read_bytes().decode().rstrip(chr(0)).split(chr(0))

def name(handler):
    return str(getattr(handler, "__qualname__", handler))

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(1))
state = {
    "command": [sys.argv, sys.orig_argv, lists("cmdline"), status["Name"], sys.modules["__main__"].__spec__.name],
    "interpreter": [sys.path, repr(sys.flags), sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold()],
    "variables": variables,
    "variables that /proc shows": [
        f"TRAINFLOW_RUN_DIR={run_dir}" in lists("environ"),
        sorted({f"{key}={value}" for key, value in variables.items()} - set(lists("environ"))),
    ],
    "inherited": [
        *(status[key] for key in "Umask Groups SigBlk SigIgn NoNewPrivs CapEff Cpus_allowed".split()),
        *(os.getcwd(), os.getsid(0) == os.getpid(), [resource.getrlimit(number) for number in range(16)]),
    ],
    "files": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)) + [
        n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")
    ],
    "signals": {number: name(signal.getsignal(number)) for number in range(1, 32)},
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "streams": [
        (s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.seekable())
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "torch": [
        *(torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info()),
        *(str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.is_available()),
        matrix.mm(torch.ones(300, 300)).sum().item().hex(),
    ],
    "warnings": [str(each) for each in warnings.filters],
    "logging": [logging.getLogger().level, len(logging.getLogger().handlers)],
    "multiprocessing": [multiprocessing.current_process().name, multiprocessing.parent_process() is None],
}
state = json.loads(json.dumps(state).replace(run_dir, "RUN").replace(port, "PORT"))
Path(__file__).with_name(f"state-{rank}.json").write_text(json.dumps(state))
drawn = [random.random(), numpy.random.rand(), torch.initial_seed(), list(multiprocessing.current_process().authkey)]
Path(__file__).with_name(f"drawn-{rank}.json").write_text(json.dumps(drawn))
"""


@pytest.fixture(autouse=True)
def no_parents() -> Iterator[None]:
    warm.close()
    yield
    warm.close()


def start(
    folder: Path,
    recipe: str = ROWS,
    *,
    processes: int = 1,
    env: dict[str, str] | None = None,
    threads: int | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> Any:
    config = replace(ONE, kind="process" if processes == 1 else "torchrun", processes=processes, threads=threads)
    asked = request(folder, recipe, **fields)
    return launch(asked, config, env=env or {}, on_line=on_line, on_event=lambda event: None)


def parents() -> list[psutil.Process]:
    """The warm parents of this process."""
    children = psutil.Process().children()
    return [each for each in children if "trainer_lib.worker.warm_parent" in " ".join(command_words(each)[:5])]


def test_a_forked_worker_is_like_a_started_one(tmp_path: Path) -> None:
    """On one process and on two. What a new interpreter draws is drawn again, by each process and in each launch."""
    drawn: list[list[Any]] = []
    for processes in (1, 2):
        seen = []
        for way in ("0", "1", "1"):
            start(tmp_path, LOOK + ROWS, processes=processes, env={SWITCH: way})
            files = [tmp_path / f"state-{rank}.json" for rank in range(processes)]
            seen.append([json.loads(file.read_text()) for file in files])
            drawn += [json.loads((tmp_path / f"drawn-{rank}.json").read_text()) for rank in range(processes)]
        assert len(parents()) == 1
        for forked in seen[1:]:
            for own, started in zip(forked, seen[0], strict=True):
                assert {name: own[name] for name in own if own[name] != started.get(name)} == {}
                assert own.keys() == started.keys()
        warm.close()
    assert all(len({str(each[kind]) for each in drawn}) == len(drawn) for kind in range(4))


def test_training_in_forked_workers_gives_the_same_bits(tmp_path: Path, prepared_data: PreparedData) -> None:
    digests = []
    for way in ("0", "1"):
        asked = tiny.train_request(tmp_path / way, prepared_data, str(tmp_path / way / "train"), max_steps=4)
        tiny.run(asked, processes=2, env={SWITCH: way})
        digests.append(tiny.weights(asked.output))
    assert parents()
    assert digests[0] == digests[1]


def test_every_variable_that_imports_read_is_known() -> None:
    """A launch with another value of such a variable must not use the parent."""
    code = (
        "import importlib, os\n"
        "from trainer_lib.worker import warm_parent\n"
        "cls, read = type(os.environ), set()\n"
        "get = cls.__getitem__\n"
        "def record(self, name):\n    read.add(name)\n    return get(self, name)\n"
        "cls.__getitem__ = record\n"
        "for name in (*warm_parent.MODULES, *sum(warm_parent.LATER.values(), ())): importlib.import_module(name)\n"
        "print(' '.join(read))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    read = set(done.stdout.split())
    assert "TORCH_LOGS" in read
    assert {name for name in read if name not in warm.NAMES and not name.startswith(warm.FAMILIES)} == set()


def test_a_parent_that_was_killed_or_stopped_is_replaced(tmp_path: Path) -> None:
    start(tmp_path, processes=2)
    [parent] = parents()
    parent.kill()
    start(tmp_path, processes=2)
    [second] = parents()
    assert second != parent
    second.suspend()
    start(tmp_path, processes=2)
    assert parents() not in ([], [second])


WAITS = """
import time
from pathlib import Path
print("waits", flush=True)
while not Path(__file__).with_name("go").exists():
    time.sleep(0.02)
"""


@pytest.mark.parametrize("guard_too", [False, True])
def test_a_launch_goes_on_without_its_parent(guard_too: bool, tmp_path: Path) -> None:
    def on_line(line: str) -> None:
        [parent] = parents()
        [guard] = parent.children()
        parent.kill()
        parent.wait()
        if guard_too:
            guard.kill()
        (tmp_path / "go").touch()

    warm.expect({"prepare": ONE, "train": ONE})
    if guard_too:
        with pytest.raises(InfrastructureError, match=r"The guard process was killed by SIGKILL \(9\)"):
            start(tmp_path, WAITS + ROWS, on_line=on_line)
    else:
        assert start(tmp_path, WAITS + ROWS, on_line=on_line).splits["train"].rows == 1


def test_a_launch_ends_while_its_parent_is_stopped(tmp_path: Path) -> None:
    def on_line(line: str) -> None:
        [parent] = parents()
        parent.suspend()
        (tmp_path / "go").touch()

    warm.expect({"prepare": ONE, "train": ONE})
    assert start(tmp_path, WAITS + ROWS, on_line=on_line).splits["train"].rows == 1
    assert [parent.status() != psutil.STATUS_STOPPED for parent in parents()] == [True]


@pytest.mark.parametrize(("written", "code"), [(0, 0), (7, 7), (-15, 143), (None, -9)])
def test_a_guard_that_has_ended_needs_no_answer_of_its_parent(
    written: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the guard wrote is not waited for: its parent may be importing something.
    monkeypatch.setattr(warm, "ANSWER_S", 0.1 if written is None else 300.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (control, stdin), (stdout, output) = os.pipe(), os.pipe()
    parent = subprocess.Popen(["sleep", "60"])
    if written is not None:
        (tmp_path / "guard.json").write_text(json.dumps({"code": written}))
    guard = warm.ForkedGuard(Process(parent.pid, "0"), parent, ours, stdin, stdout, RunDir(tmp_path))
    try:
        assert guard.wait(20) == code
    finally:
        parent.kill()
        parent.wait()
        for end in (theirs, guard.stdin, guard.stdout):
            end.close()
        for descriptor in (control, output):
            os.close(descriptor)


def test_each_number_of_threads_has_a_parent_of_its_own_and_there_are_two_at_most(tmp_path: Path) -> None:
    for threads in (1, 2, 3, 1):
        start(tmp_path, processes=2, threads=threads)
        assert len(parents()) <= warm.MOST
    assert len(parents()) == warm.MOST


def test_what_is_read_at_the_start_takes_another_parent() -> None:
    plain = warm.read_conditions({"PATH": "/bin", "SECRET": "one"})
    assert warm.read_conditions({"PATH": "/bin", "SECRET": "two"}) == plain
    for variable in ("OMP_STACKSIZE", "TORCH_LOGS", "PYTHONHASHSEED"):
        assert warm.read_conditions({"PATH": "/bin", variable: "1"}) != plain


def test_a_single_launch_of_one_process_starts_no_parent(tmp_path: Path) -> None:
    warm.expect({"prepare": ONE})
    start(tmp_path)
    assert parents() == []


def test_accelerators_other_interpreters_and_the_switch_rule_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm.can_be_warm({}) is (sys.platform == "linux")
    for name, value in ((SWITCH, "0"), ("PYTHON_EXEC", "/usr/bin/python3"), ("PJRT_DEVICE", "CPU")):
        assert not warm.can_be_warm({name: value})
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(gpu_selection, "DEVICE_FILES", tmp_path)
    assert warm.can_be_warm({})
    (tmp_path / "nvidia0").touch()
    assert not warm.can_be_warm({"CUDA_VISIBLE_DEVICES": ""})


def test_it_ends_when_idle_and_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_parent, "IDLE_S", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        warm_parent.WarmParent(theirs, []).serve()
        monkeypatch.setattr(warm_parent, "IDLE_S", 1000.0)
        ours.close()
        warm_parent.WarmParent(theirs, []).serve()


def test_what_an_announced_verb_takes_is_loaded_after_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    warm.expect({"prepare-data": ONE, "train": ONE})
    [parent] = warm._parents._living.values()
    assert "prepare-data,train" in parent.process.args  # type: ignore[operator]  # a list here
    loaded: list[list[str]] = []
    launches = iter([True, False])

    def load(modules: list[str]) -> bool:
        loaded.append(list(modules))
        return True

    monkeypatch.setattr(warm_parent, "_load", load)
    monkeypatch.setattr(warm_parent.WarmParent, "_take_launch", lambda self: next(launches))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b"launch")
        warm_parent.WarmParent(theirs, ["prepare-data", "train"]).serve()
    assert loaded == [list(warm_parent.LATER["train"])]


def test_a_parent_that_still_imports_does_not_hold_up_its_owners_end() -> None:
    warm.expect({"prepare-data": ONE, "train": ONE})
    [parent] = warm._parents._living.values()
    warm.close()
    assert parent.process.returncode == -signal.SIGKILL
