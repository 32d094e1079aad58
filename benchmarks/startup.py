"""The cost of a pipeline beyond its training: whole commands, from their start to their end.

    python -m benchmarks.startup --size full --save

    plain       `_plain_digits`: the training of examples/digits in one process, without a pipeline
    digits      `trainflow run examples/digits/pipeline.yaml` from nothing, while an embedded server lingers
    unchanged   the same command again, while a server lingers: nothing is left to do
    cold        the same again where no server lingers
    stages      `_noop_stages`: a flow of five stages that do nothing, while a server lingers
    prefect     the same with five tasks of Prefect in place of the stages
    torch       `import torch` alone, in which a busy machine's seconds can be counted

They alternate, so their ratios hold on a busy machine, too. Processor seconds count every process of a command and what
the server used meanwhile. Wanted on a quiet machine: unchanged 3 s, cold 6 s, stages 2 s, the first line of output
0.5 s, digits 1.8 times plain.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks._result import arguments, publish, spread
from trainflow.flows.server.embedded import LINGER

SIZES = {"smallest": (1, 1), "full": (2, 15)}  # rounds, epochs
ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "examples/digits/pipeline.yaml"
WANTED = {"unchanged": 3.0, "cold": 6.0, "stages": 2.0, "first_line": 0.5, "digits_to_plain": 1.8}


@dataclass(frozen=True)
class Taken:
    """Seconds of one command: by the clock, of processors, and until its first line of output."""

    wall_s: float
    cpu_s: float
    first_line_s: float


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, tuple(SIZES))
    with tempfile.TemporaryDirectory(prefix="trainflow-startup-") as folder:
        try:
            result = measure(Path(folder), *SIZES[options.size])
        finally:
            _end_servers(Path(folder))
    publish("startup", options.size, result, options.save)


def measure(folder: Path, rounds: int, epochs: int) -> dict[str, Any]:
    """Time alternating commands; the first one creates the server's database and starts the server."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        LINGER: "600",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # everybody's second command finds its byte code
    program = [sys.executable, "-m"]
    plain = [*program, "benchmarks._plain_digits", str(epochs)]
    taken: dict[str, list[Taken]] = defaultdict(list)
    stages = [*program, "benchmarks._noop_stages"]
    first = _take([*stages, str(folder / "first")], environment)
    for number in range(rounds):
        settings = [f"storage={folder / str(number)}", f"train.args.num_train_epochs={epochs}"]
        digits = [*program, "trainflow.flows.cli.main", "run", str(SPEC), *settings]
        taken["torch"].append(_take([sys.executable, "-c", "import torch"], environment))
        taken["plain"].append(_take(plain, environment))
        taken["digits"].append(_take(digits, environment))
        taken["unchanged"].append(_take(digits, environment))
        taken["stages"].append(_take([*stages, str(folder / f"stages-{number}")], environment))
        taken["prefect"].append(_take(stages, environment))
        _end_servers(folder)
        taken["cold"].append(_take(digits, {**environment, LINGER: "0"}))
        _take([*stages, str(folder / f"again-{number}")], environment)  # starts the server of the next round
    return {"wanted_s": WANTED, **_summary(taken), "first_ever": vars(first), "rounds": rounds, "epochs": epochs}


def _summary(taken: Mapping[str, list[Taken]]) -> dict[str, Any]:
    units = [each.name for each in fields(Taken)]
    spreads = {
        name: {unit: spread([getattr(one, unit) for one in each]) for unit in units} for name, each in taken.items()
    }
    quietest = {name: {unit: min(getattr(one, unit) for one in each) for unit in units} for name, each in taken.items()}
    pairs = {"digits_to_plain": ("digits", "plain"), "stages_to_prefect": ("stages", "prefect")}
    ratios = {
        name: {unit: quietest[one][unit] / quietest[other][unit] for unit in ("wall_s", "cpu_s")}
        for name, (one, other) in pairs.items()
    }
    imports = {name: round(each["wall_s"] / quietest["torch"]["wall_s"], 2) for name, each in quietest.items()}
    return {**ratios, "times_import_torch": imports, "quietest": quietest, "spread": spreads}


def _take(command: list[str], environment: Mapping[str, str]) -> Taken:
    before, began, first = _cpu_s(environment), time.perf_counter(), None
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        first = time.perf_counter() - began if first is None else first
        output.append(line)
    if process.wait():
        raise SystemExit(f"{command} failed:\n{''.join(output)}")
    wall = time.perf_counter() - began
    return Taken(wall, _cpu_s(environment) - before, first or wall)


def _cpu_s(environment: Mapping[str, str]) -> float:
    """Processor seconds of all ended commands, and of the server that lingers."""
    times = os.times()
    living = [each.cpu_times() for each in _servers(Path(environment["PREFECT_HOME"]))]
    return times.children_user + times.children_system + sum(each.user + each.system for each in living)


def _servers(home: Path) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or [""]
        if "embedded.py" in " ".join(words) and words[-1].startswith(str(home)):
            found.append(each)
    return found


def _end_servers(home: Path) -> None:
    servers = _servers(home)
    for each in servers:
        each.terminate()
    psutil.wait_procs(servers, timeout=20)


if __name__ == "__main__":
    main()
