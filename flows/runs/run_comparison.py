"""How two recorded runs differ: settings, code, data, versions, arguments, and what they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainflow.flows.records.run_names import flat_settings
from trainflow.flows.runs.run_details import RunDetails, StageDetails
from trainflow.flows.stages import stage_names
from trainflow.tasks.code.reach import Place
from trainflow.tasks.keys.code_changes import describe_code
from trainflow.tasks.keys.keys import Difference, differences

_CODE = "recipe."
_DATA = ("sources", "data", "model", "inputs")


@dataclass(frozen=True)
class MetricPair:
    """One metric of two runs; None where a run does not have it."""

    name: str
    old: float | None
    new: float | None

    @property
    def delta(self) -> float | None:
        """The second minus the first."""
        return None if self.old is None or self.new is None else self.new - self.old

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**vars(self), "delta": self.delta}


@dataclass(frozen=True)
class Comparison:
    """How the second of two runs differs from the first; only what differs, but for the metrics.

    Attributes:
        spec: settings.
        code: sentences about functions, statements and files.
        data: sentences about sources, prepared data and its splits.
        versions: of packages and of Python.
        arguments: training arguments that differ although no setting of the spec says so.
        metrics: every metric that one of them has.
    """

    old: RunDetails
    new: RunDetails
    spec: tuple[Difference, ...]
    code: tuple[str, ...]
    data: tuple[str, ...]
    versions: tuple[Difference, ...]
    arguments: tuple[Difference, ...]
    metrics: tuple[MetricPair, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both were made from the same."""
        return not any((self.spec, self.code, self.data, self.versions, self.arguments))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""

        def plain(found: Iterable[Difference]) -> list[dict[str, Any]]:
            return [{"field": each.field, "old": each.old, "new": each.new} for each in found]

        return {
            "runs": [{"id": each.run.id, "run_name": each.run.run_name} for each in (self.old, self.new)],
            "equal": self.is_equal,
            "spec": plain(self.spec),
            "code": list(self.code),
            "data": list(self.data),
            "versions": plain(self.versions),
            "arguments": plain(self.arguments),
            "metrics": [each.to_dict() for each in self.metrics],
        }


def compare_runs(old: RunDetails, new: RunDetails) -> Comparison:
    """How the second run differs from the first."""
    spec = differences(flat_settings(old.spec), flat_settings(new.spec))
    names = [*new.metrics, *(name for name in old.metrics if name not in new.metrics)]
    return Comparison(
        old=old,
        new=new,
        spec=tuple(spec),
        code=tuple(_compare_code(old, new)),
        data=tuple(_compare_data(old, new)),
        versions=tuple(differences(old.versions, new.versions)),
        arguments=tuple(_compare_arguments(old, new, {each.field for each in spec})),
        metrics=tuple(MetricPair(name, old.metrics.get(name), new.metrics.get(name)) for name in names),
    )


def _stage_pairs(old: RunDetails, new: RunDetails) -> Iterable[tuple[StageDetails, StageDetails]]:
    for name in stage_names():
        one, other = old.stage(name), new.stage(name)
        if one is not None and other is not None:
            yield one, other


def _compare_code(old: RunDetails, new: RunDetails) -> list[str]:
    """What the stages' functions reach that differs; files where the stages' keys are gone."""
    sentences: dict[str, None] = {}
    is_known = False
    for one, other in _stage_pairs(old, new):
        if not one.fields or not other.fields:
            continue
        is_known = True
        changed = differences(one.fields.get("fields") or {}, other.fields.get("fields") or {})
        code = [each for each in changed if each.field.startswith(_CODE)]
        for each in describe_code(code, one.fields.get("places"), _places(other)):
            sentences[str(each)] = None
    if is_known:
        return list(sentences)
    return [str(each) for each in differences(old.run.sources, new.run.sources)]


def _places(stage: StageDetails) -> dict[str, Place]:
    """Where the code of a stage's key stands."""
    recorded = stage.fields.get("places")
    pairs = recorded.items() if isinstance(recorded, Mapping) else ()
    return {label: Place(*place) for label, place in pairs if isinstance(place, list)}


def _compare_data(old: RunDetails, new: RunDetails) -> list[str]:
    sentences: list[str] = []
    for one, other in _stage_pairs(old, new):
        if one.stage != "prepare-data":
            continue
        before, after = ((each.fields.get("fields") or {}) for each in (one, other))
        sources = differences({"sources": before.get("sources")}, {"sources": after.get("sources")})
        sentences += [str(each) for each in sources]
        if one.digest and other.digest and one.digest != other.digest:
            sentences.append(f"the prepared data differs: {one.digest[:12]} -> {other.digest[:12]}")
        sentences += [str(each) for each in differences(_rows(one), _rows(other))]
    return sentences


def _rows(stage: StageDetails) -> dict[str, int]:
    return {f"rows of {split}": rows for split, rows in stage.rows.items()}


def _compare_arguments(old: RunDetails, new: RunDetails, named: set[str]) -> list[Difference]:
    """Arguments that differ beyond the settings; those that evaluate and predict take over from train come once."""
    found: dict[str, Difference] = {}
    for stage in stage_names():
        before, after = old.arguments.get(stage), new.arguments.get(stage)
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for each in differences(before, after):
            is_named = any(name.endswith(f".args.{each.field}") for name in named)
            if not is_named and each.field not in found:
                found[each.field] = Difference(each.field, each.old, each.new)
    return list(found.values())
