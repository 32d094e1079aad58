"""Metrics and arguments as trackers have them: names in sections, parameters flat, short and without secrets; tables.

Metrics of a pipeline's MLflow run are called `group/name`, so that its page shows charts in sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_lib.base.suggestions import number_words
from trainer_lib.secrets import MASK, is_secret, mask

MAX_VALUE = 500  # characters; servers differ (MLflow: 6,000), a table cell shows less
MAX_KEY = 250
# What the Trainer logs once about its own speed: numbers of the report, and charts with a single point.
_TIMINGS = re.compile(
    r"(^|_)(runtime|samples_per_second|steps_per_second|tokens_per_second(_per_gpu)?|jit_compilation_time"
    r"|model_preparation_time|total_flos)$"
)

EVALUATE_TAG = "trainflow.evaluate"  # tag of a run: the beginning of the key of its evaluation
GATE_TAG = "trainflow.gate"  # tag of a run: whether its evaluation meets what the spec requires, in words
_MEASURED = ("eval", "test")
_GROUPS = ("train", "eval", "system")
_MARGIN = re.compile(r"(?P<metric>.+)_(?:over|below)_(?P<base>[a-z0-9]+)")
_SLICE = "/"


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
    """Metrics as texts with their intervals, `0.95 (0.93 to 0.97)`, in place of `<name>_low` and `<name>_high`."""
    texts = {name: number_words(value) for name, value in metrics.items()}
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


def flatten_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return nested mappings with dotted keys, values as text of at most 500 characters, and secrets as `***`.

    `trainer_lib.secrets` recognises secrets. Characters that trackers refuse in a key become `_`.
    """
    flat: dict[str, str] = {}
    _flatten("", params, flat)
    return flat


def clean_key(key: str) -> str:
    """Return a metric or parameter name that MLflow accepts: letters, digits and `_-.:/` and spaces."""
    return re.sub(r"[^\w.\-:/ ]", "_", str(key), flags=re.ASCII).strip("/")[:MAX_KEY] or "_"


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics for trackers with sections: `eval_loss` becomes `eval/loss`, `loss` becomes `train/loss`."""
    named = {}
    for name, value in metrics.items():
        section, _, rest = name.partition("_")
        named[f"{section}/{rest}" if section in ("eval", "test") and rest else f"train/{name}"] = value
    return named


def _flatten(prefix: str, value: Any, flat: dict[str, str]) -> None:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, flat)
        return
    text = MASK if any(is_secret(part, value) for part in prefix.split(".")) else _text(value)
    flat[clean_key(prefix)] = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # Mappings inside a list keep their form, but their secrets go.
        return "[" + ", ".join(_text(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in flatten_params(value).items()) + "}"
    return mask(str(value))


@dataclass(frozen=True)
class SliceTable:
    """The metrics of the slices by one column, in the order of `columns`, behind the number of rows.

    A row of `cells` begins with the value of the column; a metric that a slice has not is None.
    """

    columns: list[str]
    cells: list[list[Any]]

    def with_intervals(self) -> SliceTable:
        """The table with metrics as texts that have their intervals, in place of the columns of both ends."""
        ends = {name: (f"{name}_low", f"{name}_high") for name in self.columns}
        ends = {name: both for name, both in ends.items() if set(both) <= set(self.columns)}
        bounds = {bound for both in ends.values() for bound in both}
        kept = [name for name in self.columns if name not in bounds]
        rows = []
        for value, *cells in self.cells:
            found = {name: cell for name, cell in zip(self.columns, cells, strict=True) if cell is not None}
            texts = with_intervals({name: cell for name, cell in found.items() if name in bounds or name in ends})
            rows.append([value, *(texts.get(name, found.get(name)) for name in kept)])
        return SliceTable(kept, rows)


def slice_tables(metrics: Mapping[str, Any]) -> dict[str, SliceTable]:
    """The metrics ``<metric>/<column>/<value>`` of one split as tables by column."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, measured in metrics.items():
        metric, _, rest = name.partition("/")
        column, _, value = rest.partition("/")
        if value:
            found.setdefault(column, {}).setdefault(value, {})[metric] = measured
    tables = {}
    for column, slices in found.items():
        names = dict.fromkeys(["rows", *sorted({metric for measured in slices.values() for metric in measured})])
        cells = [[value, *(slices[value].get(name) for name in names)] for value in sorted(slices)]
        tables[column] = SliceTable(list(names), cells)
    return tables


def whole_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of all rows of a split: those without the name of a slice."""
    return {name: value for name, value in metrics.items() if name.count(_SLICE) < 2}


def without_bounds(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of all rows, without the ends of their intervals."""
    whole = whole_metrics(metrics)
    both = [(f"{name}_low", f"{name}_high") for name in whole]
    ends = {end for low, high in both if low in whole and high in whole for end in (low, high)}
    return {name: value for name, value in whole.items() if name not in ends}


def compare_with_baselines(metrics: Mapping[str, float]) -> list[list[str]]:
    """Metrics with a margin over what needs no model, as [metric, its value, that of the other, the margin].

    A margin is named ``<metric>_over_<base>`` or ``<metric>_below_<base>``, and what it is over ``<base>_<metric>``.
    """
    texts = with_intervals(whole_metrics(metrics))
    rows = []
    for name, margin in texts.items():
        found = _MARGIN.fullmatch(name)
        other = f"{found['base']}_{found['metric']}" if found else ""
        if found and found["metric"] in texts and other in texts:
            rows.append([found["metric"], texts[found["metric"]], f"{found['base']}: {texts[other]}", margin])
    return rows
