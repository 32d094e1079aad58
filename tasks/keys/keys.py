"""Content keys: what decides whether a stage's committed result is still the right one.

A key is the SHA-256 of canonical JSON. Every field that went into it is kept next to the result (``key.json``), so a
miss can be explained field by field. A key holds what can change the output: the resolved settings, the functions of
the recipe that the stage calls with all that they reach, the content digests of the inputs, and the versions that
change numerics. It holds no absolute path, no storage URL, no time, no run id, and nothing about where or on how many
processes the work runs: training is keyed by its *global* batch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import FIELD, MetricCall, read_metrics
from trainer_lib.base.records import to_record
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.benchmarks import FIELD as FIELD_OF_BENCHMARKS
from trainer_lib.evaluation.benchmarks import is_task_file, read_task_files
from trainer_lib.hub.base import parse_target
from trainflow.tasks.code.reach import ORDER, SOURCE, Place, Reach
from trainflow.tasks.configs import (
    EvaluateConfig,
    PredictConfig,
    PrepareConfig,
    PublishConfig,
    StageSettings,
    TrainConfig,
)
from trainflow.tasks.keys.declared_paths import keyed_options, path_options, spec_folder
from trainflow.tasks.keys.sources import fingerprints, memory
from trainflow.tasks.keys.stage_code import (
    EVALUATE,
    PREPARE,
    code_of,
    evaluations_matter_to,
    reach_of_predict,
    reach_of_train,
)
from trainflow.tasks.settings import KeyedSettings

if TYPE_CHECKING:
    from trainflow.tasks.stage.context import StageContext
    from trainflow.tasks.stage.manifest import StageManifest


# Import name -> distribution. Others are looked up; that reads the records of everything that is installed.
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "torchmetrics": "torchmetrics", "evaluate": "evaluate"}


def metric_packages(calls: Iterable[MetricCall]) -> dict[str, str]:
    """Distribution -> version of each package that a metric is imported from; empty where all are trainflow's."""
    found: dict[str, str] = {}
    for top in {call.module.partition(".")[0] for call in calls if call.module is not None}:
        names = [_DISTRIBUTIONS[top]] if top in _DISTRIBUTIONS else sorted(set(_distributions().get(top, [top])))
        found |= {name: _version_of(name) for name in names}
    return found


def refuse_project_modules(calls: Iterable[MetricCall], folders: Iterable[Path]) -> None:
    """Raise ConfigError for a metric of the project's own code, which no key of evaluate would follow.

    `folders`: where imports of the project start.
    """
    places = list(folders)
    for call in calls:
        top = "" if call.module is None else call.module.partition(".")[0]
        if top and any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in places):
            what = "This module belongs to the project, and metrics by name are those of installed packages."
            remedy = "Import it in the recipe, and call it in compute_metrics: then a changed one is measured again."
            raise ConfigError(what, field=FIELD, value=call.name, remedy=remedy)


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {name: list(distributions) for name, distributions in metadata.packages_distributions().items()}


FOLDER_CHARS = 16  # a folder is named by as many characters of its key

REFRESH = "refresh"
"""The field of a key that names the result which this one follows, by the time of its commit; the first has none."""

NUMERICS = 1  # raised when trainer_lib changes what the same arguments train, measure or predict

# Another version of one of these may compute other bits.
_PACKAGES = ("torch", "numpy")


@dataclass(frozen=True)
class StageKey:
    """A stage's content key, from the fields that can change its result.

    `places` say where the pieces of the recipe's code in `fields` stand, and `because` why there is no result under the
    key yet, if that is known without a look; neither is part of the key.
    """

    stage: str
    fields: dict[str, Any]
    places: dict[str, Place] = field(default_factory=dict, compare=False, repr=False)
    because: str | None = field(default=None, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256, 64 hex digits."""
        return hashlib.sha256(canonical({"stage": self.stage, **self.fields})).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the stage's folder on the storage."""
        return self.digest[:FOLDER_CHARS]

    @property
    def first(self) -> StageKey:
        """The key without the age of results (`trainflow.tasks.stage.rerun`): that of the first one."""
        if REFRESH not in self.fields:
            return self
        return replace(self, fields={name: value for name, value in self.fields.items() if name != REFRESH})

    def following(self, committed: str) -> StageKey:
        """The key of the result that follows the one committed at that time."""
        return replace(self, fields={**self.fields, REFRESH: committed})

    def to_json(self) -> bytes:
        """The contents of ``key.json``."""
        places = {
            label: [place.line, place.text, *([place.because] if place.because else [])]
            for label, place in self.places.items()
        }
        record = {"format": 1, "stage": self.stage, "key": self.digest, "fields": self.fields, "places": places}
        return json.dumps(record, indent=1, sort_keys=True, default=_plain).encode()


@dataclass(frozen=True)
class Difference:
    """One field that differs between two keys; None where one of them lacks it.

    `sentence`: the difference in words, where the values say nothing to a reader (code); else None.
    """

    field: str
    old: Any
    new: Any
    sentence: str | None = None

    def __str__(self) -> str:
        if self.sentence is not None:
            return self.sentence
        # 64 hex digits tell a reader nothing beyond that they differ.
        if _is_digest(self.old) or _is_digest(self.new):
            change = "added" if self.old is None else "removed" if self.new is None else "changed"
            return f"{self.field} {change}"
        return f"{self.field}: {_shown(self.old)} -> {_shown(self.new)}"


def canonical(value: Any) -> bytes:
    """The canonical JSON of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def stage_key(
    stage: str, fields: Mapping[str, Any], *, schema: int = 1, places: Mapping[str, Place] | None = None
) -> StageKey:
    """The key of a stage (also one of your own) from everything that can change its result.

    Args:
        schema: raise it when what the stage writes, or what its key holds, changes shape: older results are then not
            used.
        places: where the code that the fields name stands, for the explanation of a miss.

    Raises:
        ConfigError: a field is not plain data.
    """
    try:
        # Through JSON: a key read back from key.json must compare equal to one computed now.
        plain = parse_json(canonical({"schema": schema, **fields}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A key holds plain data only: {error}.", field=stage, remedy="Use numbers, texts, lists and mappings."
        ) from error
    return StageKey(stage, plain, dict(places or {}))


def versions() -> dict[str, str]:
    """Versions that change numerics, read without importing anything."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "trainer_lib": f"numerics {NUMERICS}"}
    return found | {name: _version_of(name) for name in _PACKAGES}


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The fields in which two keys differ, by dotted name."""
    before, after = dict(_flat(old)), dict(_flat(new))
    names = [*after, *(name for name in before if name not in after)]
    return [
        Difference(name, before.get(name), after.get(name))
        for name in names
        if name not in before or name not in after or before[name] != after[name]
    ]


def describe_code(
    changed: Iterable[Difference], before: Mapping[str, Any], now: Mapping[str, Place]
) -> list[Difference]:
    """The differences, those of code with a sentence: what changed itself first, then what it newly uses or left.

    `before` is the record of the older key, as ``key.json`` has it; `now` has the places of the newer one.
    """
    earlier = read_places(before)
    others: list[Difference] = []
    code: list[tuple[int, Difference]] = []
    for difference in changed:
        label = difference.field.removeprefix("recipe.")
        if label == difference.field or ":" not in label:
            others.append(difference)
            continue
        place = now.get(label) or earlier.get(label)
        sentence, rank = _sentence(label, place, difference)
        code.append((rank, replace(difference, sentence=sentence)))
    code.sort(key=lambda change: change[0])
    # An order that differs because something came or went says nothing new.
    kept = [change for _, change in code if not change.field.endswith(f":{ORDER}")]
    return [*(kept or [change for _, change in code]), *others]


def _sentence(label: str, place: Place | None, difference: Difference) -> tuple[str, int]:
    file, _, name = label.partition(":")
    where = f"{file}:{place.line}" if place is not None else file
    # This stage does not name it: code of the stage may reach any name.
    because = f", which counts because of {place.because}" if place is not None and place.because else ""
    change = "added" if difference.old is None else "removed" if difference.new is None else "changed"
    if name == ORDER:
        return f"the order of statements changed ({file})", 3
    if name == SOURCE:
        return f"the text changed ({file}), which the recipe reads itself", 3
    if name.startswith("#"):  # an edited one comes as one that went and one that came
        text = f": {place.text}" if place is not None and place.text else ""
        return f"a statement that runs at import {change} ({where}{text}){because}", 1
    imported = name.removeprefix("import ")
    if imported != name:
        return f"the import of {imported} {change} ({where}){because}", 2
    return f"{name} {change} ({where}){because}", 0 if change == "changed" else 1


def read_places(record: Mapping[str, Any]) -> dict[str, Place]:
    """The places of a key's code as ``key.json`` has them; what is not one is left out."""
    places = record.get("places")
    pairs = places.items() if isinstance(places, dict) else ()
    lists = [(label, place) for label, place in pairs if isinstance(place, list) and len(place) in (1, 2, 3)]
    return {label: Place(line, *map(str, texts)) for label, (line, *texts) in lists if isinstance(line, int)}


# -- the stages' keys -------------------------------------------------------------------------------------------------


def prepare_key(config: PrepareConfig, context: StageContext) -> StageKey:
    """The key of prepare-data: its settings, the contents of its sources, and the code that `prepare` reaches."""
    sources = context.resolver.sources(config.sources, root=context.root, memory=memory(context.storage))
    code = code_of(config, context).reach(PREPARE)
    settings = settings_fields(
        config,
        sources=sources,
        recipe=code.digests,
        mixture=None if config.mixture is None else config.mixture.names,  # weights count for train alone
        **_options("prepare-data", config, context),
    )
    return stage_key("prepare-data", {**settings, "limit": context.limit}, places=code.places)


def train_key(config: TrainConfig, context: StageContext, data: StageManifest) -> StageKey:
    """The key of train: its settings, the code that it reaches, versions, and the content of the prepared data."""
    from trainer_lib.arguments import evaluation_matters, numeric_fields
    from trainer_lib.arguments.configs.parallelism_config import check_processes, data_size

    args = context.resolver.arguments(config.args, prefix="train.args")
    # The launch counts only through the global batch that its number of processes makes.
    launch = context.resolver.launch(config.launch, use_cpu=args.use_cpu)
    check_processes(args, launch.world_size)
    written = code_of(config, context)
    # Where code lets evaluations change the weights, the settings of evaluation count as well.
    choose = evaluation_matters(args) or evaluations_matter_to(written)
    code = reach_of_train(written, evaluations_choose=choose)
    paths = path_options("train", config, context)
    settings = settings_fields(
        config,
        selects=choose,
        args=numeric_fields(args, data_parallel_size=data_size(args, launch.world_size), evaluations_choose=choose),
        recipe=code.digests,
        model=keyed_options(config.model, paths.model, paths.folder, context),
        stop_early=None if config.stop_early is None else config.stop_early.model_dump(),
        **_options("train", config, context),
    )
    fields = {
        **settings,
        "data": data.content_digest,
        "mixture": context.mixture,
        # Others are measured by evaluate alone, and change no weight.
        "metrics": [to_record(metric) for metric in context.metrics],
        "metric_packages": metric_packages(context.metrics),
        "versions": versions(),
        "limit": context.limit,
    }
    return stage_key("train", fields, places=code.places)


def evaluate_key(config: EvaluateConfig, context: StageContext, data: StageManifest, model: StageManifest) -> StageKey:
    """The key of evaluate: its settings, the code that it reaches, versions, and the contents of data and model."""
    code = code_of(config, context)
    reached = code.reach(EVALUATE)
    fields = _inference_fields("evaluate", config, context, data, model, reached)
    if config.benchmarks:
        fields |= _benchmark_fields(config, context)
    fields["metric_packages"] = metric_packages(read_metrics(config.metrics))
    if code.defines("after_evaluate"):
        # It may show the curve of training, which the code that measured then has drawn.
        fields["history"] = getattr(model.facts, "metrics_code", None)
    return stage_key("evaluate", fields, places=reached.places)


def _benchmark_fields(config: EvaluateConfig, context: StageContext) -> dict[str, Any]:
    """The benchmarks with the contents of task files, of their data and of their functions, and lm-eval's version."""
    folder = spec_folder(context)

    def digests(paths: Iterable[Path]) -> dict[str, str]:
        remembered = memory(context.storage)
        found = fingerprints([str(path) for path in paths], root=folder, memory=remembered, field=FIELD_OF_BENCHMARKS)
        labelled: dict[str, str] = {}
        for source in found:  # files outside of the folder may share a label
            labelled[source["source"]] = labelled.get(source["source"], "") + source["digest"]
        return labelled

    entries = []
    for entry in config.benchmarks:
        fields = entry.model_dump(exclude={"task"})
        if not is_task_file(entry.task):
            entries.append({"task": entry.task, **fields})
            continue
        for file in read_task_files(entry.task, folder):
            code = [context.resolver.closure(path, folder, field=FIELD_OF_BENCHMARKS).files for path in file.code]
            entries.append({"task": file.name, **fields, "files": digests(file.files), "code": code})
    return {"benchmarks": entries, "benchmark_packages": {"lm-eval": _version_of("lm-eval")}}


def predict_key(config: PredictConfig, context: StageContext, data: StageManifest, model: StageManifest) -> StageKey:
    """The key of predict: its settings, the code that it reaches, versions, and the contents of data and model."""
    reached = reach_of_predict(code_of(config, context))
    fields = _inference_fields("predict", config, context, data, model, reached)
    return stage_key("predict", fields, places=reached.places)


def publish_key(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest,
    model: StageManifest,
    evaluation: StageManifest | None = None,
) -> StageKey:
    """The key of push-to-hub: its settings, the code that predicts, and the contents and keys of what it publishes."""
    inputs = [data, model, *([] if evaluation is None else [evaluation])]
    target = parse_target(config.to, revision=config.revision) if config.to else None
    reached = reach_of_predict(code_of(config, context))
    settings = settings_fields(
        config,
        recipe=reached.digests,
        args=_prediction_arguments("publish", config, context),
        code=publishes_code(config, context),
        # A folder below the storage goes by its name: no absolute path, which may move.
        to=target.url if target else f"hub/{context.name}",
        revision=target.revision if target else config.revision,
    )
    return stage_key(
        "push-to-hub",
        {
            **settings,
            # The card shows the name, the digests and the keys.
            "name": context.name,
            "inputs": {result.stage: result.content_digest for result in inputs},
            # Of a result that was only made again: what came out the same is not published again.
            "stage_keys": {result.stage: result.first_key for result in inputs},
            "versions": versions(),
            "limit": context.limit,
        },
        places=reached.places,
    )


def publishes_code(config: PublishConfig, context: StageContext) -> bool:
    """Whether the code goes along: as the settings say, else where reading it shows which files belong to it."""
    if config.code is not None:
        return config.code
    recipe = config.recipe or context.recipe
    return not context.resolver.closure(recipe, context.root, fallback=context.recipe).unseen


def settings_fields(config: KeyedSettings, *, selects: bool = False, **resolved: Any) -> dict[str, Any]:
    """The settings of a stage that are declared to affect the result; `resolved` values stand for those as written.

    `selects`: evaluations decide which weights come out. Otherwise what affects the selection counts as unset.
    """
    declared = {name: affects for name, affects in type(config).affects().items() if affects != "nothing"}
    values = {name: resolved.get(name, getattr(config, name)) for name in declared}
    return {name: value if declared[name] == "result" or selects else None for name, value in values.items()}


def _inference_fields(
    stage: str,
    config: EvaluateConfig | PredictConfig,
    context: StageContext,
    data: StageManifest,
    model: StageManifest,
    code: Reach,
) -> dict[str, Any]:
    args = _prediction_arguments(stage, config, context)
    settings = settings_fields(config, args=args, recipe=code.digests, **_options(stage, config, context))
    inputs = {"data": data.content_digest, "model": model.content_digest}
    return {**settings, **inputs, "versions": versions(), "limit": context.limit}


def _prediction_arguments(
    section: str, config: EvaluateConfig | PredictConfig | PublishConfig, context: StageContext
) -> dict[str, Any]:
    from trainer_lib.arguments import evaluation_fields

    return evaluation_fields(context.resolver.arguments(config.args, prefix=f"{section}.args"))


def _options(stage: str, config: StageSettings, context: StageContext) -> dict[str, Any]:
    """The options of a stage with its paths as a key holds them."""
    paths = path_options(stage, config, context)
    return {"options": keyed_options(config.options, paths.options, paths.folder, context)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [pair for index, inner in enumerate(value) for pair in _flat(inner, f"{name}[{index}]")]
    return [(name, value)]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(char in "0123456789abcdef" for char in value)


def _shown(value: Any) -> str:
    text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
