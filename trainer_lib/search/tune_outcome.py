"""What a search with Ray Tune has found, read from Tune's own trials."""

from __future__ import annotations

from typing import Any

from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted
from trainer_lib.outputs import BestRun
from trainer_lib.search.base import json_values
from trainer_lib.search.trial_process import ENDED, FAILURE, FOLDER, OBJECTIVE, STEP


def best_run(trials: list[Any], direction: str) -> BestRun:
    """The best of Tune's trials, by what each reported last.

    Raises:
        Interrupted: some are still under way.
        ConfigError, InfrastructureError: none was completed.
    """
    summary = [_summary(trial) for trial in trials]
    unfinished = [each["run_id"] for each in summary if each["state"] == "running"]
    if unfinished:
        raise Interrupted(
            f"The search was stopped with {len(unfinished)} of {len(summary)} trials under way.",
            remedy="What they saved is in their folders.",
        )
    good = [each for each in summary if each["state"] != "fail"]
    if not good:
        raise _none_completed(trials)
    pick = min if direction == "minimize" else max
    best = pick(good, key=lambda each: float(each["objective"]))
    return BestRun(best["run_id"], best["objective"], best["hyperparameters"], summary)


def _none_completed(trials: list[Any]) -> Exception:
    died = [str(trial.get_error() or "") for trial in trials if trial.status == "ERROR"]
    if died:
        return InfrastructureError(
            f"None of {len(trials)} trials was completed: the processes of {len(died)} died.",
            remedy="Look at Ray's own logs; give each trial more memory (resources_per_trial).",
            details="\n".join(died),
        )
    return ConfigError(
        f"None of {len(trials)} trials was completed: all failed.",
        field="hp_space",
        remedy="Narrow the ranges; every failure was logged as a warning.",
    )


def _summary(trial: Any) -> dict[str, Any]:
    last = trial.last_result or {}
    objective = last.get(OBJECTIVE)
    known = isinstance(objective, int | float) and abs(objective) < float("inf")
    state = "complete" if last.get(ENDED) else "pruned"
    if trial.status not in ("TERMINATED", "ERROR"):
        state = "running"
    elif trial.status == "ERROR" or FAILURE in last or not known:
        state = "fail"
    return {
        "run_id": str(trial.trial_id),
        "state": state,
        "objective": float(objective) if objective is not None and known else None,
        "hyperparameters": json_values(trial.config, ""),
        "folder": last.get(FOLDER),
        "step": last.get(STEP),
    }
