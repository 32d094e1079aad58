"""A preparation, source by source, whose workers or whose command are killed.

    python -m benchmarks.prepare_kills --size full --save

Rounds of two workers, of which one is killed (SIGKILL) after a random number of finished sources; in every third round
the process that started them as well, which is then started again. Wanted: the bytes of one worker that was left alone,
and at most one source for each worker prepared again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks._result import arguments, publish
from benchmarks._workers import find_worker
from trainer_lib.launch.base import launch
from trainer_lib.launch.pool import apart, launch_workers
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import PrepareRequest, RecipeFile

WORKERS = 2
RECIPE = """
import random
import time


def list_sources(options, out):
    return list(range(options["sources"]))


def prepare_shard(source, options):
    with open(options["log"], "a") as log:
        log.write(f"{source}\\n")
    draw = random.Random(source)
    time.sleep(0.01)
    rows = [{"x": [draw.random() for _ in range(8)], "row_id": source * 100 + n} for n in range(100)]
    return {"train": rows[10:], "test": rows[:10]}


def build_model(options, data): ...
"""
SIZES = {"smallest": (40, 1), "full": (200, 50)}  # sources, rounds


def request(folder: Path, name: str, sources: int) -> PrepareRequest:
    """Return what is to be prepared, below `folder`."""
    (folder / "recipe.py").write_text(RECIPE)
    options = {"sources": sources, "log": str(folder / f"{name}.txt")}
    recipe = RecipeFile(str(folder / "recipe.py"), str(folder))
    return PrepareRequest(output=str(folder / name), recipe=recipe, options=options, shard_rows=32)


def prepare(asked: PrepareRequest) -> None:
    """Prepare with several workers, as the stage does."""
    one = LaunchConfig(kind="process", processes=1, threads=1)
    several = apart(LaunchConfig(kind="torchrun", processes=WORKERS, threads=1), on_devices=False)
    launch(replace(asked, step="list"), one, env={}, on_line=_drop, on_event=_drop)
    launch_workers(replace(asked, step="parts"), several, env={}, on_line=_drop, on_event=_drop)
    launch(replace(asked, step="finish"), one, env={}, on_line=_drop, on_event=_drop)


def kills(folder: Path, sources: int, rounds: int) -> dict[str, int]:
    """Kill, start again, and return what differed."""
    draw = random.Random(0)
    whole = request(folder, "whole", sources)
    launch(whole, LaunchConfig(kind="in_process", processes=1), env={}, on_line=_drop, on_event=_drop)
    expected = _files(folder / "whole")
    counts = {"rounds": 0, "workers_killed": 0, "commands_killed": 0, "different": 0, "most_prepared_again": 0}
    for number in range(rounds):
        command = [sys.executable, "-m", "benchmarks.prepare_kills", "--child", str(folder), str(sources)]
        with subprocess.Popen(command) as process:
            if holder := find_worker(folder / "killed", process, "records/parts/*/*", draw.randrange(1, sources // 2)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(holder.pid, signal.SIGKILL)
                    counts["workers_killed"] += 1
                if number % 3 == 2:
                    process.kill()
                    counts["commands_killed"] += 1
            process.wait()
        if process.returncode != 0:
            subprocess.run(command, check=True)
        calls = (folder / "killed.txt").read_text().split()
        counts["rounds"] += 1
        counts["different"] += _files(folder / "killed") != expected
        counts["most_prepared_again"] = max(counts["most_prepared_again"], len(calls) - sources)
        shutil.rmtree(folder / "killed")
        (folder / "killed.txt").unlink()
    return counts


def _drop(_: object) -> None:
    """Show nothing."""


def _files(folder: Path) -> dict[str, bytes]:
    found = [*folder.glob("data/*/*.arrow"), folder / "statistics.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def main() -> None:
    """Measure, print, and save on request."""
    if sys.argv[1:2] == ["--child"]:
        prepare(request(Path(sys.argv[2]), "killed", int(sys.argv[3])))
        return
    chosen = arguments(__doc__, list(SIZES))
    sources, rounds = SIZES[chosen.size]
    with tempfile.TemporaryDirectory() as name:
        result = kills(Path(name), sources, rounds)
    publish("prepare_kills", chosen.size, {"sources": sources, "workers": WORKERS, "kills": result}, chosen.save)


if __name__ == "__main__":
    main()
