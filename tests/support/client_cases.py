"""What a client does with a Trainer, in the clients' own process: construct, train, evaluate, log, save, resume, load.

python -m tests.support.client_cases <module with CASES> ours|transformers <folder> <answer.json> <case or ''>
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = ("constructs", "trains", "evaluates", "saves", "resumes", "loads")


@dataclass(frozen=True)
class Case:
    """One use of a client."""

    name: str  # the row's name in docs/clients.md
    build: Callable[[str], Any]  # output folder -> the client's trainer, always from the same weights and data
    load: Callable[[str], Any]  # folder of a saved model -> the model
    halfway: int = 2  # the step whose checkpoint a second trainer resumes from
    look: Callable[[Any], Any] | None = None  # trainer -> what else is to be compared, as JSON; of both trainers


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Take a case through every step; a step that fails keeps the next ones that depend on it from being tried."""
    outcome: dict[str, Any] = {"errors": {}, "logs": [], "resumed": [], "loaded": None, "looks": []}
    whole, saved = str(folder / "whole"), str(folder / "saved")

    def attempt(step: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            traceback.print_exc()
            outcome["errors"][step] = f"{type(error).__name__}: {error}"
            return None

    trainer = attempt("constructs", lambda: case.build(whole))
    if trainer is None:
        return outcome
    if attempt("trains", trainer.train) is not None:
        attempt("evaluates", trainer.evaluate)
        attempt("saves", lambda: trainer.save_model(saved))
        second = attempt("resumes", lambda: _resume(case, folder))
        outcome["resumed"] = second.state.log_history if second is not None else []
        if "saves" not in outcome["errors"]:
            outcome["loaded"] = attempt("loads", lambda: _difference(trainer.model, case.load(saved)))
        if case.look is not None and not outcome["errors"]:
            outcome["looks"] = [case.look(each) for each in (trainer, second)]
    outcome["logs"] = trainer.state.log_history
    return outcome


def _resume(case: Case, folder: Path) -> Any:
    trainer = case.build(str(folder / "again"))
    trainer.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{case.halfway}"))
    return trainer


def _difference(before: Any, after: Any) -> float:
    kept, loaded = before.state_dict(), after.state_dict()
    assert kept.keys() == loaded.keys(), f"other weights: {sorted(kept.keys() ^ loaded.keys())[:5]}"
    return max(float((kept[name].float() - loaded[name].float()).abs().max()) for name in kept)


def use_our_trainer() -> None:
    """Put our classes in place of those of transformers, for libraries that import them by themselves."""
    import trainer_lib

    trainer_lib.install()


def main(module: str, side: str, folder: str, answer: str, only: str) -> None:
    """Run the cases of a module, or the `only` one; write the outcomes as JSON."""
    if side == "ours":
        use_our_trainer()
    cases: list[Case] = importlib.import_module(module).CASES
    chosen = [case for case in cases if only in ("", case.name)]
    outcomes = {case.name: run(case, Path(folder) / str(number)) for number, case in enumerate(chosen)}
    if os.environ.get("RANK", "0") == "0":
        Path(answer).write_text(json.dumps(outcomes, default=float), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
