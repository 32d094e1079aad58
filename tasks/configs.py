"""The settings of the stages, which a pipeline spec holds: each with its unit, and with what it can change.

Importing this module imports neither Prefect nor MLflow nor torch: a spec is validated before any engine starts.
The Prefect UI draws its form from the descriptions below. Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainer_lib.base.durations import describe
from trainer_lib.base.metric_names import CLASS_METRICS, NUMBER_METRICS, is_less_better
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import Preemption, StopEarly
from trainflow.tasks.settings import (
    BenchmarkList,
    KeyedSettings,
    MixtureField,
    RecipePath,
    RunnerSettings,
    Settings,
    fill_sources,
    nothing,
    read_metric,
    read_metric_list,
    read_requirement,
    refuse_unknown,
    result,
    selection,
)
from trainflow.tasks.settings import setting as setting

_INTERVALS = ("steps", "epoch")


class StopEarlySettings(Settings):
    """train.stop_early: the training ends when evaluations no longer improve, with the best weights."""

    metric: str = Field(
        default="loss", min_length=1, description="Metric of the evaluations while training: loss, or its name."
    )
    patience: int = Field(default=3, ge=1, description="Evaluations in a row without improvement that end it.")
    threshold: float = Field(default=0.0, ge=0, description="Least improvement that counts, in the metric's unit.")
    greater_is_better: bool | None = Field(
        default=None, description="Whether a greater metric is better; unset: not of losses and errors."
    )

    def to_request(self) -> StopEarly:
        """These settings as the worker takes them."""
        return StopEarly(self.patience, self.threshold)


def fill_arguments(section: Any) -> Any:
    """The section `train` with what early stopping needs: evaluations, checkpoints as often, and the best one loaded.

    What the section says itself stays, so a section that is filled in already comes back as it is.
    """
    if not isinstance(section, Mapping) or section.get("stop_early") is None:
        return section
    given, args = section["stop_early"], section.get("args") or {}
    if not isinstance(args, Mapping):
        return section
    try:
        chosen = given if isinstance(given, StopEarlySettings) else StopEarlySettings.model_validate(given)
    except ValidationError:  # the field itself says what is wrong, and where
        return section
    named, intervals = args.get("metric_for_best_model"), [args.get(f"{name}_strategy") for name in ("eval", "save")]
    if named is not None and str(named).removeprefix("eval_") != chosen.metric.removeprefix("eval_"):
        what = f"train.args.metric_for_best_model names another metric ({named}): remove it there."
        raise PydanticCustomError("another_metric", "{what}", {"what": what})
    if intervals[0] not in (None, *_INTERVALS):
        what = "it needs evaluations while training: set train.args.eval_strategy to steps or epoch, or remove it."
        raise PydanticCustomError("no_evaluations", "{what}", {"what": what})
    greater = chosen.greater_is_better
    interval = next((interval for interval in intervals if interval in _INTERVALS), "epoch")
    wanted: dict[str, Any] = {
        "eval_strategy": interval,
        "save_strategy": interval,
        "metric_for_best_model": chosen.metric,
        "greater_is_better": not is_less_better(chosen.metric.removeprefix("eval_")) if greater is None else greater,
        "load_best_model_at_end": True,
        "save_total_limit": 2,  # the best and the last
    }
    if interval == "steps":
        steps = args.get("eval_steps", args.get("save_steps"))
        wanted |= {} if steps is None else {"eval_steps": steps, "save_steps": steps}
    split = section.get("eval_split")
    filled = {name: value for name, value in wanted.items() if args.get(name) is None}
    return {**section, "eval_split": "validation" if split is None else split, "args": {**args, **filled}}


Options = dict[str, Any]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", validate_default=True))
class LaunchSettings(LaunchConfig):
    """The launch of a stage's processes. Never part of a content key."""

    def on_one_machine(self) -> LaunchSettings:
        """These settings, for a stage that runs on one machine."""
        # Both take the number of machines from their environment, which may name several.
        kind = "auto" if self.kind in ("accelerate", "environment") else self.kind
        return replace(self, nodes=1, node_rank=None, rendezvous=None, config_file=None, kind=kind)

    def to_config(self) -> LaunchConfig:
        """These settings as the launcher takes them, which changes them further without validating a spec."""
        # A plain dataclass: `replace` on this class would validate every change again.
        return LaunchConfig(**{setting.name: getattr(self, setting.name) for setting in fields(self)})


def _read_launch(value: Any) -> Any:
    if isinstance(value, str):  # a launcher's name alone
        return {"kind": value}
    return refuse_unknown(value, [setting.name for setting in fields(LaunchConfig)])


Launch = Annotated[LaunchSettings, BeforeValidator(_read_launch)]


@dataclass(frozen=True)
class MaxAge:
    """The maximal age of a stage's result, and the setting that says so."""

    age: timedelta
    setting: str = "refresh"

    def __str__(self) -> str:
        return f"{describe(self.age)} ({self.setting})"


class StageSettings(KeyedSettings):
    """Settings that every stage with a recipe has."""

    recipe: RecipePath | None = result(
        None,
        "Python file with functions of this stage alone; what it does not define is taken from the "
        "pipeline's recipe. A name set to None there is switched off.",
    )
    options: Options = result(default_factory=dict, description="Free settings handed to the recipe's function.")
    retries: int = nothing(3, "Failures of the stage that are retried; a preemption is free.", ge=0, le=20)


class PrepareConfig(StageSettings):
    """prepare-data: source data to Arrow shards."""

    sources: list[str] = result(
        default_factory=list,
        description="What the data is made from: local paths, hf://datasets/, s3://, https:// and other URLs, "
        "patterns, package:NAME, stdlib:. "
        "A changed source is prepared again; an undeclared one is tracked by the recipe's code only.",
    )
    mixture: MixtureField | None = result(
        None, "Sources that are mixed, in place of sources: [{source, weight, epochs or tokens}, …]."
    )
    shard_rows: int = result(8192, "Rows per shard file.", ge=1)
    allow_nan: bool = result(False, "Accept NaN and infinite values in the data.")
    launch: Launch = nothing(
        LaunchSettings(processes=1),
        "How the processes are started; several share the sources of a recipe with prepare_shard.",
    )
    runner: RunnerSettings | None = nothing(
        None,
        "A cluster of Dask or Ray whose machines share the sources of a recipe with prepare_shard; unset: "
        "this machine.",
    )

    @property
    def mixture_info(self) -> Options | None:
        """The mixture as `trainer_lib.data.rows.mixture.Mixture.of` reads it; None: there is none."""
        return None if self.mixture is None else self.mixture.to_info()

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, section: Any) -> Any:
        return fill_sources(section)


class PreemptionSettings(Settings):
    """train.preemption: where notice is given that this machine is about to be taken away."""

    file: str | None = Field(default=None, description="File whose appearance is the notice.")
    command: Annotated[
        list[str], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)
    ] = Field(
        default_factory=list, description="Program and arguments; exit code 0 is the notice. Started without a shell."
    )
    url: str | None = Field(
        default=None, pattern="^https?://", description="URL whose answer with status 200 is the notice."
    )
    headers: dict[str, str] = Field(default_factory=dict, description="Headers of the request to url.")
    contains: str | None = Field(
        default=None, description="Text that the answer of url must contain; unset: any answer is the notice."
    )
    every_s: float = Field(default=5.0, gt=0, description="Seconds between two looks.")
    timeout_s: float = Field(default=2.0, gt=0, description="Seconds that command or url may take.")

    @model_validator(mode="after")
    def _need_one_place(self) -> PreemptionSettings:
        if sum(map(bool, (self.file, self.command, self.url))) != 1:
            raise PydanticCustomError("one_place", "A notice is looked for in one place. Give file, command or url.")
        return self

    def to_request(self) -> Preemption:
        """These settings as the worker takes them."""
        return Preemption(**{**self.model_dump(), "command": tuple(self.command)})


class TrainConfig(StageSettings):
    """train: prepared data and arguments to a model."""

    model: Options = result(default_factory=dict, description="Settings handed to the recipe's build_model.")
    args: Options = result(
        default_factory=dict, description="TrainingArguments by name (learning_rate, num_train_epochs, seed ...)."
    )
    launch: Launch = nothing(LaunchSettings(), "How the processes are started.")
    train_split: str = result("train", "Name of the split to train on.", min_length=1)
    eval_split: str | None = selection(None, "Split evaluated while training; unset: none.")
    preemption: PreemptionSettings | None = nothing(
        None,
        "Where notice is given that this machine is about to be taken away: training is saved, and the "
        "command ends with exit code 19.",
    )
    stop_early: StopEarlySettings | None = result(
        None, "End the training when evaluations no longer improve, with the best weights; unset: never."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_arguments(cls, section: Any) -> Any:
        return fill_arguments(section)

    def with_launchers_arguments(self) -> TrainConfig:
        """These settings, with the arguments of accelerate's configuration file; a contradiction is refused."""
        if self.launch.kind != "accelerate" or self.launch.config_file is None:
            return self
        from trainer_lib.launch.settings import accelerate

        return self.model_copy(update={"args": accelerate.merge_arguments(self.args, self.launch.config_file)})


class EvaluateConfig(StageSettings):
    """evaluate: model and splits to metrics."""

    enabled: bool = nothing(True, "False leaves the stage out.")
    splits: list[str] = result(default_factory=lambda: ["test"], min_length=1, description="Splits to measure.")
    require: dict[str, Annotated[str, BeforeValidator(read_requirement)]] = nothing(
        default_factory=dict,
        description='Gates: metric (<split>_<name>) and what it must be (">= 0.9", or {min: 0.5, max: 2}). An '
        "evaluation that fails one is committed, but its model is not published.",
    )
    resamples: int = result(
        0,
        "Resamples of the rows that compute_metrics is called on, for comparing models; register sets it.",
        ge=0,
        le=5000,
    )
    confidence: float | None = result(
        None,
        "Write for each metric of compute_metrics the interval <metric>_low to <metric>_high that holds "
        "it with this probability (0.95), from the resamples (1,000 where resamples is not set); unset: none.",
        gt=0,
        lt=1,
    )
    metrics: Annotated[
        list[Annotated[str | Options, BeforeValidator(read_metric)]], AfterValidator(read_metric_list)
    ] = result(
        default_factory=list,
        description="Metrics by name, in addition to those of compute_metrics: "
        f"of classes {', '.join(CLASS_METRICS)}; of numbers {', '.join(NUMBER_METRICS)}; of an installed package "
        "package.module:name, or {name: package.module:name, as: RESULT, ARGUMENT: VALUE}.",
    )
    slices: list[str] = result(
        default_factory=list,
        description="Columns of the prepared rows: metrics are also measured on the rows of every value, and named "
        "<metric>/<column>/<value>.",
    )
    show_inputs: bool = result(
        True,
        "Show inputs of hardest, sample and confused rows in report and MLflow, as text or thumbnail. "
        "false keeps private data out.",
    )
    importance_seconds: float = result(
        10.0, "The most time per split for the importance of a table's columns, by permutation; 0: none.", ge=0
    )
    benchmarks: BenchmarkList = result(
        default_factory=list,
        description="Benchmarks of a language model: tasks of lm-eval by name, task files or folders of them from the "
        "spec's folder, or {task, fewshot, limit, chat}. Metrics are <task>_<metric>, with intervals.",
    )
    args: Options = result(
        default_factory=dict, description="TrainingArguments for this stage; what is unset comes from train.args."
    )
    launch: Launch | None = nothing(None, "How the processes are started; unset: like train.")


class RegisterConfig(Settings):
    """register: the trained model as a version of a model in MLflow's registry."""

    name: str | None = Field(default=None, min_length=1, description="Name of the registered model; unset: none.")
    alias: str = Field(default="champion", min_length=1, description="Alias of the best version.")
    metric: str | None = Field(
        default=None,
        description="Metric (<split>_<name>, of compute_metrics) in which a version must be better to get the alias; "
        "unset: only the first version gets it.",
    )
    greater_is_better: bool | None = Field(
        default=None, description="Whether a greater metric is better; unset: not of losses and errors."
    )
    resamples: int = Field(
        default=1000, ge=100, le=5000, description="Resamples of the evaluated rows for the comparison of two versions."
    )
    flavor: Literal["transformers"] | None = Field(
        default=None,
        description="transformers: mlflow.transformers.load_model loads a version, too; uploads its weights.",
    )
    description: str = Field(default="", description="Text of the version.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the version.")

    @property
    def compared_by(self) -> str | None:
        """The metric by which versions are compared; None where no model is registered, or none is compared."""
        return self.metric if self.name else None


class PredictConfig(StageSettings):
    """predict: model and a split to sharded Parquet files."""

    enabled: bool = nothing(True, "False leaves the stage out.")
    split: str = result("test", "Name of the split to predict; it needs no labels.", min_length=1)
    rows_per_file: int = result(10_000, "Rows per Parquet file.", ge=1)
    sort_by: str | None = result(None, "Column by whose length rows share batches, the longest first.")
    args: Options = result(
        default_factory=dict, description="TrainingArguments for this stage; what is unset comes from train.args."
    )
    launch: Launch | None = nothing(None, "How the processes are started; unset: like train.")


class PublishConfig(StageSettings):
    """push-to-hub: model, its code, card and metrics to a hub."""

    enabled: bool = nothing(True, "False leaves the stage out.")
    to: str | None = result(None, "hf://organisation/name or any folder URL; unset: hub/<name> below the storage.")
    private: bool = nothing(True, "Make a new Hub repository private (hf:// only).")
    revision: str | None = result(None, "Branch on the Hub; unset: main (hf:// only).")
    only_if: Literal["always", "better"] = result(
        "always", "better: publish only a model that is better than the published one, on the same test rows."
    )
    metric: str | None = result(None, "Metric (<split>_<name>) that only_if: better compares.")
    greater_is_better: bool | None = result(None, "Whether a greater metric is better; unset: by its name.")
    title: str | None = result(None, "Title of the model card; unset: the pipeline's name.")
    description: str = result("", "Text of the model card: what the model is for, in Markdown.")
    license: str | None = result(None, "Licence of the model, as a Hub identifier (apache-2.0).")
    tags: list[str] = result(default_factory=list, description="Tags of the model card.")
    base_model: str | None = result(None, "Model this one was made from, as a Hub name.")
    hardest_rows: int = result(0, "Rows that the model gets most wrong, with labels, in the card.", ge=0)
    args: Options = result(
        default_factory=dict,
        description="TrainingArguments that the published model predicts with; what is unset comes from predict.args.",
    )
    merge_adapters: bool = result(
        False,
        "Publish the base model's weights with the trained adapters merged in, as from_pretrained loads "
        "them; the adapters go along in adapter/.",
    )
    merged_type: Literal["float32", "bfloat16", "float16"] | None = result(
        None, "Type of merged weights; unset: that of the base model, bfloat16 of one in 4 or 8 bits."
    )
    merge_tolerance: float = result(
        0.05,
        "Share of next tokens of 20 held-out rows in which merged weights may differ from the adapters.",
        ge=0,
        le=1,
    )
    code: bool | None = result(
        None,
        "Publish the recipe and the project files that it imports, so that load_model works; unset: yes, "
        "unless a module is named only at run time, because every Python file of the project would go along.",
    )

    @property
    def compared_by(self) -> str | None:
        """The metric by which the model is compared with the published one; None where none is compared."""
        return self.metric if self.only_if == "better" else None


class TrackingConfig(Settings):
    """The server that records parameters, curves and models."""

    enabled: bool = Field(default=True, description="False records nothing in MLflow.")
    uri: str | None = Field(
        default=None,
        description="MLflow server or database; unset: MLFLOW_TRACKING_URI, else sqlite next to the storage.",
    )
    experiment: str | None = Field(default=None, min_length=1, description="Experiment; unset: the pipeline's name.")
    run_name: str | None = Field(default=None, description="Name of the MLflow run; unset: the pipeline's name.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the MLflow run.")
