"""The cost of importing: the package by itself, and the Trainer beyond torch.

    python -m benchmarks.import_time --size full --save

Every import runs in a fresh interpreter, alternating: nothing at all, torch, `trainer_lib` (which must not import
torch), our Trainer, and the Trainer of transformers. Reported are medians and quartiles of the wall seconds inside the
interpreter, whether torch was imported, and what either Trainer takes beyond torch in the same round. Wanted: at most
0.3 s for ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks._result import arguments, publish, spread

SIZES = {"smallest": 1, "full": 9}  # rounds, after one that warms the file cache
STATEMENTS = {
    "torch": "import torch",
    "trainer_lib": "import trainer_lib",
    "ours": "from trainer_lib import Trainer",
    "peer": "from transformers import Trainer",
}
_PROGRAM = """
import json, sys, time
start = time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - start, "torch" in sys.modules, "transformers" in sys.modules]))
"""


def one(statement: str) -> tuple[float, bool, bool]:
    """Run a statement in a new interpreter; return (seconds, torch imported, transformers imported)."""
    program = _PROGRAM.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    seconds, torch, transformers = json.loads(done.stdout)
    return seconds, torch, transformers


def measure(rounds: int) -> dict[str, Any]:
    """Time alternating imports."""
    taken: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    imports: dict[str, dict[str, bool]] = {}
    for number in range(rounds + 1):
        for name, statement in STATEMENTS.items():
            seconds, torch, transformers = one(statement)
            imports[name] = {"torch": torch, "transformers": transformers}
            if number:
                taken[name].append(seconds)
    beyond = {
        f"{name}_beyond_torch": spread([a - b for a, b in zip(taken[name], taken["torch"], strict=True)])
        for name in ("ours", "peer")
    }
    return {"seconds": {name: spread(each) for name, each in taken.items()} | beyond, "imports": imports}


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    rounds = SIZES[chosen.size]
    publish("import_time", chosen.size, {"rounds": rounds, **measure(rounds)}, chosen.save)


if __name__ == "__main__":
    main()
