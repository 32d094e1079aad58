"""The model card: a README with a YAML head for the Hub (model-index, licence, tags) and a text for people.

Equal inputs give equal bytes. A card holds no date, run id or path, so publishing again changes nothing. What is
renewed with every publication is between two comments, `<!-- trainflow:results -->` and `<!-- /trainflow:results -->`.
Everything else is the author's, and so are fields of the YAML head that trainflow does not set.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from trainer_lib.base.suggestions import number_words, to_markdown
from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import ADAPTER
from trainer_lib.secrets import mask
from trainer_lib.storage import FileEntry
from trainer_lib.trackers.mlflow.model_record import example_row
from trainer_lib.trackers.names import (
    compare_with_baselines,
    flatten_params,
    is_measurement,
    slice_tables,
    whole_metrics,
    with_intervals,
    without_bounds,
)

_CURVE_ROWS = 12
_LITERAL_VALUES = 8  # of an array that is written out
_LIMITATIONS = """## Limitations

*To be filled in by the author: what the model is not for, which data it was not measured on, known biases. This part,
and everything else outside of the marked sections, is kept when the model is published again.*"""

Metrics = Mapping[str, Mapping[str, float]]
_SECTION = re.compile(r"<!-- trainflow:(?P<name>[a-z-]+) -->\n.*?<!-- /trainflow:(?P=name) -->\n?", re.DOTALL)
_RELATIVE_PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!/|[a-z]+:)")
_GONE = "<!-- trainflow: gone -->"
_MARK = re.compile(r"<!-- /?trainflow:[a-z-]+ -->")


@dataclass(frozen=True)
class Picture:
    """A picture next to the card: its path from there, a title for those who do not see it, and what to look for."""

    path: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class HardRows:
    """The rows of a split that the model gets most wrong."""

    split: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Conversations:
    """The conversations that a model was trained on: its template and system prompt, and what the data has.

    `shapes` has the number of conversations by shape, `splits` by split conversations, tokens, and those trained;
    `tokenizer` is its folder below the card, None where it is not published.
    """

    template: str
    system: str | None
    shapes: Mapping[str, int]
    splits: Mapping[str, tuple[int, ...]]
    tokenizer: str | None = None


@dataclass(frozen=True)
class Card:
    """The content of a model card.

    Attributes:
        metrics: split -> metric -> value.
        data_digest: SHA-256 of the training data.
        rows: split -> number of rows.
        stage_keys, stage_digests: content key and content digest of every stage that led to the model.
        arguments: training arguments that differ from their defaults.
        facts: other numbers (parameters, optimizer steps, samples seen).
        files: what is published besides the card.
        library: the library that loads the model.
        language, tasks: as the Hub names them ("en", "text-classification").
        datasets, dataset_names, dataset_args: identifiers of the training data on the Hub, their names for people, and
            their configurations, in one order.
        code_digest: SHA-256 of the code that is published with the model; None: there is none.
        columns: name -> type ("float32[8,8]") of the columns that the model is given.
        loader: library and class that load the model from the files ("transformers", "AutoModel"); None: `load_model`.
        is_merged: the weights are those of the base model with trained adapters merged in, which are in `ADAPTER`.
        sources: name -> SHA-256 of what the data was made from.
        curve: entries of the training's log, with their `step`.
        address: where the model is published; None: in this folder, wherever that is.
        confidence: the probability with which an interval holds its metric; None: it is not known.
        pictures: what the model gets right and wrong.
        hardest: rows that the model gets most wrong, for those who want to publish them.
        conversations: those that it was trained on; None: it was trained on something else.
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
    columns: Mapping[str, str] = field(default_factory=dict)
    loader: tuple[str, str] | None = None
    base_revision: str | None = None
    is_merged: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    curve: Sequence[Mapping[str, Any]] = ()
    address: str | None = None
    confidence: float | None = None
    pictures: Sequence[Picture] = ()
    hardest: Sequence[HardRows] = ()
    conversations: Conversations | None = None


def render_card(card: Card) -> str:
    """The README of a model with its YAML head."""
    from trainer_lib.base.yaml_text import dump_yaml

    head = dump_yaml(_render_head(card))
    usage = [part for part in (_render_loading(card), _render_weights(card)) if part]
    parts = [
        f"---\n{head}---",
        # A line break would end the heading.
        f"# {to_markdown(_title(card))}",
        mark_section("description", mask(card.description.strip())),
        mark_section("use", "\n\n".join(["## Use", *usage]) if usage else ""),
        mark_section("conversations", _render_conversations(card)),
        mark_section("results", _render_results(card)),
        _LIMITATIONS,
        mark_section("training", _render_training(card)),
        mark_section("provenance", _render_provenance(card)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tidy_metrics(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics by split: names lose the prefixes of split and `eval_`; timings and values that are not numbers go."""
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
    fields = {
        "language": list(card.language),
        "license": card.license,
        "base_model": card.base_model,
        "datasets": list(card.datasets),
        "pipeline_tag": next(iter(card.tasks), None),
    }
    head |= {name: value for name, value in fields.items() if value}
    names = sorted({name for values in card.metrics.values() for name in without_bounds(values)})
    if names:
        head["metrics"] = names
    results = [result for split, values in card.metrics.items() if (result := _describe_result(card, split, values))]
    if results:
        head["model-index"] = [{"name": _title(card), "results": results}]
    lineage = {"data_digest": card.data_digest, "stage_keys": dict(card.stage_keys)}
    head["trainflow"] = {key: value for key, value in lineage.items() if value}
    return head


def _describe_result(card: Card, split: str, values: Mapping[str, float]) -> dict[str, Any] | None:
    finite = [
        {"type": name, "name": name, "value": value}
        for name, value in sorted(without_bounds(values).items())
        if math.isfinite(value)
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
    """Metrics with their intervals, next to what needs no model, by slice, and as pictures; empty without metrics."""
    texts = {split: with_intervals(whole_metrics(values)) for split, values in card.metrics.items()}
    names = sorted({name for values in texts.values() for name in values})
    if not names:
        return ""
    parts = ["## Results", *_render_margins(card.metrics)]
    rows = [[to_markdown(name), *(values.get(name, "") for values in texts.values())] for name in names]
    parts.append(_render_table(["metric", *map(to_markdown, texts)], rows))
    if any(set(texts[split]) != set(whole_metrics(card.metrics[split])) for split in texts):
        level = "" if card.confidence is None else f" of {card.confidence:.4g}"
        parts.append(f"In brackets: the interval, by a bootstrap over the rows, with a probability{level}.")
    parts += _render_slices(card.metrics)
    for picture in card.pictures:
        title = to_markdown(picture.title.replace("[", "(").replace("]", ")"))
        parts += [f"### {to_markdown(picture.title)}", f"![{title}]({quote(picture.path)})", to_markdown(picture.note)]
    for table in card.hardest:
        parts.append(f"### Rows of {to_markdown(table.split)} that the model gets most wrong")
        cells = [[_format_value(value) for value in row] for row in table.rows]
        parts.append(_render_table([*map(to_markdown, table.columns)], cells))
    return "\n\n".join(filter(None, parts))


def _render_margins(metrics: Metrics) -> list[str]:
    rows = [[split, *row] for split, values in metrics.items() for row in compare_with_baselines(values)]
    if not rows:
        return []
    head = ["split", "metric", "the model", "without a model", "margin"]
    table = _render_table(head, [list(map(to_markdown, row)) for row in rows])
    return ["A margin above zero is in the model's favour.", table]


def _render_slices(metrics: Metrics) -> list[str]:
    parts = []
    for split, values in metrics.items():
        for column, slices in slice_tables(values).items():
            table = slices.with_intervals()
            rows = [[to_markdown(str(name)), *map(_format_value, cells)] for name, *cells in table.cells]
            parts.append(f"### {to_markdown(split)} by {to_markdown(column)}")
            parts.append(_render_table([to_markdown(column), *table.columns], rows))
    return parts


def _render_training(card: Card) -> str:
    parts = []
    if card.base_model:
        revision = f" at revision `{to_markdown(card.base_revision)}`" if card.base_revision else ""
        parts.append(f"Fine-tuned from `{to_markdown(card.base_model)}`{revision}.")
    if card.rows:
        parts.append(
            _render_table(["split", "rows"], [[to_markdown(split), f"{rows:,}"] for split, rows in card.rows.items()])
        )
    facts = [
        f"- {to_markdown(str(name))}: {_format_value(value)}" for name, value in card.facts.items() if value is not None
    ]
    if facts:
        parts.append("\n".join(facts))
    arguments = flatten_params(card.arguments)  # secrets masked, long values cut
    if arguments:
        rows = [[f"`{to_markdown(name)}`", to_markdown(value)] for name, value in sorted(arguments.items())]
        parts.append(_render_table(["argument", "value"], rows))
    if curve := _render_curve(card.curve):
        parts.append(curve)
    return "## Training\n\n" + "\n\n".join(parts) if parts else ""


def _render_curve(entries: Sequence[Mapping[str, Any]]) -> str:
    """The losses while training as a table of few rows, the last step included; empty without any."""
    steps: dict[int, dict[str, float]] = {}
    for entry in entries:
        losses = {name: entry[name] for name in ("loss", "eval_loss") if isinstance(entry.get(name), int | float)}
        if losses and isinstance(entry.get("step"), int):
            steps.setdefault(entry["step"], {}).update(losses)
    if not steps:
        return ""
    ordered = sorted(steps)
    # Counted from the end, so that the last step is one of them.
    kept = sorted(set(ordered[:: -max(1, math.ceil(len(ordered) / _CURVE_ROWS))]))
    names = [name for name in ("loss", "eval_loss") if any(name in steps[step] for step in kept)]
    rows = [[f"{step:,}", *(_format_value(steps[step].get(name)) for name in names)] for step in kept]
    return _render_table(["optimizer step", *names], rows)


def _render_loading(card: Card) -> str:
    """Code that loads the model by its own library, and that predicts with all of it, code included."""
    parts = []
    address = card.address or "."
    if card.loader is not None:
        library, loader = card.loader
        name = address.removeprefix("hf://").partition("@")[0]
        parts.append(
            f"```python\nfrom {library} import {loader}\n\nmodel = {loader}.from_pretrained({_literal(name)})\n```"
        )
    if card.is_merged:
        parts.append(
            "The weights are those of the base model with the trained adapters merged in: they need no other model. "
            f"`{ADAPTER}/` has the adapters as they were trained"
            + (", which `load_model` puts on the base model." if card.code_digest is not None else ".")
        )
    if card.code_digest is not None:
        columns = ", ".join(f"{_literal(name)}: {_render_example(kind)}" for name, kind in card.columns.items())
        numpy = "import numpy as np\n" if "np." in columns else ""
        parts.append(
            f"```python\n{numpy}from trainer_lib import load_model\n\n"
            "# The model's code is executed: read it below code/, then name the SHA-256 of what you have read.\n"
            f'model = load_model({_literal(address)}, trust_code="{card.code_digest}")\n'
            f"model.predict([{{{columns}}}])\n```"
        )
    if parts and address == ".":
        parts.append('Run it in the folder of this revision, or name that folder in place of ".".')
    return "\n\n".join(parts)


def _render_conversations(card: Card) -> str:
    """The needs of a conversation with the model, and its training data; empty for a model of another kind."""
    chat = card.conversations
    if chat is None:
        return ""
    rows = [
        [to_markdown(split), f"{count:,}", f"{tokens:,}", f"{trained / max(tokens, 1):.1%}"]
        for split, (count, tokens, trained) in chat.splits.items()
    ]
    shapes = ", ".join(f"{count:,} in the shape {to_markdown(shape)}" for shape, count in chat.shapes.items())
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", chat.template)), 0))
    parts = ["## Conversations", _render_chat(card)]
    parts += [_render_table(["split", "conversations", "tokens", "trained"], rows), f"Conversations: {shapes}."]
    parts += [f"System prompt: {to_markdown(chat.system)}"] if chat.system else []
    parts.append(f"Chat template:\n\n{fence}jinja\n{chat.template}\n{fence}")
    return "\n\n".join(filter(None, parts))


def _render_chat(card: Card) -> str:
    """Code that talks with the model; empty where its tokenizer is not published."""
    chat = card.conversations
    if card.loader is None or chat is None or chat.tokenizer is None:
        return ""
    loader = "AutoModelForCausalLM" if card.loader[0] == "transformers" else "AutoPeftModelForCausalLM"
    place = _literal((card.address or ".").removeprefix("hf://").partition("@")[0])
    return (
        f"```python\nfrom {card.loader[0]} import {loader}\nfrom transformers import AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({place}, subfolder={_literal(chat.tokenizer)})\n"
        f"model = {loader}.from_pretrained({place})\n"
        'turns = [{"role": "user", "content": "Hello!"}]\n'
        'form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}\n'
        "asked = tokenizer.apply_chat_template(turns, **form)\n"
        'answer = model.generate(**asked, max_new_tokens=256)[0, asked["input_ids"].shape[1] :]\n'
        "print(tokenizer.decode(answer, skip_special_tokens=True))\n```"
    )


def _literal(text: str) -> str:
    """A text as Python and inside of a code block, which it cannot end."""
    return json.dumps(text).replace("`", "\\u0060")


def _render_example(kind: str) -> str:
    """A value of a column's type, as Python: zeros, which show nothing of the data."""
    dtype, bracket, inside = kind.removesuffix("]").partition("[")
    shape = [int(size) if size.strip().isdigit() else 1 for size in inside.split(",")] if bracket else []
    if math.prod(shape) > _LITERAL_VALUES:
        return f"np.zeros({tuple(shape)}, {dtype!r})".replace("'", '"')
    return json.dumps(example_row({"": kind})[""]).replace("false", "False") if kind != "bytes" else 'b""'


def _render_weights(card: Card) -> str:
    weights = [entry.path for entry in card.files if entry.path.endswith(".safetensors")]
    weights.sort(key=lambda path: path.startswith(f"{ADAPTER}/"))  # merged weights before their adapters
    if not weights:
        return ""
    return (
        "The weights alone:\n\n```python\nfrom safetensors.torch import load_file\n\n"
        f"state_dict = load_file({_literal(weights[0])})  # no pickle is involved\n```"
    )


def _render_provenance(card: Card) -> str:
    parts = ["## Provenance\n\nEvery file can be traced to the data and the code it was made from."]
    if card.data_digest:
        parts.append(f"Training data: sha256 `{card.data_digest}`.")
    if card.sources:
        rows = [[to_markdown(mask(name)), f"`{to_markdown(digest)}`"] for name, digest in card.sources.items()]
        parts.append(_render_table(["source of the data", "digest"], rows))
    stages = [
        [to_markdown(stage), f"`{key}`", f"`{card.stage_digests.get(stage, '')}`"]
        for stage, key in card.stage_keys.items()
    ]
    if stages:
        parts.append(_render_table(["stage", "content key", "content digest"], stages))
    if card.files:
        rows = [[f"`{to_markdown(entry.path)}`", f"{entry.size:,}", f"`{entry.sha256}`"] for entry in card.files]
        parts.append(_render_table(["file", "bytes", "sha256"], rows))
    if card.versions:
        parts.append(
            "Versions: " + ", ".join(to_markdown(f"{name} {version}") for name, version in card.versions.items()) + "."
        )
    return "\n\n".join(parts)


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, as its cells are."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_value(value: Any) -> str:
    """A value of a cell, with six digits; None is an empty one."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return to_markdown(str(value))
    return number_words(value, 6)


def _title(card: Card) -> str:
    return " ".join(remove_marks(mask(card.title)).split())


def parse_card_head(readme: str) -> dict[str, Any]:
    """The YAML head of a card; empty when there is none, or it cannot be parsed."""
    try:
        return split_card(readme)[0]
    except ConfigError:
        return {}


def mark_section(name: str, text: str) -> str:
    """The text between the marks of a section; empty text stays empty."""
    inside = remove_marks(text)
    return f"<!-- trainflow:{name} -->\n{inside}\n<!-- /trainflow:{name} -->" if inside.strip() else ""


def remove_marks(text: str) -> str:
    """The text without marks of sections, which a title or a description might hold."""
    return _MARK.sub("", text)


def merge_card(present: str | None, generated: str, *, field: str = "README.md") -> str:
    """The card that is there, with the sections and the head's fields that were generated in place of its own.

    A section that the author removed comes back at the end. A card without any marked section keeps its text, and
    gets all of them, unless trainflow wrote it before it marked its sections: then the new card takes its place.

    Raises:
        ConfigError: the head of the present card, which is at `field`, is not YAML.
    """
    new = {section["name"]: section[0] for section in _SECTION.finditer(generated)}
    if present is None or not present.strip() or not new:
        return generated
    head, text = split_card(present, field=field)
    if "trainflow" in head and not _SECTION.search(text):
        return generated
    new_head, _ = split_card(generated, field=field)
    merged = {**head, **new_head}
    tags = [*_as_list(head.get("tags")), *_as_list(new_head.get("tags"))]
    if tags:
        merged["tags"] = list(dict.fromkeys(tags))
    if results := [*_results(new_head), *_foreign_results(head)]:
        models = new_head.get("model-index") or head["model-index"]
        merged["model-index"] = [{**models[0], "results": results}]
    known = {found["name"] for found in _SECTION.finditer(text)}
    # One that is not written any more goes with the empty lines behind it, or they would add up.
    text = _SECTION.sub(lambda found: new.get(found["name"], _GONE), text)
    text = re.sub(f"{_GONE}\\n*", "", text).strip()
    added = [section.strip() for name, section in new.items() if name not in known]
    from trainer_lib.base.yaml_text import dump_yaml  # not above: every worker imports this module

    return "\n\n".join([f"---\n{dump_yaml(merged)}---", *filter(None, [text]), *added]) + "\n"


def choose_card(present: str | None, published: str, *, field: str = "README.md") -> str:
    """The card to show next to a publication: the published one, with what a person wrote in the present one.

    A published card without marked sections replaces a present one that has them, and no other.
    """
    if present is None or _SECTION.search(published):
        return merge_card(present, published, field=field)
    return published if _SECTION.search(present) else present


def insert_section(card: str, name: str, text: str) -> str:
    """The card with one more section, behind its first heading."""
    bare = _SECTION.sub(lambda found: "" if found["name"] == name else found[0], card)
    lines = [*bare.strip().split("\n"), ""]
    behind_head = lines.index("---", 1) + 1 if lines[0] == "---" and "---" in lines[1:] else 0
    headings = (number + 1 for number, line in enumerate(lines) if number >= behind_head and line.startswith("# "))
    place = next(headings, behind_head)
    before, after = "\n".join(lines[:place]).strip(), "\n".join(lines[place:]).strip()
    return "\n\n".join(filter(None, [before, mark_section(name, text), after])) + "\n"


def move_pictures(card: str, folder: str) -> str:
    """The card as it stands above `folder`, in which the pictures of its own sections are."""
    return _SECTION.sub(lambda found: _RELATIVE_PICTURE.sub(rf"\1{folder}/", found[0]), card)


def split_card(card: str, *, field: str = "README.md") -> tuple[dict[str, Any], str]:
    """Return head and text of a card; the head is the first thing in the file, and empty where there is none.

    Raises:
        ConfigError: the head is not YAML.
    """
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

    parts = card.replace("\r\n", "\n").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}, card
    try:
        head = parse_yaml(parts[1])
    except YamlProblem as problem:
        raise ConfigError(
            f"The head of the model card that is published there is not YAML: {problem}",
            field=field,
            remedy="Correct the lines between --- there, then publish again.",
        ) from problem
    return (head if isinstance(head, dict) else {}), parts[2]


def _results(head: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the head's model-index; what is not one is left out."""
    models = head.get("model-index")
    found = [model.get("results") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return [result for results in found if isinstance(results, list) for result in results if isinstance(result, dict)]


def _foreign_results(head: dict[str, Any]) -> list[dict[str, Any]]:
    """The results that others have added, such as a leaderboard's: not on the data that trainflow measured on."""
    ours = head.get("trainflow")
    digest = ours.get("data_digest") if isinstance(ours, dict) else None
    if digest is None:
        return []
    datasets = [(result, result.get("dataset")) for result in _results(head)]
    return [result for result, dataset in datasets if isinstance(dataset, dict) and dataset.get("revision") != digest]


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())
