"""The specs of trials, and the checks of a sweep before its first one. Nothing is run, and no engine is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import nearest, require_known
from trainer_lib.errors import ConfigError
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import compare_all_keys
from trainflow.flows.spec.checks import find_measured, names_no_split
from trainflow.flows.spec.spec import PipelineSpec, parse_spec
from trainflow.flows.spec.spec_file import set_field
from trainflow.flows.spec.sweep_settings import Range, SweepSettings
from trainflow.tasks.code.syntax import top_level_names
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.tracking.notifying import NotifySettings

PARENT = "mlflow.parentRunId"
_VARIED = ("prepare", "train", "evaluate")
_EVALUATED = "eval_"
# What every evaluation reports, besides what compute_metrics returns.
_ALWAYS = ("loss", "runtime", "samples_per_second", "steps_per_second", "rows")
_TRAINED = "train_"
# A change of these makes trials that cannot be compared with the earlier ones.
_FIXED = ("space", "objective", "direction", "sampler", "seed")


def sweep_of(spec: PipelineSpec) -> SweepSettings:
    """The sweep section of a spec. Raises ConfigError if it has none."""
    if spec.sweep is None:
        what = "The spec has no section `sweep`, which says what is varied and measured."
        remedy = "Add space, objective, direction and trials; docs/sweeps.md shows one."
        raise ConfigError(what, field="sweep", remedy=remedy)
    return spec.sweep


def with_values(spec: PipelineSpec, values: Mapping[str, Any]) -> PipelineSpec:
    """The spec with these fields set, and without its sweep: what `trainflow run` takes. Raises ConfigError."""
    raw = spec.to_record()
    for key, value in values.items():
        set_field(raw, key, value, shown=str(value), where="from sweep.space")
    return parse_spec({**raw, "sweep": None})


def trial_spec(spec: PipelineSpec, values: Mapping[str, Any], tags: Mapping[str, str]) -> PipelineSpec:
    """The spec of a trial: it prepares, trains and evaluates; nothing is predicted, published, registered or gated."""
    own = with_values(spec, values)
    return own.model_copy(
        update={
            "predict": own.predict.model_copy(update={"enabled": False}),
            "publish": own.publish.model_copy(update={"enabled": False}),
            "register": own.register.model_copy(update={"name": None}),
            "notify": NotifySettings(),
            "evaluate": own.evaluate.model_copy(update={"require": {}}),
            "tracking": own.tracking.model_copy(update={"tags": {**own.tracking.tags, **tags}}),
        }
    )


def pruning_metric(spec: PipelineSpec) -> str | None:
    """The metric of evaluations while training by which trials are ended; None without a pruner."""
    settings = sweep_of(spec)
    if settings.pruner is None:
        return None
    [objective] = settings.objective
    named = settings.pruner.metric or objective
    for split in spec.evaluate.splits:
        named = named.removeprefix(f"{split}_")
    return named if named.startswith(_EVALUATED) else f"{_EVALUATED}{named}"


def check_sweep(spec: PipelineSpec) -> None:
    """Raise ConfigError for what the fields of the sweep section alone do not show."""
    settings = sweep_of(spec)
    resolver = Resolver()
    for key, dimension in settings.space.items():
        _check_field(spec, key, dimension, resolver)
    _check_read(spec, settings, resolver)
    for name in settings.objective:
        _check_objective(spec, name, resolver)
    if (pruned_by := pruning_metric(spec)) is not None:
        _require_evaluations(spec, resolver, field="sweep.pruner", value=None)
        _check_evaluated(spec, resolver, pruned_by, "sweep.pruner.metric")


def identify(spec: PipelineSpec) -> dict[str, Any]:
    """The common part of a study's trials: varied fields, objectives, and the keys of the rest of the spec."""
    fixed = sweep_of(spec).model_dump(mode="json", include=set(_FIXED))
    return {"settings": fixed, "keys": {name: parse_json(key.to_json()) for name, key in _keys_of(spec).items()}}


def _keys_of(spec: PipelineSpec) -> Mapping[str, StageKey]:
    """The keys of a trial with the same values for every study of this space: what differs then is outside of it."""
    return Plan.of(trial_spec(spec, _first_values(sweep_of(spec)), {})).early_keys


def _first_values(settings: SweepSettings) -> dict[str, Any]:
    return {key: _candidates(values)[0] for key, values in settings.space.items()}


def require_same(spec: PipelineSpec, known: Mapping[str, Any]) -> None:
    """Raise ConfigError, with what differs, for the study of another spec."""
    settings = sweep_of(spec)
    now = settings.model_dump(mode="json", include=set(_FIXED))
    then = known.get("settings", {})
    changed = [f"{name} was {_short(was)}" for name, was in _changes(then, now)]
    if not changed:
        found = compare_all_keys(known.get("keys", {}), _keys_of(spec))
        changed = [str(change) for change in found if not change.field.startswith("stage_keys.")]
    if changed:
        more = " and more" if len(changed) > 3 else ""
        what = f"The trials of this sweep were made with something else: {'; '.join(changed[:3])}{more}."
        remedy = "Set it back to resume, or give the sweep another name: equal trainings are not repeated."
        raise ConfigError(what, field="sweep.name", value=settings.name, remedy=remedy)


def missing_metric(name: str, there: Sequence[str]) -> ConfigError:
    """The error of an objective that a trial did not report."""
    near = nearest(name, there)
    remedy = (f"Did you mean '{near}'? " if near else "") + f"There are {', '.join(sorted(there)) or 'none'}."
    return ConfigError("The trial does not report this metric.", field="sweep.objective", value=name, remedy=remedy)


def _candidates(dimension: list[Any] | Range) -> list[Any]:
    return [dimension.low, dimension.high] if isinstance(dimension, Range) else list(dimension)


def _check_field(spec: PipelineSpec, key: str, dimension: list[Any] | Range, resolver: Resolver) -> None:
    section = key.partition(".")[0]
    if section not in _VARIED or "." not in key:
        near = nearest(section, [field for field in PipelineSpec.model_fields if field in _VARIED])
        known = section in PipelineSpec.model_fields
        remedy = f"Name fields of {', '.join(_VARIED)}, such as train.args.learning_rate."
        if near and not known:
            remedy = f"Did you mean '{near}{key.removeprefix(section)}'?"
        what = "This field changes no training, so trials would be equal." if known else "The spec has no such field."
        raise ConfigError(what, field=f"sweep.space.{key}", remedy=remedy)
    if getattr(spec, section).affects().get(key.split(".")[1]) == "nothing":
        what = "This field changes no training, so trials would be equal."
        raise ConfigError(what, field=f"sweep.space.{key}", remedy="Set it in the spec, for all trials.")
    try:
        for value in _candidates(dimension):
            Plan.of(with_values(spec, {key: value}).with_resolver(resolver))
    except ConfigError as error:
        error.field = f"sweep.space.{key}" if error.field in (key, None) else f"sweep.space ({error.field})"
        raise


def _check_read(spec: PipelineSpec, settings: SweepSettings, resolver: Resolver) -> None:
    """Refuse an option that no function of the recipe reads: it changes a key, and no training."""
    plan = Plan.of(with_values(spec, _first_values(settings)).with_resolver(resolver))
    for sentence in (warning for found in plan.warnings.values() for warning in found):
        for key in settings.space:
            if f" {key}." in sentence:
                what, dot, remedy = sentence.partition(f"{key}.")
                raise ConfigError(
                    f"{what}{key}{dot[-1]}", field=f"sweep.space.{key}", remedy=remedy.strip() or "Remove it."
                )


def _check_objective(spec: PipelineSpec, name: str, resolver: Resolver) -> None:
    field = "sweep.objective"
    if name.startswith(_EVALUATED):
        _require_evaluations(spec, resolver, field=field, value=name)
        _check_evaluated(spec, resolver, name, field)
        return
    if name.startswith(_TRAINED):
        _check_trained(spec, name, field)
        return
    if not spec.evaluate.enabled:
        what = "The spec leaves evaluate out, which would measure this."
        remedy = "Leave evaluate on, or name a metric of the evaluations while training (eval_<name>)."
        raise ConfigError(what, field=field, value=name, remedy=remedy)
    late = ("overall", *spec.benchmark_tasks)
    if not any(name.startswith(f"{split}_") for split in (*spec.evaluate.splits, *late)):
        raise names_no_split(name, spec.evaluate.splits, field=field, value=name)
    measured = _measured(spec, resolver)
    if spec.evaluate.confidence is not None:
        measured += [f"{metric}_{end}" for metric in measured for end in ("low", "high")]
    # The values of slices, and what these add, only a run shows.
    if not (spec.evaluate.slices and "/" in name) and not name.startswith(tuple(f"{split}_" for split in late)):
        _check_measured(name, [f"{split}_{metric}" for split in spec.evaluate.splits for metric in measured], field)


def _check_trained(spec: PipelineSpec, name: str, field: str) -> None:
    """Refuse what looks like another metric of train; whether it is one of the recipe's, only a trial shows."""
    # Without the prefix, which would make all of them alike.
    near = nearest(name.removeprefix(_TRAINED), [*_ALWAYS, "tokens_per_second"])
    if near is None or name == f"{_TRAINED}{near}" or _adds_some(spec) or _TRAINED.rstrip("_") in spec.evaluate.splits:
        return
    raise ConfigError(
        "Train does not report this metric.", field=field, value=name, remedy=f'Did you mean "{_TRAINED}{near}"?'
    )


def _adds_some(spec: PipelineSpec) -> bool:
    """Whether a Trainer or callbacks of the recipe may log further metrics."""
    recipes = [top_level_names(Path(recipe)) for recipe in {spec.train.recipe or spec.recipe, spec.recipe}]
    return any(names is None or names & {"Trainer", "callbacks"} for names in recipes)


def _measured(spec: PipelineSpec, resolver: Resolver) -> list[str]:
    """Metrics that an evaluation certainly reports; empty if only a run shows them."""
    found = find_measured(spec, resolver)
    return [] if found is None else [*found, *_ALWAYS]


def _check_measured(name: str, names: Sequence[str], field: str) -> None:
    if names:
        require_known(name, names, "No evaluation reports this metric.", field=field)


def _check_evaluated(spec: PipelineSpec, resolver: Resolver, name: str, field: str) -> None:
    if not _adds_some(spec):
        _check_measured(name, [f"{_EVALUATED}{metric}" for metric in _measured(spec, resolver)], field)


def _require_evaluations(spec: PipelineSpec, resolver: Resolver, *, field: str, value: str | None) -> None:
    if str(resolver.arguments(spec.train.args).eval_strategy) == "no" or spec.train.eval_split is None:
        what = "This needs evaluations while training, and the spec has none."
        remedy = "Set train.eval_split and train.args.eval_strategy (steps or epoch)."
        raise ConfigError(what, field=field, value=value, remedy=remedy)


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that differ, with what they were; of the space the fields that differ."""
    for name in _FIXED:
        was, is_now = then.get(name), now[name]
        if name == "space" and isinstance(was, dict):
            for key in dict.fromkeys((*was, *is_now)):
                if was.get(key) != is_now.get(key):
                    found = was.get(key, "not varied")
                    if isinstance(found, dict):  # without what is unset
                        found = {setting: value for setting, value in found.items() if value not in (None, False)}
                    yield f"space.{key}", found
        elif was != is_now:
            yield name, was


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
