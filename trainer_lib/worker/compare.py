"""The verb *compare*: two trainings, step by step and byte by byte.

Their committed checkpoints are read back and compared file by file. Equal digests are equal bytes: every tensor, random
state and counter in them. What differs is opened, and the first difference in it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.checkpoint.layout import TRAINER_STATE, TRAINING_ARGS
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.errors import DamagedError
from trainer_lib.protocol.requests import CompareRequest, CompareResult
from trainer_lib.storage import Store
from trainer_lib.storage.commit import verify_files
from trainer_lib.worker.process.session import Work

_SHOWN = 20  # differences that are named
_STEP = ("loss", "grad_norm", "learning_rate")
_TIMES = ("_runtime", "_per_second")
_PLACES = ("output_dir", "logging_dir", "resume_from_checkpoint", "best_model_checkpoint")
"""Settings about where a run lies, which cannot differ in what it computed."""

Difference = dict[str, Any]


def run(work: Work[CompareRequest]) -> CompareResult:
    """Compare the checkpoints of two trainings: differences in the order of time, steps before states."""
    pairs = _common(Store.open(work.request.whole), Store.open(work.request.resumed))
    counts: dict[str, Any] = {"checkpoints": [step for step, _, _ in pairs]}
    _, *last = pairs[-1]
    logs = [_json(info, TRAINER_STATE).get("log_history", []) for info in last]
    differences = list(_history(logs[0], logs[1], counts))
    for step, one, other in pairs:
        found = list(_checkpoint(step, one, other, counts))
        if found:  # later checkpoints differ as a consequence
            differences += found
            break
    return CompareResult(tuple(differences[:_SHOWN]), counts)


def _common(whole: Store, resumed: Store) -> list[tuple[int, CheckpointInfo, CheckpointInfo]]:
    sides = [{info.step: info for info in list_checkpoints(root)} for root in (whole, resumed)]
    steps = sorted(sides[0].keys() & sides[1].keys())
    if not steps or steps[-1] != max(sides[0]) or steps[-1] != max(sides[1]):
        what = f"The runs do not end at the same step: {max(sides[0], default=None)} and {max(sides[1], default=None)}."
        raise DamagedError(what, field="checkpoints", remedy="Look at the folders with --keep.")
    for info in (side[step] for side in sides for step in steps):
        if problems := verify_files(Store.open(info.url), info.commit):
            raise DamagedError(f"{problems[0]}.", field=info.url, remedy="Run the proof again.")
    return [(step, sides[0][step], sides[1][step]) for step in steps]


def _history(
    whole: list[dict[str, Any]], resumed: list[dict[str, Any]], counts: dict[str, Any]
) -> Iterator[Difference]:
    """Everything that was logged: losses, norms and rates of every step, metrics of every evaluation."""
    entries = [[_timeless(entry) for entry in history] for history in (whole, resumed)]
    counts["steps"] = sum("loss" in entry for entry in entries[0])
    counts |= {f"{name}s": sum(name in entry for entry in entries[0]) for name in ("grad_norm", "learning_rate")}
    counts["evaluations"] = sum(any(name.startswith("eval_") for name in entry) for entry in entries[0])
    for one, other in zip(*entries, strict=False):  # the entries that only one run has are reported below, as a number
        for name in (*_STEP, *sorted((one.keys() | other.keys()) - {*_STEP})):
            if _differ(one.get(name), other.get(name)):
                yield _difference(one.get("step"), name, one.get(name), other.get(name))
    if len(entries[0]) != len(entries[1]):
        yield _difference(None, "entries of the log", len(entries[0]), len(entries[1]))


def _timeless(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES)}


def _differ(one: Any, other: Any) -> bool:
    return repr(one) != repr(other)  # NaN equals NaN here, and 0.0 is not -0.0


def _checkpoint(
    step: int, whole: CheckpointInfo, resumed: CheckpointInfo, counts: dict[str, Any]
) -> Iterator[Difference]:
    sides = [{entry.path: entry for entry in info.commit.files} for info in (whole, resumed)]
    counts["states"] = sorted(sides[0].keys() & sides[1].keys())
    for name in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(name), sides[1].get(name)
        if one is None or other is None:
            yield _difference(step, name, *("absent" if entry is None else "present" for entry in (one, other)))
            continue
        counts["bytes"] = counts.get("bytes", 0) + one.size
        # Of the last checkpoint even equal tensors are read: the proof says how many it compared.
        if name.endswith(".safetensors") and (one != other or step == counts["checkpoints"][-1]):
            tensors = [read_safetensors(Store.open(info.url), name) for info in (whole, resumed)]
            counts["tensors"] = counts.get("tensors", 0) + len(tensors[0])
            yield from _tensors(step, name, *tensors)
        elif one != other and name.endswith(".json"):
            values = [_without_places(_json(info, name), name) for info in (whole, resumed)]
            yield from (_difference(step, f"{name}: {path}", *pair) for path, *pair in _values("", *values))
        elif one != other:
            yield _difference(step, name, one.sha256[:16], other.sha256[:16])


def _tensors(
    step: int, file: str, whole: Mapping[str, torch.Tensor], resumed: Mapping[str, torch.Tensor]
) -> Iterator[Difference]:
    for name in sorted(whole.keys() | resumed.keys()):
        one, other = whole.get(name), resumed.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            shapes = ("absent" if t is None else f"{t.dtype} {list(t.shape)}" for t in (one, other))
            yield _difference(step, f"{file}: {name}", *shapes)
            continue
        # As bytes, because NaN differs from itself.
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        if not torch.equal(*bits):
            first = int((bits[0] != bits[1]).nonzero()[0]) // one.element_size()
            yield _difference(step, f"{file}: {name}[{first}]", *(t.reshape(-1)[first].item() for t in (one, other)))


def _values(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """The places where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _values(f"{path}.{key}" if path else key, one.get(key), other.get(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _values(f"{path}[{index}]", *pair)
    elif _differ(one, other):
        yield path, one, other


def _without_places(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The record without the places and times of the run: what it computed."""
    kept = {key: value for key, value in record.items() if key not in _PLACES}
    if name == TRAINER_STATE:
        kept["log_history"] = [_timeless(entry) for entry in record.get("log_history", [])]
    # In any other file, a key of these names is a result.
    return kept if name in (TRAINER_STATE, TRAINING_ARGS) else record


def _json(info: CheckpointInfo, name: str) -> dict[str, Any]:
    return parse_json(Store.open(info.url).read_bytes(name), dict)


def _difference(step: int | None, what: str, whole: Any, resumed: Any) -> Difference:
    shown = [value if isinstance(value, int | float | None) else str(value)[:200] for value in (whole, resumed)]
    return {"step": step, "what": what, "whole": shown[0], "resumed": shown[1]}
