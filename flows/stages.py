"""The stage table: the rows are the stages of the pipeline, in the order in which they run.

Whatever depends on which stages exist reads this table: the plan, the checks of a spec, the flow, MLflow, the summary
and the report. A new stage is one row here, one task in `tasks/`, and one verb in `trainer_lib/worker` if it needs
workers. Its settings belong in `tasks/configs` and in the spec, its facts and key in `tasks/stage` and `tasks/keys`,
and what it asks of workers in `trainer_lib/protocol`.

Importing the table imports neither Prefect nor MLflow nor torch, so a spec is refused before any of them is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError
from trainflow.tasks.keys import keys
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.rerun import find_publication_problem
from trainflow.tasks.stage.track import track_evaluation, track_publication, track_splits, track_training

if TYPE_CHECKING:
    from trainflow.flows.spec.spec import PipelineSpec
    from trainflow.tasks.stage.context import StageContext
    from trainflow.tasks.tracking.mlflow_run import TrackedRun


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    name: str  # the stage's name, on the command line and in the storage
    section: str  # its section of the spec; also understood on the command line
    config: Callable[[PipelineSpec], Any]  # returns the stage's settings from a spec
    task: str  # the task as ``module:name``; imported when it is first called, because it brings Prefect
    key: Callable[..., StageKey]  # the stage's content key. Called with the task's own parameters.
    # Parameter of the task -> the stage whose manifest it takes; None is passed for a stage switched off.
    inputs: Mapping[str, str] = field(default_factory=dict)
    recipe_function: str | None = None  # the function that the recipe must define for this stage; None: none
    gated: bool = False  # whether `evaluate.require` holds it back: it shows or gives the model to others
    several_machines: bool = False  # whether more than one machine can take part
    # Returns setting -> names of the splits that it asks of the prepared data.
    splits: Callable[[Any], Mapping[str, list[str]]] = lambda config: {}
    # Returns label -> URL of what people look for in the stage's result.
    places: Callable[[StageManifest], Mapping[str, str]] = lambda manifest: {}
    # Returns what is wrong with a committed result beyond the stage's folder, or None.
    inspect: Callable[[Any, StageContext, StageManifest], str | None] = lambda *_: None
    # Logs to MLflow what only this stage has in addition to metrics; the last argument is False for a cached one.
    track: Callable[[TrackedRun, StageManifest, bool], None] = lambda *_: None

    def is_enabled(self, spec: PipelineSpec) -> bool:
        """Whether the spec has this stage switched on; a stage without such a setting always is."""
        return bool(getattr(self.config(spec), "enabled", True))

    def choose_inputs(self, manifests: Mapping[str, StageManifest]) -> dict[str, StageManifest | None]:
        """The task's parameters that take other stages' manifests; None for a stage that has none here."""
        return {parameter: manifests.get(stage) for parameter, stage in self.inputs.items()}

    def load_task(self) -> Any:
        """The Prefect task. The first call imports Prefect."""
        module, _, name = self.task.partition(":")
        return getattr(importlib.import_module(module), name)


def _predictions(manifest: StageManifest) -> dict[str, str]:
    """The folder of the predicted split, or the one above several."""
    # Below several folders the shortest one is above the others.
    folders = {entry.path.rpartition("/")[0] for entry in manifest.files if "/" in entry.path}
    return {"predictions": f"{manifest.url}/{min(folders, key=len, default='')}".rstrip("/")}


# Parameter of the task -> the stage whose manifest it takes.
_DATA_AND_MODEL = {"data": "prepare-data", "model": "train"}

# `config` goes through functions, not names: evaluate, predict and publish fill in what the spec left to others.
TABLE: tuple[Stage, ...] = (
    Stage(
        name="prepare-data",
        section="prepare",
        config=lambda spec: spec.prepare,
        task="trainflow.tasks.prepare_data:prepare_data",
        key=keys.prepare_key,
        recipe_function="prepare",
        places=lambda manifest: {"data": manifest.url},
        track=track_splits,
    ),
    Stage(
        name="train",
        section="train",
        config=lambda spec: spec.train,
        task="trainflow.tasks.train:train",
        key=keys.train_key,
        inputs={"data": "prepare-data"},
        recipe_function="build_model",
        several_machines=True,
        splits=lambda config: {"train_split": [config.train_split], "eval_split": [*filter(None, [config.eval_split])]},
        places=lambda manifest: {"model": f"{manifest.url}/model"},
        track=track_training,
    ),
    Stage(
        name="evaluate",
        section="evaluate",
        config=lambda spec: spec.evaluate_config(),
        task="trainflow.tasks.evaluate:evaluate",
        key=keys.evaluate_key,
        inputs=_DATA_AND_MODEL,
        recipe_function="build_model",
        splits=lambda config: {"splits": config.splits},
        track=track_evaluation,
    ),
    Stage(
        name="predict",
        section="predict",
        config=lambda spec: spec.predict_config(),
        task="trainflow.tasks.predict:predict",
        key=keys.predict_key,
        inputs=_DATA_AND_MODEL,
        recipe_function="build_model",
        splits=lambda config: {"split": [config.split]},
        places=_predictions,
    ),
    Stage(
        name="push-to-hub",
        section="publish",
        config=lambda spec: spec.publish_config(),
        task="trainflow.tasks.push_to_hub:push_to_hub",
        key=keys.publish_key,
        inputs={**_DATA_AND_MODEL, "evaluation": "evaluate"},
        gated=True,
        places=lambda found: {"published" if found.facts.held is None else "stays": found.facts.published_url},
        inspect=find_publication_problem,
        track=track_publication,
    ),
)


def all_stages() -> tuple[Stage, ...]:
    """The rows, in the order in which the stages run."""
    return TABLE


def stage_names() -> tuple[str, ...]:
    """The names of the stages, in their order."""
    return tuple(stage.name for stage in TABLE)


def find_stage(name: str) -> Stage | None:
    """The stage called `name`, or whose section of the spec is called so; None if there is none."""
    return next((stage for stage in TABLE if name in (stage.name, stage.section)), None)


def require_stage(name: str | None, option: str) -> str | None:
    """The full name of the stage that `name` means; None for None. Raises ConfigError, about `option`, for others."""
    if name is None:
        return None
    if (stage := find_stage(name)) is not None:
        return stage.name
    near = nearest(name, stage_names())
    what = f"This stage does not exist; there are {', '.join(stage_names())}."
    raise ConfigError(what, field=option, value=name, remedy=f"Did you mean '{near}'?" if near else "Name one of them.")
