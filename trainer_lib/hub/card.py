"""The model card: a README with a YAML head for the Hub (model-index, licence, tags) and a text for people.

Equal inputs give equal bytes. A card holds no date, run id or path, so publishing again changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.storage import FileEntry
from trainer_lib.trackers.names import is_measurement
from trainer_lib.trackers.params import flatten_params

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Card:
    """The content of a model card.

    Attributes:
        title: name of the model.
        metrics: split -> metric -> value.
        data_name, data_digest: name and SHA-256 of the training data.
        rows: split -> number of rows.
        stage_keys, stage_digests: content key and content digest of every stage that led to the model.
        arguments: training arguments that differ from their defaults.
        facts: other numbers (parameters, optimizer steps, samples seen).
        files: what is published besides the card.
        library: the library that loads the model.
        language: languages, as the Hub names them ("en").
        tasks: identifiers of tasks ("text-classification").
        datasets, dataset_names, dataset_args: identifiers of the training data on the Hub, their names for people, and
            their configurations, in one order.
        code_digest: SHA-256 of the code that is published with the model; None: there is none.
        columns: names of the columns that the model is given.
        address: where the model is published; None: in this folder, wherever that is.
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
    code_digest: str | None = None
    columns: Sequence[str] = ()
    address: str | None = None


def render_card(card: Card) -> str:
    """The README of a model with its YAML head."""
    from trainer_lib.yaml_text import dump_yaml

    head = dump_yaml(_render_head(card))
    parts = [
        f"---\n{head}---",
        # A line break would end the heading.
        f"# {_join_lines(card.title)}",
        card.description.strip(),
        _render_results(card),
        _render_training(card),
        _render_usage(card),
        _render_provenance(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tidy_metrics(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics for a card: names lose the prefix of their split and `eval_`; timings and values that are not numbers go.

    Args:
        metrics: split -> name -> value.
    """
    tidy: dict[str, dict[str, float]] = {}
    for split, values in metrics.items():
        if not isinstance(values, Mapping):
            continue
        for name, value in values.items():
            short = name.removeprefix(f"{split}_").removeprefix("eval_")
            if isinstance(value, int | float) and not isinstance(value, bool) and is_measurement(short):
                tidy.setdefault(split, {})[short] = value
    return tidy


def _render_head(card: Card) -> dict[str, Any]:
    """The YAML head, after the Hub's model card specification. Values that are not finite stand in the text only."""
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
    results = [result for split, values in card.metrics.items() if (result := _describe_result(card, split, values))]
    if results:
        head["model-index"] = [{"name": _join_lines(card.title), "results": results}]
    lineage = {"data_digest": card.data_digest, "stage_keys": dict(card.stage_keys)}
    head["trainflow"] = {key: value for key, value in lineage.items() if value}
    return head


def _describe_result(card: Card, split: str, values: Mapping[str, float]) -> dict[str, Any] | None:
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
    # The Hub's model-index needs a task.
    task = card.tasks[0] if card.tasks else "other"
    return {"task": {"type": task, "name": "Evaluation"}, "dataset": dataset, "metrics": finite}


def _render_results(card: Card) -> str:
    splits = list(card.metrics)
    names = sorted({name for values in card.metrics.values() for name in values})
    if not names:
        return ""
    rows = [[_escape(name), *(_format(card.metrics[split].get(name)) for split in splits)] for name in names]
    return "## Results\n\n" + _render_table(["metric", *map(_escape, splits)], rows)


def _render_training(card: Card) -> str:
    parts = []
    if card.rows:
        parts.append(
            _render_table(["split", "rows"], [[_escape(split), f"{rows:,}"] for split, rows in card.rows.items()])
        )
    facts = [f"- {_join_lines(str(name))}: {_format(value)}" for name, value in card.facts.items() if value is not None]
    if facts:
        parts.append("\n".join(facts))
    arguments = flatten_params(card.arguments)  # secrets masked, long values cut
    if arguments:
        rows = [[f"`{_escape(name)}`", _escape(value)] for name, value in sorted(arguments.items())]
        parts.append(_render_table(["argument", "value"], rows))
    return "## Training\n\n" + "\n\n".join(parts) if parts else ""


def _render_usage(card: Card) -> str:
    parts = [_render_loading(card), _render_weights(card)]
    return "## Use\n\n" + "\n\n".join(part for part in parts if part) if any(parts) else ""


def _render_loading(card: Card) -> str:
    """How to predict with the whole model, code included."""
    if card.code_digest is None:
        return ""
    columns = ", ".join(f'"{name}": …' for name in card.columns)
    return (
        "```python\nfrom trainer_lib import load_model\n\n"
        "# The model's code is executed: read it below code/, then name the SHA-256 of what you have read.\n"
        f'model = load_model("{card.address or "."}", trust_code="{card.code_digest}")\n'
        f"model.predict([{{{columns}}}])\n```"
    )


def _render_weights(card: Card) -> str:
    weights = [entry.path for entry in card.files if entry.path.endswith(".safetensors")]
    if not weights:
        return ""
    return (
        "The weights alone:\n\n```python\nfrom safetensors.torch import load_file\n\n"
        f'state_dict = load_file("{weights[0]}")  # no pickle is involved\n```'
    )


def _render_provenance(card: Card) -> str:
    parts = ["## Provenance\n\nEvery file can be traced to the data and the code it was made from."]
    if card.data_digest:
        parts.append(f"Training data: sha256 `{card.data_digest}`.")
    stages = [
        [_escape(stage), f"`{key}`", f"`{card.stage_digests.get(stage, '')}`"] for stage, key in card.stage_keys.items()
    ]
    if stages:
        parts.append(_render_table(["stage", "content key", "content digest"], stages))
    if card.files:
        rows = [[f"`{_escape(entry.path)}`", f"{entry.size:,}", f"`{entry.sha256}`"] for entry in card.files]
        parts.append(_render_table(["file", "bytes", "sha256"], rows))
    if card.versions:
        parts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in card.versions.items()) + ".")
    return "\n\n".join(parts)


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _escape(text: str) -> str:
    """Escape text so that it cannot leave its table cell or become markup."""
    # A backslash first: it would escape the bars' own backslashes.
    escaped = _join_lines(text).replace("\\", "\\\\").replace("|", "\\|")
    return escaped.replace("<", "&lt;").replace("`", "'")


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def parse_card_head(readme: str) -> dict[str, Any]:
    """The YAML head of a card; empty when there is none, or it cannot be parsed."""
    from trainer_lib.yaml_text import YamlProblem, parse_yaml

    parts = readme.split("---\n", 2)
    # A head is the first thing in the file; later rules are part of the text.
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        head = parse_yaml(parts[1])
    except YamlProblem:
        return {}
    return head if isinstance(head, dict) else {}
