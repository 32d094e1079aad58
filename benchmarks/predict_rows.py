"""The cost of `trainflow predict` next to a loop by hand, the gain of a second worker, and the effect of kills.

    python -m benchmarks.predict_rows --size full --save

Speed: JSON lines of 32 numbers through a small model to Parquet, in batches of 64, with one thread each. By hand:
json.loads (and again with orjson, which ours uses), a tensor, the forward, one Parquet file for 10,000 rows. Ours:
`trainflow predict` with one worker in this process. Reported are seconds of processor time, and their ratio. Wanted:
at least 0.9 of the loop's speed.

Workers: whole launches of one and of two workers, in wall seconds and in the processor's. Wanted: 1.7 times as fast,
where two cores are free. Their model has more layers, so that the rows take longer than the start.

Kills: rounds of three workers, of which one is killed (SIGKILL) at a random moment, and sometimes the command as well,
which is then started again. Wanted: each id once, and the bytes of one worker that was left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks._result import arguments, publish, spread
from benchmarks._workers import SpentBelow, find_worker
from tests.support.model_folders import publish_line
from trainer_lib.launch.settings.config import LaunchConfig
from trainflow.tasks.new_rows import NewRows, RowsJob, predict_new_rows

WIDTH = 32
RECIPE = """
LAYERS = 0


def build_model(options, data):
    import torch

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x):
            wide = torch.tanh(x.float() @ torch.full((x.shape[1], 256), 0.01))
            for _ in range(LAYERS):
                wide = torch.tanh(wide @ torch.full((256, 256), 0.01))
            return {"logits": self.linear(wide.mean(1, keepdim=True)).expand(-1, 10)}

    return Line()
"""
SIZES = {"smallest": (2_000, 1, 0, 1), "full": (100_000, 5, 3, 100)}  # rows, runs, runs of workers, rounds of kills


def by_hand(source: Path, target: Path, loads: Callable[[str], Any] = json.loads) -> None:
    """Run the loop that people write by hand."""
    weight, bias = torch.tensor([[2.0]]), torch.zeros(1)
    kept: list[Any] = []
    ids: list[str] = []

    def write(number: int) -> None:
        table = pa.table({"row_id": ids, "prediction": list(torch.cat(kept).numpy())})
        pq.write_table(table, target / f"{number}.parquet", compression="zstd")
        ids.clear()
        kept.clear()

    with source.open() as lines, torch.no_grad():
        batch: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            batch.append(loads(line))
            if len(batch) == 64:
                x = torch.tensor([row["x"] for row in batch])
                wide = torch.tanh(x @ torch.full((WIDTH, 256), 0.01))
                kept.append(torch.nn.functional.linear(wide.mean(1, keepdim=True), weight, bias).expand(-1, 10))
                ids += [row["id"] for row in batch]
                batch = []
            if number % 10_000 == 0:
                write(number)
        if kept:
            write(0)


def job(folder: Path, to: str, rows_per_file: int, model: str = "model") -> RowsJob:
    """Return what is to be predicted."""
    asked = NewRows(
        model=str(folder / model),
        data=[str(folder / "new.jsonl")],
        to=str(folder / to),
        trust=True,
        rows_per_file=rows_per_file,
        batch_size=64,
    )
    return RowsJob.of(asked)


def predict(asked: RowsJob, workers: list[LaunchConfig]) -> None:
    """Predict, and show nothing."""
    predict_new_rows(asked, on_line=lambda line: None, on_event=lambda event: None, workers=workers)


def write_rows(folder: Path, rows: int) -> None:
    """Write JSON lines that 64 divides."""
    draw = random.Random(0)
    with (folder / "new.jsonl").open("w") as file:
        for number in range(rows // 64 * 64):
            file.write(json.dumps({"id": f"r{number}", "x": [round(draw.random(), 4) for _ in range(WIDTH)]}) + "\n")


def speed(folder: Path, runs: int) -> dict[str, Any]:
    """Alternate the loop by hand and one worker in this process."""
    here = [LaunchConfig(kind="in_process", processes=1)]
    hand: list[float] = []
    quick: list[float] = []
    ours: list[float] = []
    for number in range(-1, runs):
        for taken, loads in ((hand, json.loads), (quick, orjson.loads)):
            with tempfile.TemporaryDirectory() as target:
                began = time.process_time()
                by_hand(folder / "new.jsonl", Path(target), loads)
                taken.append(time.process_time() - began)
        began = time.process_time()
        predict(job(folder, f"ours{number}", 10_000), here)
        ours.append(time.process_time() - began)
    hand, quick, ours = hand[1:], quick[1:], ours[1:]  # the first ones load and compile
    return {
        "by_hand_cpu_s": spread(hand),
        "by_hand_with_orjson_cpu_s": spread(quick),
        "ours_cpu_s": spread(ours),
        "share_of_the_loops_speed": spread([a / b for a, b in zip(hand, ours, strict=True)]),
        "with_orjson": spread([a / b for a, b in zip(quick, ours, strict=True)]),
    }


def several(folder: Path, runs: int) -> dict[str, Any]:
    """Alternate launches of one and of two workers."""
    wall: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    for number in range(runs):
        for count in wall:
            asked = job(folder, f"w{count}-{number}", 1_000, "deep")
            with SpentBelow() as spent:
                began = time.perf_counter()
                predict(asked, asked.workers(count, 1))
                wall[count].append(time.perf_counter() - began)
            cpu[count].append(spent.seconds)
    if not runs:
        return {}
    ratio = [one / two for one, two in zip(wall[1], wall[2], strict=True)]
    more = [two / one for one, two in zip(cpu[1], cpu[2], strict=True)]
    return {
        "one_s": spread(wall[1]),
        "two_s": spread(wall[2]),
        "times_as_fast": spread(ratio),
        "one_cpu_s": spread(cpu[1]),
        "two_cpu_s": spread(cpu[2]),
        "cpu_of_two_by_that_of_one": spread(more),
    }


def kills(folder: Path, rounds: int) -> dict[str, Any]:
    """Kill workers and commands; return what differed."""
    draw = random.Random(0)
    whole = job(folder, "whole", 64)
    predict(whole, whole.workers(1, 1))
    expected = _files(folder / "whole")
    ids = pq.read_table(folder / "whole" / "predictions")["row_id"].to_pylist()
    counts = {"rounds": 0, "workers_killed": 0, "commands_killed": 0, "different": 0, "ids": len(set(ids)), "twice": 0}
    counts["twice"] = len(ids) - len(set(ids))
    program = [
        sys.executable,
        "-m",
        "trainflow.flows.cli.main",
        "predict",
        str(folder / "model"),
        str(folder / "new.jsonl"),
    ]
    options = ["--to", str(folder / "killed"), "--trust", "any", "--rows-per-file", "64", "--batch-size", "64"]
    for number in range(rounds):
        command = [*program, *options, "--workers", "3", "--threads", "1"]
        kills_command = number % 3 == 2
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            if holder := find_worker(folder / "killed", process, "predictions/*", draw.randrange(1, 20)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid if kills_command else holder.pid, signal.SIGKILL)
                    counts["commands_killed" if kills_command else "workers_killed"] += 1
            process.communicate()
        if process.returncode != 0:
            subprocess.run(command, check=True, capture_output=True)
        counts["rounds"] += 1
        counts["different"] += _files(folder / "killed") != expected
        shutil.rmtree(folder / "killed")
    return counts


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "predictions").iterdir())}


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    rows, runs, launches, rounds = SIZES[chosen.size]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publish_line(folder / "model", recipe=RECIPE)
        publish_line(folder / "deep", recipe=RECIPE.replace("LAYERS = 0", "LAYERS = 100"))
        write_rows(folder, rows)
        result = {"rows": rows, "speed": speed(folder, runs), "workers": several(folder, launches)}
        write_rows(folder, 6_400 if rounds > 1 else 1_280)
        result["kills"] = kills(folder, rounds)
    publish("predict_rows", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
