"""A project with a sweep, and what is left of one on its storage."""

from __future__ import annotations

from pathlib import Path

from tests.support import toy
from trainer_lib.storage import Store
from trainflow.tasks.stage.retry import Ledger

# A step takes a tenth of a second: long enough to be killed in.
SLOW_RECIPE = toy.RECIPE.replace("y = self.linear(", "import time; time.sleep(0.1); y = self.linear(")
SWEEP = """
sweep:
  space:
    train.args.learning_rate: {low: 1.0e-3, high: 1.0, log: true}
    train.args.seed: [1, 2, 3]
  objective: test_error
  direction: minimize
  trials: 4
"""


def sweep_project(folder: Path, *, recipe: str = toy.RECIPE, tracked: bool = False) -> Path:
    """Write a project whose spec has a sweep of four trials, and return the path of the spec."""
    spec = toy.SPEC.replace("tracking: {enabled: false}", f"tracking: {{enabled: {str(tracked).lower()}}}")
    return toy.project(folder, recipe=recipe, spec=spec + SWEEP)


def attempts(storage: Path | str) -> dict[str, list[str]]:
    """How the attempts of every training ended, by its folder; "" for one without an end."""
    trained = Store.open(str(storage)).child("stages", "train")
    return {
        key: [str(end.get("outcome") or "") for _, end in Ledger(trained.child(key)).records()]
        for key in trained.children()
    }
