"""The model card: a README whose YAML head the Hub understands (model-index, licence, tags) and whose text people do.

The same inputs give the same bytes, always: no date, no run id, no path, so that publishing again changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.storage import FileEntry
from trainer_lib.trackers.params import flatten_params
from trainer_lib.yaml_text import YamlProblem, dump_yaml, parse_yaml

_BOOKKEEPING = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|epoch|model_preparation_time)$")

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Card:
    """What a model card tells.

    Attributes:
        title: name of the model.
        metrics: per split, the values measured on it.
        data: facts about the training data; `digest` is its sha256.
        rows: rows per split.
        stage_keys, stage_digests: content key and content digest of every stage the model came from.
        arguments: the arguments that were set for training.
        facts: other numbers worth a line (parameters, optimizer steps, samples seen).
        files: what is published besides the card.
        library: what loads it.
        language: its languages, as the Hub names them ("en").
        tasks: identifiers of what it does ("text-classification").
        datasets, dataset_names, dataset_args: identifiers on the Hub of what it was trained on, their names for people,
            and their configurations, in the same order.
    """

    title: str
    description: str = ""
    license: str | None = None
    tags: Sequence[str] = ()
    base_model: str | None = None
    metrics: Metrics = field(default_factory=dict)
    data_name: str = "data"
    data_digest: str | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    stage_keys: Mapping[str, str] = field(default_factory=dict)
    stage_digests: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[FileEntry] = ()
    library: str = "trainflow"
    language: Sequence[str] = ()
    tasks: Sequence[str] = ()
    datasets: Sequence[str] = ()
    dataset_names: Sequence[str] = ()
    dataset_args: Sequence[str] = ()


def model_card(card: Card) -> str:
    """The README of a model, YAML head included."""
    head = dump_yaml(_metadata(card))
    parts = [
        f"---\n{head}---",
        f"# {_line(card.title)}",
        card.description.strip(),
        _results(card),
        _training(card),
        _usage(card),
        _provenance(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tidy_metrics(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics per split as a card wants them: names without the split's or `eval_` prefix, without timings.

    Takes `{split: {name: value}}`; values that are not numbers are left out.
    """
    tidy: dict[str, dict[str, float]] = {}
    for split, values in metrics.items():
        if not isinstance(values, Mapping):
            continue
        for name, value in values.items():
            short = name.removeprefix(f"{split}_").removeprefix("eval_")
            if isinstance(value, int | float) and not isinstance(value, bool) and not _BOOKKEEPING.search(short):
                tidy.setdefault(split, {})[short] = value
    return tidy


def _metadata(card: Card) -> dict[str, Any]:
    """The YAML head, in the Hub's model card specification. Values it cannot hold (NaN) stay in the text only."""
    head: dict[str, Any] = {"library_name": card.library, "tags": list(dict.fromkeys(["trainflow", *card.tags]))}
    if card.language:
        head["language"] = list(card.language)
    if card.license:
        head["license"] = card.license
    if card.base_model:
        head["base_model"] = card.base_model
    if card.datasets:
        head["datasets"] = list(card.datasets)
    if card.tasks:
        head["pipeline_tag"] = card.tasks[0]
    names = sorted({name for values in card.metrics.values() for name in values})
    if names:
        head["metrics"] = names
    results = [result for split, values in card.metrics.items() if (result := _result(card, split, values))]
    if results:
        head["model-index"] = [{"name": _line(card.title), "results": results}]
    lineage = {"data_digest": card.data_digest, "stage_keys": dict(card.stage_keys)}
    head["trainflow"] = {key: value for key, value in lineage.items() if value}
    return head


def _result(card: Card, split: str, values: Mapping[str, float]) -> dict[str, Any] | None:
    finite = [
        {"type": name, "name": name, "value": value} for name, value in sorted(values.items()) if math.isfinite(value)
    ]
    if not finite:
        return None
    name = card.dataset_names[0] if card.dataset_names else card.datasets[0] if card.datasets else card.data_name
    kind = card.datasets[0] if card.datasets else card.data_name
    dataset = {"name": f"{name} ({split})", "type": kind, "split": split}
    if card.dataset_args:
        dataset["args"] = card.dataset_args[0]
    if card.data_digest:
        dataset["revision"] = card.data_digest
    task = card.tasks[0] if card.tasks else "other"
    return {"task": {"type": task, "name": "Evaluation"}, "dataset": dataset, "metrics": finite}


def _results(card: Card) -> str:
    splits = list(card.metrics)
    names = sorted({name for values in card.metrics.values() for name in values})
    if not names:
        return ""
    rows = [[_cell(name), *(_number(card.metrics[split].get(name)) for split in splits)] for name in names]
    return "## Results\n\n" + _table(["metric", *map(_cell, splits)], rows)


def _training(card: Card) -> str:
    parts = []
    if card.rows:
        parts.append(_table(["split", "rows"], [[_cell(split), f"{rows:,}"] for split, rows in card.rows.items()]))
    facts = [f"- {_line(str(name))}: {_number(value)}" for name, value in card.facts.items() if value is not None]
    if facts:
        parts.append("\n".join(facts))
    arguments = flatten_params(card.arguments)  # secrets masked, long values cut
    if arguments:
        rows = [[f"`{_cell(name)}`", _cell(value)] for name, value in sorted(arguments.items())]
        parts.append(_table(["argument", "value"], rows))
    return "## Training\n\n" + "\n\n".join(parts) if parts else ""


def _usage(card: Card) -> str:
    weights = [entry.path for entry in card.files if entry.path.endswith(".safetensors")]
    if not weights:
        return ""
    return (
        "## Use\n\n```python\nfrom safetensors.torch import load_file\n\n"
        f'state_dict = load_file("{weights[0]}")  # no pickle is involved\n```'
    )


def _provenance(card: Card) -> str:
    parts = ["## Provenance\n\nEvery file can be traced to the data and the code it was made from."]
    if card.data_digest:
        parts.append(f"Training data: sha256 `{card.data_digest}`.")
    stages = [
        [_cell(stage), f"`{key}`", f"`{card.stage_digests.get(stage, '')}`"] for stage, key in card.stage_keys.items()
    ]
    if stages:
        parts.append(_table(["stage", "content key", "content digest"], stages))
    if card.files:
        rows = [[f"`{_cell(entry.path)}`", f"{entry.size:,}", f"`{entry.sha256}`"] for entry in card.files]
        parts.append(_table(["file", "bytes", "sha256"], rows))
    if card.versions:
        parts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in card.versions.items()) + ".")
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Text that cannot leave its table cell, nor become markup."""
    escaped = _line(text).replace("\\", "\\\\").replace("|", "\\|")
    return escaped.replace("<", "&lt;").replace("`", "'")


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _cell(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def card_metadata(readme: str) -> dict[str, Any]:
    """The YAML head of a card; empty when it has none that can be read."""
    parts = readme.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        head = parse_yaml(parts[1])
    except YamlProblem:
        return {}
    return head if isinstance(head, dict) else {}
