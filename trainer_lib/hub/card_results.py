"""The results of a card: metrics with their intervals, beside what needs no model, by slice, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from trainer_lib.base.foreign_text import to_markdown
from trainer_lib.hub.card_tables import format_value, render_table
from trainer_lib.hub.metric_tables import compare_with_baselines, slice_tables, whole_metrics
from trainer_lib.trackers.names import with_intervals


@dataclass(frozen=True)
class Picture:
    """A picture beside the card.

    Attributes:
        path: where it is published, relative to the card.
        title: what it shows, for those who do not see it.
        note: what to look for.
    """

    path: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class HardRows:
    """The rows of a split that the model gets most wrong."""

    split: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def render_results(
    metrics: Mapping[str, Mapping[str, float]],
    confidence: float | None,
    pictures: Sequence[Picture],
    hardest: Sequence[HardRows],
) -> str:
    """The section of the results as Markdown; empty without metrics.

    Args:
        metrics: split -> metric -> value; the ends of an interval are `<metric>_low` and `<metric>_high`.
        confidence: the probability with which an interval holds its metric; None: it is not known.
    """
    texts = {split: with_intervals(whole_metrics(values)) for split, values in metrics.items()}
    names = sorted({name for values in texts.values() for name in values})
    if not names:
        return ""
    parts = ["## Results", *_compare(metrics)]
    rows = [[to_markdown(name), *(values.get(name, "") for values in texts.values())] for name in names]
    parts.append(render_table(["metric", *map(to_markdown, texts)], rows))
    if any(set(texts[split]) != set(whole_metrics(metrics[split])) for split in texts):
        level = "" if confidence is None else f" of {confidence:.4g}"
        parts.append(f"In brackets: the interval, by a bootstrap over the rows, with a probability{level}.")
    return "\n\n".join([*parts, *_slices(metrics), *_pictures(pictures), *_hardest(hardest)])


def _compare(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [[split, *row] for split, values in metrics.items() for row in compare_with_baselines(values)]
    if not rows:
        return []
    table = render_table(
        ["split", "metric", "the model", "without a model", "margin"], [list(map(to_markdown, row)) for row in rows]
    )
    return ["A margin above zero is in the model's favour.", table]


def _slices(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    parts = []
    for split, values in metrics.items():
        for column, found in slice_tables(values).items():
            table = found.with_intervals()
            rows = [[to_markdown(str(name)), *map(format_value, cells)] for name, *cells in table.cells]
            parts += [
                f"### {to_markdown(split)} by {to_markdown(column)}",
                render_table([to_markdown(column), *table.columns], rows),
            ]
    return parts


def _pictures(pictures: Sequence[Picture]) -> list[str]:
    parts = []
    for picture in pictures:
        title = to_markdown(picture.title.replace("[", "(").replace("]", ")"))
        shown = f"![{title}]({quote(picture.path)})"
        parts.append("\n\n".join(filter(None, [f"### {to_markdown(picture.title)}", shown, to_markdown(picture.note)])))
    return parts


def _hardest(hardest: Sequence[HardRows]) -> list[str]:
    parts = []
    for table in hardest:
        parts.append(f"### Rows of {to_markdown(table.split)} that the model gets most wrong")
        parts.append(
            render_table(
                [*map(to_markdown, table.columns)], [[format_value(value) for value in row] for row in table.rows]
            )
        )
    return parts
