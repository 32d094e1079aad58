"""PipelineSpec: the whole pipeline as one inert value, and the reader that refuses a bad one before any engine starts.

Neither prefect nor mlflow nor torch is imported here. Every problem is a `ConfigError` that names the file and line,
the dotted key, the value and what to do.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from trainer_lib.base.paths import absolute_path, expand_home, is_path, map_paths
from trainer_lib.data.rows.mixture import SOURCE
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.benchmarks import is_task_file
from trainer_lib.protocol import recipe_names
from trainer_lib.protocol.recipe_names import is_recipe_name
from trainflow.flows.spec import checks as _checks
from trainflow.flows.spec.spec_file import apply_override, read_spec_file, spec_error
from trainflow.flows.spec.sweep_settings import OBJECTIVE, SweepSettings
from trainflow.tasks.code.closure import find_root
from trainflow.tasks.configs import (
    EvaluateConfig,
    MaxAge,
    PredictConfig,
    PrepareConfig,
    PublishConfig,
    RegisterConfig,
    TrackingConfig,
    TrainConfig,
)
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.settings import Duration, RecipePath, Settings, list_tasks
from trainflow.tasks.tracking.notifying import NotifySettings

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainflow.flows.stages import Stage

# A limited run has a storage of its own below the real one, and the limit is part of every key, so neither is ever a
# hit for the other. It publishes below that storage, whatever hub the spec names.
FOLDER = "limited"
"""Name of the storage of limited runs, below the real one."""

LIMIT_STEPS = 4
"""Optimizer steps of a limited training: two, an evaluation and a save, and the same again."""

_EVERY = LIMIT_STEPS // 2


def limit_spec(spec: PipelineSpec, resolver: Resolver) -> PipelineSpec:
    """Return the spec of the check that `spec.limit` asks for; the spec itself without a limit. Raises ConfigError."""
    if spec.limit is None:
        return spec
    tracking, publish, storage = spec.tracking, spec.publish, spec.storage.rstrip("/")
    return spec.model_copy(
        update={
            # The spec that a limited run has recorded names its storage already.
            "storage": storage if storage.rpartition("/")[2] == FOLDER else f"{storage}/{FOLDER}",
            "train": spec.train.model_copy(
                update={"args": {**spec.train.args, **_few_steps(resolver.arguments(spec.train.args))}}
            ),
            # A model of a few steps meets no requirement, and the check has to go through every stage.
            "evaluate": spec.evaluate.model_copy(update={"require": {}}),
            # A hub may be public: the check publishes where it keeps everything else.
            "publish": publish.model_copy(update={"to": None, "revision": None}),
            "tracking": tracking.model_copy(
                update={
                    "experiment": f"{tracking.experiment or spec.name}-{FOLDER}",
                    "tags": {**tracking.tags, "trainflow.limit": str(spec.limit)},
                }
            ),
        }
    )


def _few_steps(args: TrainingArguments) -> dict[str, Any]:
    """The arguments of a short training that still logs, evaluates and saves wherever the whole one does."""
    steps = min(args.max_steps, LIMIT_STEPS) if args.max_steps > 0 else LIMIT_STEPS
    changed: dict[str, Any] = {"max_steps": steps}
    if args.warmup_steps > steps:  # longer than the training, it would be refused
        changed["warmup_steps"] = 1
    for name in ("eval", "save", "logging"):
        strategy = str(getattr(args, f"{name}_strategy"))
        if strategy == "epoch":  # which may be longer than the steps of the check
            changed[f"{name}_strategy"] = "steps"
        if strategy in ("steps", "epoch"):
            changed[f"{name}_steps"] = 1 if name == "logging" else _EVERY
    if args.eval_delay:
        changed["eval_delay"] = 0
    if args.dataloader_drop_last:  # fewer rows than a batch would leave nothing to train on
        changed["dataloader_drop_last"] = False
    return changed


# Settings that are paths: relative ones start from the spec's folder, not from where the command runs.
_PATHS = ("recipe", "root", "folder", "storage", "prepare.sources", "train.preemption.file", "publish.to")
_RESAMPLES = 1000  # for intervals of confidence
_SECTION_PATHS = {"recipe": "recipe", "launch": "launch.config_file"}  # field of a section -> the path that it holds

_log = logging.getLogger(__name__)


# Python's abstract classes have a method of this name, for classes; a spec is never registered with one.
warnings.filterwarnings("ignore", 'Field name "register"')


class PipelineSpec(Settings):
    """prepare -> train -> evaluate -> predict -> publish, and where everything is kept."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$",
        description="Name of the pipeline: letters, digits, '.', '_' and '-'; at most 96 of them.",
    )
    recipe: RecipePath = Field(
        min_length=1,
        description="Python file with the functions that prepare, build, collate and measure, or the name of one of "
        "trainflow's own.",
    )
    root: str | None = Field(
        default=None,
        description="Folder the recipe's imports start from; unset: the nearest with pyproject.toml, else the spec's.",
    )
    folder: str | None = Field(
        default=None, description="Folder that relative paths among the recipe's options start from; unset: the spec's."
    )
    storage: str = Field(
        default=".trainflow",
        min_length=1,
        description="Folder or URL (s3://bucket/path) that everything is kept below; safe to share between pipelines.",
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Rows of each split in a check of the whole pipeline; unset: all rows, and no check.",
    )
    refresh: dict[str, Duration] = Field(
        default_factory=dict,
        description="Stage -> how old its result may become before it runs again (prepare: 1d); unset: any age.",
    )
    prepare: PrepareConfig = Field(default=PrepareConfig(), description="From source data to splits.")
    train: TrainConfig = Field(default=TrainConfig(), description="From splits to a model.")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="From model and splits to metrics.")
    predict: PredictConfig = Field(default=PredictConfig(), description="From model and a split to predictions.")
    publish: PublishConfig = Field(default=PublishConfig(), description="From model and metrics to a hub.")
    register: RegisterConfig = Field(
        default=RegisterConfig(), description="From a model to a version in MLflow's registry."
    )
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="MLflow.")
    notify: NotifySettings = Field(default=NotifySettings(), description="Who learns how a run ended.")
    sweep: SweepSettings | None = Field(default=None, description="Many trainings of this spec, and the best of them.")

    def __init_subclass__(cls, **options: Any) -> None:
        """Hand the field `register` to a spec of your own."""
        super().__init_subclass__(**options)
        # Else pydantic finds the abstract classes' method of this name, and takes it for the default of the field.
        cls.register = cls.__dict__.get("register", PipelineSpec.model_fields["register"])  # type: ignore[method-assign]

    def evaluate_config(self) -> EvaluateConfig:
        """The settings of evaluate; what it leaves unset is taken from train."""
        own = self.evaluate
        # trainflow's own recipes that mix sources have metrics.
        is_mixed = self.prepare.mixture is not None and Path(self.recipe).parent == recipe_names.FOLDER
        return own.model_copy(
            update={
                "slices": own.slices or ([SOURCE] if is_mixed else []),
                "args": {**self.train.args, **own.args},
                "launch": own.launch or self.train.launch.on_one_machine(),
                "resamples": own.resamples
                or (self.register.resamples if self.register.metric else 0)
                or (_RESAMPLES if own.confidence or self.publish.compared_by else 0),
            }
        )

    def predict_config(self) -> PredictConfig:
        """The settings of predict; what it leaves unset is taken from train."""
        own = self.predict
        return own.model_copy(
            update={"args": {**self.train.args, **own.args}, "launch": own.launch or self.train.launch.on_one_machine()}
        )

    def publish_config(self) -> PublishConfig:
        """The settings of push-to-hub; the model is published with what predict would use."""
        own, predict = self.publish, self.predict_config()
        return own.model_copy(
            update={
                "recipe": own.recipe or predict.recipe,
                "options": {**predict.options, **own.options},
                "args": {**predict.args, **own.args},
            }
        )

    def max_ages(self) -> dict[str, MaxAge]:
        """The maximal age of results, by the stage's name."""
        found = {}
        for stage in _checks.all_stages():
            age = self.refresh.get(stage.section, self.refresh.get(stage.name))
            if age is not None:
                found[stage.name] = MaxAge(age, f"refresh.{stage.section}")
        return found

    _resolver: Resolver | None = PrivateAttr(default=None)
    _recorded: Mapping[str, Any] | None = PrivateAttr(default=None)

    @property
    def counted_on(self) -> dict[str, str]:
        """Setting -> the metric of evaluate, or of train's evaluations (`eval_<name>`), that it needs."""
        found = {f"evaluate.require.{name}": name for name in self.evaluate.require}
        if self.register.compared_by:
            found["register.metric"] = self.register.compared_by
        if self.publish.enabled and self.publish.compared_by:
            found["publish.metric"] = self.publish.compared_by
        wanted = self.tracking.tags.get(OBJECTIVE, "").split()
        found |= {f"sweep.objective.{name}": name for name in wanted}
        chosen = self.train.args.get("metric_for_best_model")
        if isinstance(chosen, str) and chosen.removeprefix("eval_") != "loss":
            found["train.stop_early.metric" if self.train.stop_early else "train.args.metric_for_best_model"] = (
                f"eval_{chosen.removeprefix('eval_')}"
            )
        # The sweep checks these names, or another recipe than evaluate's gives them.
        aside = ("train_", "eval_") if self.train.recipe or self.evaluate.recipe else ("train_",)
        late = tuple(f"{task}_" for task in self.benchmark_tasks)
        return {setting: name for setting, name in found.items() if not name.startswith((*aside, *late))}

    @property
    def benchmark_tasks(self) -> list[str]:
        """The names that metrics of evaluate.benchmarks begin with."""
        return list_tasks(self.evaluate.benchmarks, self.folder or str(Path(self.recipe).absolute().parent))

    @property
    def resolver(self) -> Resolver:
        """The results that the command has already computed; a new resolver for a spec of your own.

        A spec in a notebook may outlive an edit of its recipe, so only `trainflow` itself hands its resolver on.
        """
        return self._resolver or Resolver()

    def with_resolver(self, resolver: Resolver) -> PipelineSpec:
        """A copy that carries `resolver` to the plan of this command."""
        copy = self.model_copy()
        # A private attribute can be set although the spec is frozen; it is in no dump and in no key.
        copy._resolver = resolver
        return copy

    def to_record(self) -> dict[str, Any]:
        """This spec as a run records it: as plain data, with the paths under which its project is known."""
        return dict(self._recorded) if self._recorded is not None else self.model_dump(mode="json")

    def recorded_as(self, record: Mapping[str, Any]) -> PipelineSpec:
        """A copy that a run records as `record`: the recipe of this one is a copy on this machine."""
        copy = self.model_copy()
        copy._recorded = record
        return copy

    def check(self) -> None:
        """Raise ConfigError for what the fields alone do not show: missing files, unknown stores, bad arguments."""
        _checks.check_spec(self, self.resolver)


@dataclass(frozen=True)
class _Source:
    """Places of a spec's keys, for messages."""

    path: Path
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        parts = key.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        # An override replaces what the file has below its key.
        given = [prefix for prefix in prefixes if prefix in self.overridden]
        if not given and key not in self.lines:
            # An error about `train` as a whole may come from `train.args.seed=x` on the command line.
            given = sorted(name for name in self.overridden if name.startswith(f"{key}."))
        if given:
            # Without the values: one of them may be the secret that is refused.
            return f"from the command line: {', '.join(f'{name}=…' for name in given[:3])}"
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        return str(self.path) if line is None else f"{self.path}, line {line}"

    def locate(self, error: ConfigError) -> ConfigError:
        """The error, with the place of its key in the file added to the message."""
        sections = {*PipelineSpec.model_fields, *self.lines, *(name.partition(".")[0] for name in self.overridden)}
        # Another field is a file, or a variable of the environment.
        if error.field is not None and error.field.partition(".")[0] in sections:
            error.message = f"{error.message.rstrip('.')} ({self.where(error.field)})."
            error.args = (error.message,)
        return error


def load_spec(
    path: str | Path, overrides: Sequence[str] = (), resolver: Resolver | None = None, *, needs_sweep: bool = True
) -> PipelineSpec:
    """The spec in a YAML or JSON file, with ``key=value`` overrides (``train.args.learning_rate=1e-3``) applied.

    Relative paths in the file start from the file's folder, those in overrides from the working directory.

    Args:
        resolver: given by a command that runs the spec at once: the check's results are used again by the run.
        needs_sweep: False for a command that leaves the section aside: a mistake in it is a warning.

    Raises:
        ConfigError: anything wrong with the file, a key, a value, or what they point at. Nothing was started.
    """
    path = Path(path)
    raw, lines = read_spec_file(path)
    overridden = [apply_override(raw, text) for text in overrides]
    source = _Source(path, lines, frozenset(overridden))
    try:
        _checks.refuse_secrets(raw)
        _resolve_paths(raw, path.absolute().parent, source.overridden)
        if not needs_sweep:
            _leave_out_wrong_sweep(raw)
        spec = parse_spec(raw)
        # Before the check: accelerate's file may name arguments that are then checked like the spec's own.
        spec = spec.model_copy(update={"train": spec.train.with_launchers_arguments()})
        spec = limit_spec(spec, resolver or Resolver())
        spec = spec if resolver is None else spec.with_resolver(resolver)
        spec = _rebase_overridden_paths(spec, source.overridden)
        spec.check()
    except ConfigError as error:
        raise source.locate(error) from None
    return spec


def _leave_out_wrong_sweep(raw: dict[str, Any]) -> None:
    try:
        TypeAdapter(SweepSettings | None).validate_python(raw.get("sweep"))
    except ValidationError:
        del raw["sweep"]
        _log.warning("The section `sweep` has a mistake, which trainflow sweep names; this command leaves it aside.")


def parse_spec(raw: Mapping[str, Any]) -> PipelineSpec:
    """A spec from plain data, such as a deployment's parameters.

    Raises:
        ConfigError: unknown key (with the nearest name), missing key, wrong type. What keys point at is not looked at.
    """
    try:
        spec = PipelineSpec.model_validate(raw)
    except ValidationError as error:
        raise spec_error(error, raw, PipelineSpec) from None
    return spec if spec.root is not None else spec.model_copy(update={"root": str(find_root(spec.recipe))})


def _resolve_paths(raw: dict[str, Any], folder: Path, overridden: frozenset[str]) -> None:
    """Make the spec's own paths absolute, in place."""
    # The default is a relative path, too, and starts from the spec's folder.
    raw.setdefault("folder", str(folder))
    raw.setdefault("storage", PipelineSpec.model_fields["storage"].default)
    for key in (*_PATHS, *_section_paths()):
        base = Path.cwd() if key in overridden else folder
        *outer, last = key.split(".")
        place: Any = raw
        for part in outer:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            continue
        value = place[last]
        if last == "recipe" and is_recipe_name(value) and not (base / value).exists():
            continue
        place[last] = [_absolute(item, base) for item in value] if isinstance(value, list) else _absolute(value, base)
    mixture = raw["prepare"].get("mixture") if isinstance(raw.get("prepare"), dict) else None
    entries = mixture.get("sources") if isinstance(mixture, dict) else mixture
    base = Path.cwd() if overridden & {"prepare.mixture", "prepare.mixture.sources"} else folder
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("source"), str):
            entry["source"] = _absolute(entry["source"], base)
    _resolve_benchmarks(raw, Path.cwd() if "evaluate.benchmarks" in overridden else folder)
    if raw.get("root") is None and isinstance(raw.get("recipe"), str):
        # A recipe of trainflow's own belongs to no project: that around the spec counts.
        named = is_recipe_name(raw["recipe"])
        raw["root"] = str(find_root(folder / "recipe.py" if named else raw["recipe"], folder))


def _resolve_benchmarks(raw: dict[str, Any], base: Path) -> None:
    """Make the paths of task files absolute, in place."""
    section: Any = raw.get("evaluate")
    entries: Any = section.get("benchmarks") if isinstance(section, dict) else None
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        task = entry.get("task") if isinstance(entry, dict) else entry
        if isinstance(task, str) and is_task_file(task):
            path = _absolute(task, base)
            entries[index] = {**entry, "task": path} if isinstance(entry, dict) else path


def _rebase_overridden_paths(spec: PipelineSpec, overridden: frozenset[str]) -> PipelineSpec:
    """The spec with paths among its overridden options, which start from the working directory, as from its folder."""
    for stage in _checks.all_stages():
        for setting in ("options", "model"):
            place = f"{stage.section}.{setting}"
            if any(key == place or key.startswith(f"{place}.") for key in overridden):
                spec = _rebase(spec, stage, setting, overridden)
    return spec


def _rebase(spec: PipelineSpec, stage: Stage, setting: str, overridden: frozenset[str]) -> PipelineSpec:
    from trainflow.tasks.keys.declared_paths import path_options
    from trainflow.tasks.stage.context import StageContext

    config = getattr(spec, stage.section)
    given = {name: getattr(spec, name) for name in ("name", "recipe", "storage", "root", "folder", "resolver")}
    context = StageContext(**given)
    paths = path_options(stage.name, config, context)
    declared, place = getattr(paths, setting), f"{stage.section}.{setting}"

    def rebase(text: str) -> str:
        return text if expand_home(text).is_absolute() else os.path.relpath(text, paths.folder)

    values = getattr(config, setting)
    changed = map_paths(values, declared, rebase)
    # The whole setting, or one option of it, stands on the command line.
    overrides = {
        name
        for name in values
        if place in overridden or any(f"{key}.".startswith(f"{place}.{name}.") for key in overridden)
    }
    merged = {name: changed[name] if name in overrides else value for name, value in values.items()}
    return spec.model_copy(update={stage.section: config.model_copy(update={setting: merged})})


def _section_paths() -> list[str]:
    """The dotted keys of the paths that every section with such a field has."""
    from trainer_lib.arguments.validation import FILE_FIELDS

    sections = {name: field.annotation for name, field in PipelineSpec.model_fields.items()}
    paths = [*_SECTION_PATHS.items(), *(("args", f"args.{name}") for name in FILE_FIELDS)]
    return [
        f"{name}.{path}"
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, Settings)
        for field, path in paths
        if field in kind.model_fields
    ]


def _absolute(value: Any, base: Path) -> Any:
    # Arguments that take a file take a mapping as JSON, too.
    return absolute_path(value, base) if is_path(value) and not value.lstrip().startswith("{") else value


_USUAL = Path("pipeline.yaml")
_ENDINGS = (".yaml", ".yml", ".json")
# A larger file is data: it is not read to find out.
_LARGEST = 1_000_000


def specs_here() -> list[Path]:
    """The specs of the working directory that may be meant: pipeline.yaml alone if it is there, else all of them."""
    if _USUAL.is_file():
        return [_USUAL]
    return [path for path in sorted(Path().iterdir()) if path.suffix in _ENDINGS and _is_spec(path)]


def spec_here() -> Path | None:
    """The spec of the working directory: pipeline.yaml, else the only one; None: it has none, or several."""
    found = specs_here()
    return found[0] if len(found) == 1 else None


def storage_here() -> str | None:
    """The storage of the spec in the working directory, else .trainflow there; None: neither. Raises ConfigError."""
    if (spec := spec_here()) is not None:
        raw, _ = read_spec_file(spec)  # of which nothing else is checked
        return str(_absolute(raw.get("storage") or PipelineSpec.model_fields["storage"].default, Path.cwd()))
    return ".trainflow" if Path(".trainflow").is_dir() else None


def _is_spec(path: Path) -> bool:
    try:
        if path.stat().st_size > _LARGEST:
            return False
        data, _ = read_spec_file(path)
    except (ConfigError, OSError):
        return False
    return "recipe" in data and "name" in data
