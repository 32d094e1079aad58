"""Forecasts of `trainflow plan --probe` next to the outcome: time, memory, checkpoints, steps.

    python -m benchmarks.plan --size full --save

Each example is planned and run on one process and on two (DDP) by the commands, `trainflow plan SPEC --probe` and
`trainflow run SPEC`; each round has another seed, so that every round trains while the data stays prepared. The cases
alternate. A ratio is the planned number over the one that came: below one, more came than was planned. `parts` has the
seconds of both by what they go to; `start` is all of the stage outside of steps, evaluations and saves.

Wanted on a quiet machine: steps and samples equal, time and memory within 10 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._result import arguments, publish, spread
from trainflow.flows.server.embedded import LINGER
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.goodput import KINDS, Goodput
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import Ledger

ROOT = Path(__file__).resolve().parents[1]
WANTED = {"seconds": 0.1, "peak_bytes": 0.1, "checkpoint_bytes": 0.1, "steps": 0.0, "samples": 0.0}
_REST = ("predict.enabled=false", "publish.enabled=false", "tracking.enabled=false")
_SHORT = tuple(f"train.args.{name}" for name in ("max_steps=24", "warmup_steps=4", "eval_steps=12", "save_steps=12"))


@dataclass(frozen=True)
class Case:
    """An example on a number of processes.

    Attributes:
        settings: further overrides of its spec.
    """

    name: str
    spec: str
    processes: int
    settings: tuple[str, ...] = ()

    def words(self, storage: Path, seed: int) -> list[str]:
        """The spec and its overrides, as `plan` and `run` take them."""
        own = (f"storage={storage}", f"train.args.seed={seed}", f"train.launch.processes={self.processes}")
        return [str(ROOT / "examples" / self.spec), *own, *_REST, *self.settings]


_EXAMPLES = {"digits": "digits/pipeline.yaml", "stdlib_lm": "stdlib_lm/quick.yaml"}
_ALL = [Case(f"{name}, {number}", spec, number) for name, spec in _EXAMPLES.items() for number in (1, 2)]
SIZES = {  # rounds, cases
    "smallest": (1, [Case("digits, 1", _EXAMPLES["digits"], 1, _SHORT)]),
    "digits": (5, _ALL[:2]),
    "full": (5, _ALL),
}


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, tuple(SIZES))
    rounds, cases = SIZES[options.size]
    with tempfile.TemporaryDirectory(prefix="trainflow-plan-") as folder:
        result = measure(Path(folder), rounds, cases)
    publish("plan", options.size, {"wanted": WANTED, "rounds": rounds, **result}, options.save)


def measure(folder: Path, rounds: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Plan and run every case in turn, in every round."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(rounds):
        for case in cases:
            found[case.name].append(compare_once(folder, case, seed=number))
    return {"cases": {name: summarize(each) for name, each in found.items()}}


def compare_once(folder: Path, case: Case, *, seed: int) -> dict[str, Any]:
    """Plan a training, run it, and put the numbers of both side by side."""
    storage = folder / case.name.replace(", ", "-")
    words = case.words(storage, seed)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": str(ROOT),
        LINGER: "0",
    }
    planned = _command(["plan", *words, "--probe", "--json"], environment)
    ran = _command(["run", *words, "--json"], environment)
    [train] = [each for each in ran["stages"] if each["stage"] == "train"]
    manifest = StageManifest.from_dict(train["manifest"])
    spent = Goodput.of(Ledger(manifest.store()).records())
    parts = {"planned": planned_parts(planned), "actual": actual_parts(spent, train["seconds"])}
    halves = {"planned": planned_numbers(planned), "actual": actual_numbers(manifest, train["seconds"])}
    return {**halves, "parts": parts, "load_1min": round(os.getloadavg()[0], 2)}


def planned_numbers(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The compared numbers of a plan."""
    found = {name: plan["length"][name] for name in ("steps", "samples")}
    return {**found, "checkpoint_bytes": plan["room"]["checkpoint_bytes"]} | {
        name: plan[name] for name in ("seconds", "peak_bytes")
    }


def actual_numbers(manifest: StageManifest, seconds: float) -> dict[str, Any]:
    """The compared numbers of the training that followed."""
    facts = manifest.facts
    if not isinstance(facts, TrainFacts):
        raise SystemExit("train left no facts")
    newest = manifest.store().child("checkpoints", facts.checkpoints[0])
    return {
        "seconds": seconds,
        "peak_bytes": facts.peak_bytes,
        "checkpoint_bytes": sum(file.size for file in newest.list()),
        "steps": facts.global_step,
        "samples": facts.global_samples,
    }


def planned_parts(plan: Mapping[str, Any]) -> dict[str, float]:
    """The planned seconds by what they go to."""
    probe, length = plan["probe"], plan["length"]
    rows = length["evaluations"] * length["evaluated_rows"]
    return {
        "start": probe["overhead_s"],
        "trained": length["steps"] * probe["step_s"] + probe["warm_up_s"],
        "evaluated": rows * (probe["evaluation_row_s"] or 0.0),
        "saved": length["saves"] * (probe["save_s"] or 0.0),
    }


def actual_parts(spent: Goodput, seconds: float) -> dict[str, float]:
    """The seconds of the stage by what they went to."""
    known = {name: getattr(spent, f"{name}_s") for name in KINDS if name != "restored"}
    return {"start": seconds - sum(known.values()), **known}


def summarize(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and quartiles of a case: what was planned, what came, and the one over the other."""
    numbers = {}
    for quantity in WANTED:
        pairs = [(each["planned"][quantity], each["actual"][quantity]) for each in rounds]
        planned, actual = (spread([pair[half] for pair in pairs]) for half in (0, 1))
        ratio = spread([one / other for one, other in pairs])
        is_met = abs(ratio["median"] - 1) <= WANTED[quantity]
        numbers[quantity] = {"planned": planned, "actual": actual, "planned_to_actual": ratio, "is_met": is_met}
    names = rounds[0]["parts"]["planned"]
    parts = {
        half: {name: spread([each["parts"][half][name] for each in rounds])["median"] for name in names}
        for half in ("planned", "actual")
    }
    return {**numbers, "parts_s": parts, "load_1min": [each["load_1min"] for each in rounds]}


def _command(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainflow.flows.cli.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
