"""Launches with real processes: what comes back, what is heard, what is left, and who waits for a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.support.launched import Owner, kept_files, patience_s, request
from trainer_lib.errors import CodeError, InfrastructureError, Interrupted, Preempted
from trainer_lib.launch import warm
from trainer_lib.launch.base import launch
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings.config import LaunchConfig, resolve_config
from trainer_lib.protocol.requests import Request

R = TypeVar("R")

ROWS = """
def prepare(options, out):
    return {"train": [{"x": 1}, {"x": 2}]}

def build_model(options, data):
    raise NotImplementedError
"""


@dataclass
class Heard:
    lines: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def launch(
        self,
        request: Request[R],
        *,
        env: dict[str, str] | None = None,
        should_cancel: Callable[[], bool] | None = None,
        on_line: Callable[[str], None] | None = None,
        **config: Any,
    ) -> R:
        return launch(
            request,
            LaunchConfig(**{"kind": "process", "grace_s": 2.0, **config}),
            env=env or {},
            on_line=on_line or self.lines.append,
            on_event=self.events.append,
            should_cancel=should_cancel,
        )


@pytest.fixture
def heard() -> Heard:
    return Heard()


def nothing_left() -> bool:
    return not [path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("trainflow-")]


def test_result_lines_and_events_come_back(heard: Heard, tmp_path: Path) -> None:
    recipe = "import os\nprint('first'); print('carriage\\rreturn', end=''); print('é', os.environ['SECRET'])\n" + ROWS
    assert heard.launch(request(tmp_path, recipe), env={"SECRET": "from the caller"}).splits["train"].rows == 2
    assert heard.lines == ["first", "carriage", "returné from the caller"]
    assert [event["event"] for event in heard.events] == ["start", "progress"]
    assert nothing_left()


def test_lines_arrive_while_the_work_goes_on(heard: Heard, tmp_path: Path) -> None:
    """And a callback that raises ends the workers."""
    recipe = "import time; print('hello'); time.sleep(300)\n" + ROWS
    with pytest.raises(Interrupted, match="Cancelled"):
        heard.launch(request(tmp_path, recipe), should_cancel=lambda: heard.lines == ["hello"])

    def refuse(line: str) -> None:
        raise LookupError(line)

    with pytest.raises(LookupError, match="hello"):
        heard.launch(request(tmp_path, recipe), on_line=refuse)
    assert nothing_left()


def test_what_the_recipe_raises_comes_back_typed_and_cut_to_its_frames(heard: Heard, tmp_path: Path) -> None:
    recipe = "def helper():\n    raise KeyError('gone')\n\ndef prepare(options, out):\n    helper()\n"
    recipe += "build_model = prepare\n"
    with pytest.raises(CodeError, match="KeyError: 'gone'") as caught:
        heard.launch(request(tmp_path, recipe))
    error = caught.value
    assert (error.exit_code, error.rank) == (10, None)  # one process: no rank to be told
    assert error.value == f"{tmp_path}/recipe.py:2 in helper"
    assert error.details is not None
    assert error.details.count('File "') == 2
    assert "trainer_lib" not in error.details
    assert heard.lines == []
    assert nothing_left()


def test_a_worker_told_to_stop_is_preempted(heard: Heard, tmp_path: Path) -> None:
    # Short sleeps: a signal between Python's last look and a long sleep would be handled after it.
    recipe = "import os, time\nprint(os.getpid())\nwhile True:\n    time.sleep(0.05)\n"
    with pytest.raises(Preempted, match="Asked to stop"):
        heard.launch(request(tmp_path, recipe), on_line=lambda line: os.kill(int(line), signal.SIGTERM))


def test_restarts_go_on_after_a_lost_worker_but_not_after_a_bug(heard: Heard, tmp_path: Path) -> None:
    lose = "import os\nfrom pathlib import Path\nmark = Path(__file__).with_name('mark')\n"
    lose += "if not mark.exists():\n    mark.touch(); print('here'); os.kill(os.getpid(), 9)\n"
    with pytest.raises(InfrastructureError, match=r"Rank 0 was killed by SIGKILL \(9\)") as caught:
        heard.launch(request(tmp_path, lose + ROWS), on_line=lambda line: None)
    assert caught.value.details == "here"
    (tmp_path / "mark").unlink()
    assert heard.launch(request(tmp_path, lose + ROWS), max_restarts=1).splits["train"].rows == 2
    assert [event["message"] for event in heard.events if event["event"] == "warning"] == [
        "Rank 0 was killed by SIGKILL (9). Starting again (1 of 1)."
    ]
    bug = "from pathlib import Path\nPath(__file__).with_name('runs').open('a').write('x')\nraise ValueError\n"
    with pytest.raises(CodeError):
        heard.launch(request(tmp_path, bug), max_restarts=3)
    assert (tmp_path / "runs").read_text() == "x"


def test_a_hang_ends_with_the_stacks(heard: Heard, tmp_path: Path) -> None:
    recipe = "import time\ndef stuck_here():\n    time.sleep(300)\nstuck_here()\n"
    with pytest.raises(InfrastructureError, match="There was no progress for") as caught:
        heard.launch(
            request(tmp_path, recipe), timeout_s=patience_s("trainer_lib.worker.process.session", 1.5, starts=6)
        )
    assert "in stuck_here" in (caught.value.details or "")
    with kept_files(caught.value) as folder:
        assert "in stuck_here" in (folder / "stack-0.txt").read_text()


def test_run_files_are_private_and_kept_only_for_debugging(heard: Heard, tmp_path: Path) -> None:
    recipe = "import os, sys\nfrom pathlib import Path\nrun = Path(os.environ['TRAINFLOW_RUN_DIR'])\n"
    recipe += "print(*(oct(folder.stat().st_mode & 0o777) for folder in (run, run.parent)))\n"
    heard.launch(request(tmp_path, recipe + ROWS, debug=True), env={"TOKEN": "hf_secret"})
    assert heard.lines[0] == "0o700 0o700"
    kept = Path(heard.lines[-1].rpartition(": ")[2])
    assert not any(b"hf_secret" in file.read_bytes() for file in kept.iterdir() if file.is_file())
    heard.launch(request(tmp_path, ROWS))
    assert kept.exists()
    RunDir(kept).remove()
    assert nothing_left()


def test_in_process_gives_the_same_and_restores_the_environment(heard: Heard, tmp_path: Path) -> None:
    recipe = "import os\nassert os.environ['GIVEN'] == 'yes'\n" + ROWS
    result = heard.launch(request(tmp_path, recipe), kind="in_process", env={"GIVEN": "yes"})
    assert result.splits["train"].rows == 2
    assert "GIVEN" not in os.environ
    assert [event["event"] for event in heard.events] == ["start", "progress"]
    with pytest.raises(CodeError, match="AssertionError"):
        heard.launch(request(tmp_path, recipe), kind="in_process", env={"GIVEN": "no"})


def test_torchrun_listens_on_loopback_only_and_says_who_speaks(heard: Heard, tmp_path: Path) -> None:
    recipe = (
        "import os, psutil\n"
        "agent = psutil.Process(os.getppid())\n"
        "listening = {c.laddr.ip for c in agent.net_connections('tcp') if c.status == psutil.CONN_LISTEN}\n"
        "print('listens on', sorted(listening), os.environ['MASTER_ADDR'])\n" + ROWS
    )
    heard.launch(request(tmp_path, recipe), kind="torchrun", processes=2)
    said = "listens on ['127.0.0.1'] 127.0.0.1"
    assert sorted(heard.lines) == [f"[rank 1] {said}", said]
    assert nothing_left()


SAYS = "import os\nprint(*(os.environ.get(name) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS')))\n"


@pytest.mark.parametrize("kind", ["accelerate", pytest.param("deepspeed", marks=pytest.mark.needs("deepspeed"))])
def test_a_launcher_starts_as_many_as_were_asked_for_and_the_killed_one_is_named(
    kind: str, heard: Heard, tmp_path: Path
) -> None:
    said = str(tmp_path / "said")  # by rank 0: a rank that starts more slowly is ended before it can say a word
    killed = (
        f"{SAYS}import time\n"
        f"if os.environ['RANK'] == '0': open({said!r}, 'w').close()\n"
        f"while os.environ['RANK'] == '1':\n"
        f"    if os.path.exists({said!r}): os.kill(os.getpid(), 9)\n"
        f"    time.sleep(0.05)\n"
        f"time.sleep(300)\n"
    )
    with pytest.raises(InfrastructureError, match=r"Rank 1 was killed by SIGKILL \(9\)"):
        heard.launch(request(tmp_path, killed), kind=kind, processes=2, threads=1)
    assert {"0 2 0 1", "[rank 1] 1 2 1 1"} <= set(heard.lines)
    assert nothing_left()


def test_accelerate_reads_its_file_and_nothing_of_the_users_home(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "home" / "accelerate"
    cache.mkdir(parents=True)
    (cache / "default_config.yaml").write_text("mixed_precision: fp16\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    says = "import os\nprint('precision', os.environ['ACCELERATE_MIXED_PRECISION'])\n" + ROWS
    heard.launch(request(tmp_path, says), kind="accelerate", processes=1)
    assert "precision no" in heard.lines
    file = tmp_path / "accelerate.yaml"
    file.write_text("mixed_precision: bf16\nnum_processes: 1\ndistributed_type: 'NO'\n")
    heard.launch(request(tmp_path, says), kind="accelerate", config_file=str(file))
    assert "precision bf16" in heard.lines


def test_fewer_processes_than_asked_for_are_refused(tmp_path: Path) -> None:
    """On a CPU, `accelerate launch` may start one process that takes itself for all, and says nothing."""
    run_dir = RunDir.create(request(tmp_path, ROWS).to_json(), 1.0, lambda: False)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--quiet"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "trainer_lib.worker"]
    done = subprocess.run([*command, "prepare", str(run_dir.path)], env={**os.environ, "TRAINFLOW_WORLD_SIZE": "2"})
    [record] = run_dir.read_errors()
    run_dir.remove()
    assert done.returncode != 0
    assert (record["class"], record["field"], record["value"]) == ("ConfigError", "train.launch.processes", "2")
    assert record["message"] == "The launcher started 1 process."


def test_one_of_several_tasks_on_a_machine_keeps_its_local_rank(heard: Heard, tmp_path: Path) -> None:
    """Each has an agent of its own, which would call its one worker the first here: it would take the first GPU."""
    says = "import os\nprint(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])\n" + ROWS
    heard.launch(request(tmp_path, says), kind="torchrun", processes=1, env={"TRAINFLOW_LOCAL_RANK": "1/2"})
    assert heard.lines == ["1 2"]


HOLDS = """
import os
held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
print("holds", sum("/devices/" in path for path in held), flush=True)
"""


def test_the_second_launch_waits_until_the_killed_first_one_has_left_the_device(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    limit: dict[str, Any] = {"kind": "process", "per_device": 1}
    first = Owner(tmp_path / "a", request(tmp_path / "a"), env={"MODE": "deaf"}, grace_s=3.0, **limit)
    try:
        first.wait_for(ready := tmp_path / "a" / "ready-0")
        worker = psutil.Process(int(ready.read_text()))

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "wait":
                alive = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
                events.append({**event, "alive": alive})
            first.process.kill()  # its worker still saves

        config = LaunchConfig(**limit)
        launch(request(tmp_path / "b", ROWS), config, env={}, on_line=lambda line: None, on_event=hear)
    finally:
        first.close()
    wait, free = events
    assert wait["message"].startswith(f"waits for the CPU, in use by prepare (process {first.process.pid}), since ")
    assert (free["message"], wait["alive"], free["alive"]) == ("The CPU can be used.", True, False)
    assert free["waited_s"] > 0


def test_workers_hold_the_device_themselves_also_where_they_waited(heard: Heard, tmp_path: Path) -> None:
    for number in range(2):
        if number:
            warm.expect([("prepare", resolve_config(LaunchConfig(kind="process", per_device=1)))])
        heard.launch(request(tmp_path / str(number), HOLDS + ROWS), per_device=1, grace_s=60.0)
    assert [line for line in heard.lines if line.startswith("holds")] == ["holds 1"] * 2
    assert not warm._waiting
