"""The model card: a README with a YAML head for the Hub (model-index, licence, tags) and a text for people.

Equal inputs give equal bytes. A card holds no date, run id or path, so publishing again changes nothing. What is
renewed with every publication is between two comments, `<!-- trainflow:results -->` and `<!-- /trainflow:results -->`.
Everything else is the author's, and so are fields of the YAML head that trainflow does not set.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.suggestions import number_words, to_markdown
from trainer_lib.data.rows.column import Column
from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import ADAPTER
from trainer_lib.secrets import mask
from trainer_lib.storage import FileEntry
from trainer_lib.trackers.names import (
    compare_with_baselines,
    flatten_params,
    is_measurement,
    slice_tables,
    whole_metrics,
    with_intervals,
    without_bounds,
)

if TYPE_CHECKING:
    import jinja2

_TEMPLATE = Path(__file__).with_name("card.md.j2")
_CURVE_ROWS = 12
_LITERAL_VALUES = 8  # of an array that is written out
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
    """The content of a model card."""

    title: str
    description: str = ""
    license: str | None = None
    tags: Sequence[str] = ()
    base_model: str | None = None
    metrics: Metrics = field(default_factory=dict)  # split -> metric -> value
    data_name: str = "data"
    data_digest: str | None = None  # SHA-256 of the training data
    rows: Mapping[str, int] = field(default_factory=dict)  # split -> number of rows
    # stage_keys, stage_digests: content key and content digest of every stage that led to the model.
    stage_keys: Mapping[str, str] = field(default_factory=dict)
    stage_digests: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # training arguments that differ from their defaults
    facts: Mapping[str, Any] = field(default_factory=dict)  # other numbers (parameters, optimizer steps, samples seen)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[FileEntry] = ()  # what is published with the card
    library: str = "trainflow"  # the library that loads the model
    # language, tasks: as the Hub names them ("en", "text-classification").
    language: Sequence[str] = ()
    tasks: Sequence[str] = ()
    # datasets, dataset_names, dataset_args: identifiers of the training data on the Hub, their names for people, and
    # their configurations, in one order.
    datasets: Sequence[str] = ()
    dataset_names: Sequence[str] = ()
    dataset_args: Sequence[str] = ()
    code_digest: str | None = None  # SHA-256 of the code that is published with the model; None: there is none
    # Name -> type ("float32[8,8]") of the columns that the model is given.
    columns: Mapping[str, str] = field(default_factory=dict)
    # Library and class that load the model from the files ("transformers", "AutoModel"); None: `load_model`.
    loader: tuple[str, str] | None = None
    base_revision: str | None = None
    # The weights are those of the base model with trained adapters merged in, which are in `ADAPTER`.
    is_merged: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)  # name -> SHA-256 of what the data was made from
    curve: Sequence[Mapping[str, Any]] = ()  # entries of the training's log, with their `step`
    address: str | None = None  # where the model is published; None: in this folder, wherever that is
    confidence: float | None = None  # the probability with which an interval holds its metric; None: it is not known
    pictures: Sequence[Picture] = ()  # what the model gets right and wrong
    hardest: Sequence[HardRows] = ()  # rows that the model gets most wrong, for those who want to publish them
    conversations: Conversations | None = None  # those that it was trained on; None: it was trained on something else


class Markdown(str):
    """A text that is Markdown already: it is shown as it is, and any other value in a card is escaped."""


def render_card(card: Card) -> str:
    """The README of a model with its YAML head."""
    from trainer_lib.base.yaml_text import dump_yaml

    weights = [entry.path for entry in card.files if entry.path.endswith(".safetensors")]
    weights.sort(key=lambda path: path.startswith(f"{ADAPTER}/"))  # merged weights before their adapters
    columns = ", ".join(f"{_literal(name)}: {_example(kind)}" for name, kind in card.columns.items())
    arguments, digests = flatten_params(card.arguments), card.stage_digests  # secrets masked, long values cut
    return _load_template().render(
        card=card,
        head=Markdown(dump_yaml(_render_head(card))),
        title=_title(card),
        description=Markdown(mask(card.description.strip())),
        address=_literal(card.address or "."),
        repository=_literal((card.address or ".").removeprefix("hf://").partition("@")[0]),
        example=Markdown(f"{{{columns}}}"),
        adapter=ADAPTER,
        weights=_literal(weights[0]) if weights else None,
        facts=[(name, value) for name, value in card.facts.items() if value is not None],
        arguments=[[_code(name), value] for name, value in sorted(arguments.items())],
        sources=[[mask(name), _code(digest)] for name, digest in card.sources.items()],
        stages=[[stage, _code(key), _code(digests.get(stage, ""))] for stage, key in card.stage_keys.items()],
        files=[[_code(entry.path), entry.size, _code(entry.sha256)] for entry in card.files],
        **_read_conversations(card.conversations),
        **_read_results(card.metrics),
        **_read_curve(card.curve),
    )


@functools.cache
def _load_template() -> jinja2.Template:
    """The template of a card. What is put in is escaped for Markdown, and a name that is not given is an error."""
    import jinja2  # not above: every worker imports this module

    environment = jinja2.Environment(  # noqa: S701 - `finalize` escapes, for Markdown in place of HTML
        loader=jinja2.FileSystemLoader(_TEMPLATE.parent),
        finalize=_escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"literal": _literal, "section": _render_section}
    environment.globals["table"] = _render_table
    return environment.get_template(_TEMPLATE.name)


def _escape(value: Any) -> str:
    """A value as Markdown, numbers with six digits; None is empty."""
    if isinstance(value, Markdown):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_words(value, 6)
    return "" if value is None else to_markdown(str(value))


def _code(text: str) -> Markdown:
    return Markdown(f"`{to_markdown(text)}`")


def _literal(text: str) -> Markdown:
    """A text as Python and inside of a code block, which it cannot end."""
    return Markdown(json.dumps(text).replace("`", "\\u0060"))


def _render_table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Markdown:
    names = list(map(_escape, head))
    lines = [names, ["---"] * len(names), *(map(_escape, row) for row in rows)]
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _render_section(text: str, name: str) -> str:
    """A section of the template between its marks; empty where nothing is below its heading."""
    is_empty = text.strip().startswith("## ") and "\n" not in text.strip()
    return "" if is_empty or not (marked := mark_section(name, text.strip())) else f"\n{marked}\n"


def _read_conversations(chat: Conversations | None) -> dict[str, Any]:
    """The splits of conversations, and their template as a block of code, which it cannot end."""
    if chat is None:
        return {}
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", chat.template)), 0))
    splits = chat.splits.items()
    chats = [[split, count, tokens, f"{trained / max(tokens, 1):.1%}"] for split, (count, tokens, trained) in splits]
    return {"chats": chats, "template": Markdown(f"{fence}jinja\n{chat.template}\n{fence}")}


def _read_results(metrics: Metrics) -> dict[str, Any]:
    """Metrics with their intervals by split, their margins over what needs no model, and tables of slices."""
    texts = {split: with_intervals(whole_metrics(values)) for split, values in metrics.items()}
    names = sorted({name for values in texts.values() for name in values})
    return {
        "splits": list(texts),
        "metrics": [[name, *(values.get(name) for values in texts.values())] for name in names],
        "has_intervals": any(set(texts[split]) != set(whole_metrics(metrics[split])) for split in texts),
        "margins": [[split, *row] for split, values in metrics.items() for row in compare_with_baselines(values)],
        "slices": [
            (split, column, table.with_intervals())
            for split, values in metrics.items()
            for column, table in slice_tables(values).items()
        ],
    }


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


def _read_curve(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The losses while training as a table of few rows, the last step included."""
    steps: dict[int, dict[str, float]] = {}
    for entry in entries:
        losses = {name: entry[name] for name in ("loss", "eval_loss") if isinstance(entry.get(name), int | float)}
        if losses and isinstance(entry.get("step"), int):
            steps.setdefault(entry["step"], {}).update(losses)
    ordered = sorted(steps)
    # Counted from the end, so that the last step is one of them.
    kept = sorted(set(ordered[:: -max(1, math.ceil(len(ordered) / _CURVE_ROWS))]))
    names = [name for name in ("loss", "eval_loss") if any(name in steps[step] for step in kept)]
    return {"losses": names, "curve": [[step, *(steps[step].get(name) for name in names)] for step in kept]}


def _example(kind: str) -> str:
    """A value of a column's type, as Python: zeros, which show nothing of the data."""
    dtype, bracket, inside = kind.removesuffix("]").partition("[")
    shape = [int(size) if size.strip().isdigit() else 1 for size in inside.split(",")] if bracket else []
    if math.prod(shape) > _LITERAL_VALUES:
        return f"np.zeros({tuple(shape)}, {dtype!r})".replace("'", '"')
    return json.dumps(Column.parse(kind).example()).replace("false", "False") if kind != "bytes" else 'b""'


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
    gets all of them. Raises ConfigError when the head of the present card, which is at `field`, is not YAML.
    """
    new = {section["name"]: section[0] for section in _SECTION.finditer(generated)}
    if present is None or not present.strip() or not new:
        return generated
    head, text = split_card(present, field=field)
    new_head, _ = split_card(generated, field=field)
    merged = {**head, **new_head}
    tags = [*as_list(head.get("tags")), *as_list(new_head.get("tags"))]
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
    """Return head, the first thing in the file, and text of a card; empty without one. ConfigError: it is not YAML."""
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

    parts = card.replace("\r\n", "\n").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}, card
    try:
        head = parse_yaml(parts[1])
    except YamlProblem as problem:
        what = f"The head of the model card that is published there is not YAML: {problem}"
        remedy = "Correct the lines between --- there, then publish again."
        raise ConfigError(what, field=field, remedy=remedy) from problem
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


def as_list(value: Any) -> list[Any]:
    """One text, several, or none, as a list."""
    return [value] if isinstance(value, str) else list(value or ())
