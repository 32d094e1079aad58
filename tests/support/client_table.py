"""Outcomes of clients on both Trainers: what differs, and the rows of docs/clients.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.client_cases import STEPS
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "clients.md"
COLUMNS = ("constructs", "trains", "evaluates", "logs the same names", "saves", "resumes", "loads")
#: Losses on both sides, and of a resumed and an unbroken training, are equal to this.
CLOSE = 1e-5
#: Parts of the names of figures that the clock decides.
_TIMES = ("runtime", "per_second", "step_time")
#: Here the operations of any model, there those of a model that counts them itself.
_COUNTED_OTHERWISE = {"total_flos"}

Outcome = Mapping[str, Any]


def _entries(logs: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    for entry in logs:
        names = (name for name in entry if name not in _COUNTED_OTHERWISE and not any(part in name for part in _TIMES))
        yield {name: entry[name] for name in names}


def log_differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, names_only: bool = False) -> list[str]:
    """Return how two logs differ: in the number of entries, in their names, or in a figure by more than `CLOSE`."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} entries and {len(theirs)}"]
    found = []
    for one, other in zip(ours, theirs, strict=True):
        if one.keys() != other.keys():
            found.append(f"step {other['step']}: {sorted(one.keys() ^ other.keys())} on one side only")
    if found or names_only:
        return found
    for one, other in zip(_entries(ours), _entries(theirs), strict=True):
        for name, value in other.items():
            if not math.isclose(one[name], value, rel_tol=CLOSE, abs_tol=CLOSE):
                found.append(f"step {other['step']}: {name} is {one[name]} and {value}")
    return found


def resumed_differences(outcome: Outcome) -> list[str]:
    """Return how a resumed training's losses differ from those of the unbroken one, step by step."""
    again = {entry["step"]: entry["loss"] for entry in outcome["resumed"] if "loss" in entry}
    whole = {entry["step"]: entry["loss"] for entry in outcome["logs"] if "loss" in entry}
    if again.keys() != whole.keys():
        return [f"steps {sorted(again)} and {sorted(whole)}"]
    return [
        f"step {step}: loss {again[step]} and {whole[step]}"
        for step in whole
        if not math.isclose(again[step], whole[step], rel_tol=CLOSE, abs_tol=CLOSE)
    ]


def differences(ours: Outcome, theirs: Outcome, *, names_only: bool = False) -> list[str]:
    """Return what failed on either side, how the logs differ, and what is lost by a resume or by loading."""
    failed = [f"{step}: {text}" for outcome in (ours, theirs) for step, text in outcome["errors"].items()]
    if failed:
        return failed
    found = [*log_differences(ours["logs"], theirs["logs"], names_only=names_only), *resumed_differences(ours)]
    return found if ours["loaded"] == 0 else [*found, f"a loaded weight differs by {ours['loaded']}"]


def achievements(outcome: Outcome, other: Outcome) -> dict[str, bool]:
    """Return column -> whether the client did it; its log is compared with that of the `other` Trainer."""
    done = {}
    for step in STEPS:
        done[step] = bool(outcome["logs"] or step == "constructs") and step not in outcome["errors"]
    done["resumes"] = done["resumes"] and not resumed_differences(outcome)
    done["loads"] = done["loads"] and outcome["loaded"] == 0
    done["logs the same names"] = done["trains"] and not log_differences(
        outcome["logs"], other["logs"], names_only=True
    )
    return {name: done[name] for name in COLUMNS}


def row(name: str, ours: Outcome, theirs: Outcome) -> str:
    """Return a client's row of docs/clients.md: what it does on our Trainer, and on that of transformers."""
    cells = (_summarize(achievements(ours, theirs)), _summarize(achievements(theirs, ours)))
    return f"| {name} | {' | '.join(cells)} |"


def _summarize(done: Mapping[str, bool]) -> str:
    missing = [column for column in COLUMNS if not done[column]]
    return f"all but {', '.join(missing)}" if missing else "all"
