"""Names of runs that differ: the pipeline, the settings that differ from its first run, and a counter.

    digits-1    digits-lr0.01-2    digits-lr0.01-width64-3

    <storage>/names/<pipeline>/<number>.json    which run has the number; that of the first one holds its settings

The number is created exclusively, so two commands that start at once have two names. A run that is gone on with keeps
its name, which its record holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import StorageError
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainflow.flows.spec.spec import PipelineSpec

NAMES = "names"
_RECORD = re.compile(r"([0-9]{1,12})\.json")
_LIMIT = 1 << 20
_MOST = 3  # settings in one name
_VALUE_CHARS = 12
_TRIES = 100
_SECTIONS = ("prepare", "train", "evaluate", "predict", "publish")
_SHORT = {
    "learning_rate": "lr",
    "global_batch_size": "gbs",
    "per_device_train_batch_size": "bs",
    "gradient_accumulation_steps": "acc",
    "num_train_epochs": "ep",
    "max_steps": "steps",
    "weight_decay": "wd",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "sched",
    "max_grad_norm": "clip",
}
# What says where and how a stage runs, and not what comes out.
_LEFT_OUT = re.compile(r"\.(launch|recipe|report_to|preemption|retries|enabled|to)(\.|$)")


def name_run(spec: PipelineSpec, run_id: str) -> str:
    """Take the next number of the pipeline and return the name of the new run with this id.

    A storage that cannot be written costs the number: then the name is that of the pipeline with the id.
    """
    folder = Store.open(spec.storage).child(NAMES, spec.name)
    settings = flat_settings(spec.to_record())
    try:
        taken = [int(match[1]) for name in folder.children() if (match := _RECORD.fullmatch(name))]
        first = parse_record(folder.read_if_exists(f"{min(taken)}.json", limit=_LIMIT)) if taken else {}
        base = first.get("settings")
        short = describe_settings(base if isinstance(base, dict) else settings, settings)
        next_one = max(taken, default=0) + 1
        for number in range(next_one, next_one + _TRIES):
            name = "-".join([spec.name, *short, str(number)])
            record: dict[str, Any] = {"run": run_id, "name": name, **({} if taken else {"settings": settings})}
            if folder.create(f"{number}.json", json.dumps(record).encode()):
                return name
    except StorageError:  # a missing name must not end a run
        pass
    return f"{spec.name}-{run_id[:8]}"


def flat_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recorded spec that decide its results, by dotted name; without paths and launches."""
    found = {name: value for section in _SECTIONS for name, value in _flat(record.get(section), section)}
    return {name: value for name, value in found.items() if not _LEFT_OUT.search(name)}


def describe_settings(base: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """``["lr0.01", "width64"]``: where `settings` differ from `base`, at most three of them, those of train first."""
    changed = [name for name in {**settings, **base} if settings.get(name) != base.get(name)]
    changed.sort(key=lambda name: (not name.startswith("train."), name))
    words: dict[str, None] = {}
    for name in changed:
        label = name.rpartition(".")[2]
        words[f"{_slug(_SHORT.get(label, label))}{_value(settings.get(name))}"] = None
    return list(words)[:_MOST]


def _value(value: Any) -> str:
    if value is None:
        return "-unset"
    if isinstance(value, bool):
        return "-on" if value else "-off"
    if isinstance(value, int | float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"-{_slug('+'.join(_last_part(str(part)) for part in value))}"
    return f"-{_slug(_last_part(mask(str(value))))}"


def _last_part(text: str) -> str:
    """The end of a path or an address, which says more than its beginning; another text as it is."""
    return text.rstrip("/").rpartition("/")[2]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", text).strip("_")[:_VALUE_CHARS]


def _flat(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}")
    elif value is not None:
        yield name, value
