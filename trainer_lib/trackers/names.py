"""Names of metrics in the MLflow run of a pipeline: `group/name`, so that its page shows charts in sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What the Trainer logs once about its own speed: numbers of the report, and charts with a single point.
_TIMINGS = re.compile(
    r"(^|_)(runtime|samples_per_second|steps_per_second|tokens_per_second(_per_gpu)?|jit_compilation_time"
    r"|model_preparation_time|total_flos)$"
)

EVALUATE_TAG = "trainflow.evaluate"
"""Tag of a run: the beginning of the key of its evaluation."""
GATE_TAG = "trainflow.gate"
"""Tag of a run: whether its evaluation meets what the spec requires, in words."""
_MEASURED = ("eval", "test")
_GROUPS = ("train", "eval", "system")


def group_log(logs: Mapping[str, float]) -> dict[str, float]:
    """Rename what a Trainer logs: `eval_loss` becomes `eval/loss`, `loss` becomes `train/loss`; timings are left out.

    The mean loss of a whole training, `train_loss`, becomes `train/mean_loss`. Names with a `/` are kept.
    """
    grouped: dict[str, float] = {}
    for name, value in logs.items():
        group, _, rest = name.partition("_")
        if "/" in name:
            grouped[name] = value
        elif name == "train_loss":
            grouped["train/mean_loss"] = value
        elif name == "total_flos" or (group in (*_MEASURED, "train") and _TIMINGS.search(rest)):
            continue
        elif group in _MEASURED and rest:
            grouped[f"{group}/{rest}"] = value
        else:
            grouped[f"train/{name}"] = value
    return grouped


def group_results(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Name the numbers of a stage's result: `<split>/<name>` where it measures splits, else `<stage>/<name>`.

    Timings, epochs and texts are left out. A split called `train`, `eval` or `system` is `<split>-split`, apart from
    the curves of that name.
    """
    if stage == "train":
        return group_log(_numbers(metrics))
    grouped = {f"{stage}/{name}": value for name, value in _numbers(metrics).items()}
    for split, values in metrics.items():
        if isinstance(values, Mapping):
            group = f"{split}-split" if split in _GROUPS else split
            grouped |= {f"{group}/{name}": value for name, value in _numbers(values).items()}
    return grouped


def with_intervals(metrics: Mapping[str, float]) -> dict[str, str]:
    """Metrics as texts, each with its interval, `0.95 (0.93 to 0.97)`, in place of `<name>_low` and `<name>_high`."""
    texts = {name: f"{value:.4g}" for name, value in metrics.items()}
    for name in metrics:
        ends = f"{name}_low", f"{name}_high"
        if name in texts and all(end in texts for end in ends):
            low, high = (texts.pop(end) for end in ends)
            texts[name] += f" ({low} to {high})"
    return texts


def is_measurement(name: str) -> bool:
    """Whether a name in a result is neither a timing nor the epoch."""
    return name != "epoch" and not name.endswith("_epoch") and not _TIMINGS.search(name)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and is_measurement(name)
    }
