"""Outcomes: an evaluation's records of a split's rows, read back for pictures and tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted, number_words
from trainer_lib.errors import TrainflowError
from trainer_lib.hub.pictures import draw_outcome
from trainer_lib.protocol.requests import OUTCOMES
from trainer_lib.secrets import mask
from trainflow.tasks.stage.manifest import StageManifest

_ANSWERS = "artifacts/prompts.json"
_OUTCOME_BYTES = 16 << 20
_CLEAR = 0.05  # probability of chance, below which a subgroup is worse beyond it
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The outcomes of one split, as `trainer_lib.evaluation.outcomes` gives them; no `classes`: of numbers."""

    split: str
    found: Mapping[str, Any]
    classes: Sequence[str]

    @property
    def is_numbers(self) -> bool:
        """Whether the labels are numbers."""
        return bool(self.found["kind"] == "numbers")

    def _named(self, value: Any) -> Any:
        """The name of a class, or of several; a number as it is."""
        if isinstance(value, list):
            return ", ".join(self.classes[number] for number in value) or "none"
        return value if self.is_numbers else self.classes[value]

    def drawings(self) -> dict[str, str]:
        """The pictures as SVG by the names of `draw_outcome`; none for what cannot be drawn."""
        try:
            return draw_outcome(self.found, self.classes, self.split)
        except (ValueError, KeyError, TypeError) as error:  # a picture is never worth a run
            _log.warning("The outcomes of %s are not drawn: %s", self.split, error)
            return {}

    def describe_residuals(self) -> str:
        """A sentence about the errors of predicted numbers; empty for classes."""
        if not self.is_numbers:
            return ""
        pairs = zip(self.found["measured"], self.found["predicted"], strict=True)
        off = sorted(abs(guess - value) for value, guess in pairs)
        middle, most = (number_words(off[round(share * (len(off) - 1))]) for share in (0.5, 0.9))
        return f"Half of the predictions are off by at most {middle}, nine of ten by at most {most}."

    def describe_calibration(self) -> str:
        """The expected calibration error in a sentence; empty for numbers."""
        bins = self.found.get("reliability")
        if not bins:
            return ""
        error = sum(rows * abs(sure - right) for sure, right, rows in bins) / sum(rows for *_, rows in bins)
        return f"The expected calibration error is {error:.3g}."

    def describe_curves(self) -> str:
        """The areas below the curves, and what the threshold gives, in sentences; empty without curves."""
        curves = self.found.get("curves")
        if not curves:
            return ""
        areas = f"area below ROC {curves['roc_auc']:.3g}, average precision {curves['average_precision']:.3g}"
        mark = curves["threshold"]
        if not mark:
            return f"Mean over {curves['classes']} classes, one against the rest: {areas}."
        scores = f"precision {mark['precision']:.3g}, recall {mark['recall']:.3g}, F1 {mark['f1']:.3g}"
        best = f"The largest F1 here, {mark['best_f1']:.3g}, is at {mark['best']:.3g}."
        return f"Of the class {self.classes[1]}: {areas}. The threshold {mark['chosen']:g} gives {scores}. {best}"

    def hardest(self) -> tuple[list[str], list[list[Any]]]:
        """The columns and the rows that the model gets most wrong; no rows for an evaluation that has not kept them."""
        hardest = self.found.get("hardest") or ()
        rows = [[row, self._named(label), self._named(guess), loss] for row, label, guess, loss in hardest]
        return ["row_id", "label", "prediction", "absolute_error" if self.is_numbers else "nats"], rows

    def samples(self) -> tuple[list[str], list[list[Any]]]:
        """The columns and the rows of sample predictions: the first ones of the split, then some that are wrong."""
        samples = self.found.get("samples") or ()
        rows = [[row, self._named(label), self._named(guess)] for row, label, guess in samples]
        return ["row_id", "label", "prediction"], rows

    def confusions(self) -> tuple[list[str], list[list[Any]]]:
        """The columns and the rows behind the largest wrong cells of the confusion matrix."""
        rows = [
            [row_id, self.classes[label], self.classes[guess], count]
            for label, guess, count, ids in self.found.get("confusions") or ()
            for row_id in ids
        ]
        return ["row_id", "label", "prediction", "rows_alike"], rows

    def importance(self) -> tuple[list[str], list[list[Any]]]:
        """The columns of a table with what a metric loses without them, the greatest loss first."""
        found = self.found.get("importance") or {"columns": []}
        return ["column", f"{found.get('metric')} lost", "low", "high"], [list(row) for row in found["columns"]]

    def describe_importance(self) -> str:
        """The way in which importance was measured, in sentences; empty where it was not."""
        found = self.found.get("importance")
        if not found:
            return ""
        more = f" There was no time for {counted(found['left_out'], 'more column')}." if found["left_out"] else ""
        return f"By permutation in {counted(found['rows'], 'row')}, with 95 % intervals.{more}"

    def weak_groups(self) -> tuple[list[str], list[list[Any]]]:
        """The subgroups of rows on which the model errs more than on the others."""
        weak = self.found.get("weak") or {"groups": []}
        return ["subgroup", "rows", str(weak.get("error")), "of_the_rest", "adjusted_p"], [*map(list, weak["groups"])]

    def describe_weak_groups(self) -> str:
        """The way in which subgroups were found, in sentences; empty where none were looked for."""
        weak = self.found.get("weak")
        if not weak:
            return ""
        test = "Fisher's exact test" if self.found["kind"] == "classes" else "Welch's t-test"
        how = f"The worst of {counted(weak['tested'], 'subgroup')}, against all other rows by {test}, adjusted by Holm."
        is_clear = any(group[-1] < _CLEAR for group in weak["groups"])
        return how if is_clear else f"{how} None is worse beyond chance."

    def input_of(self, row_id: Any) -> Mapping[str, str]:
        """The `text` of a row's input and perhaps an `image`; empty where inputs are not shown."""
        shown = (self.found.get("inputs") or {}).get(str(row_id))
        return shown if isinstance(shown, Mapping) else {}

    def with_inputs(self, table: tuple[list[str], list[list[Any]]]) -> tuple[list[str], list[list[Any]]]:
        """A table of rows with the texts of their inputs; as it is where inputs are not shown."""
        columns, rows = table
        if not self.found.get("inputs"):
            return table
        return [*columns, "input"], [[*row, self.input_of(row[0]).get("text", "")] for row in rows]


def read_outcomes(evaluation: StageManifest, info: Mapping[str, Any]) -> Iterator[Outcome]:
    """The outcomes of splits that the evaluation has kept some of; one that cannot be read is passed over."""
    for entry in evaluation.files:
        if not entry.path.startswith(f"{OUTCOMES}/"):
            continue
        split = entry.path.removeprefix(f"{OUTCOMES}/").removesuffix(".json")
        try:
            found = parse_json(evaluation.store().read_bytes(entry.path, limit=_OUTCOME_BYTES))
            classes = found.get("classes") or len(found.get("matrix") or ())
            named = info.get("classes")
            names = named if isinstance(named, list) and len(named) == classes else range(classes)
            yield Outcome(split, found, [str(name) for name in names])
        except (TrainflowError, ValueError, AttributeError) as error:
            _log.warning("The outcomes of %s cannot be read: %s", split, error)


def read_answers(evaluation: StageManifest | None) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Answers to prompts (`texts.judged_prompts` of recipes) as columns and rows; none where there are none."""
    if evaluation is None or not any(entry.path == _ANSWERS for entry in evaluation.files):
        return
    try:
        found = parse_json(evaluation.store().read_bytes(_ANSWERS, limit=_OUTCOME_BYTES), list)
        rows = [[mask(str(value)) for value in row.values()] for row in found]
        if rows and len({tuple(row) for row in found}) == 1:
            yield list(found[0]), rows
    except (TrainflowError, ValueError, AttributeError) as error:
        _log.warning("The answers to prompts cannot be read: %s", error)
