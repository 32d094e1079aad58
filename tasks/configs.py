"""The settings of the stages, which a pipeline spec holds: each with its unit, and with what it can change.

Importing this module imports neither Prefect nor MLflow nor torch: a spec is validated before any engine starts.
The Prefect UI draws its form from the descriptions below. Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trainer_lib.suggestions import nearest

Options = dict[str, Any]


Affects = Literal["result", "selection", "nothing"]
"""What a setting can change: the stage's result, only which weights evaluations choose, or nothing that is kept.

The content keys hold the settings that affect the result (`tasks.stage.keys`), and no other.
"""


@dataclass(frozen=True)
class _AffectsMark:
    """The declaration of a field, kept in its metadata; it is not part of the JSON schema."""

    what: Affects


def setting(*, affects: Affects, **field: Any) -> Any:
    """Declare a setting of a stage: a pydantic `Field`, with what it can change."""
    info = Field(**field)
    info.metadata.append(_AffectsMark(affects))
    return info


class Settings(BaseModel):
    """Base of every settings class: frozen, and unknown keys are refused with the nearest name."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = list(cls.model_fields)
        for key in data:
            if key in known:
                continue
            near = nearest(str(key), known)
            hint = f"Did you mean '{near}'?" if near else f"Known here: {', '.join(known)}."
            raise PydanticCustomError(
                "unknown_key", "unknown key '{key}'. {hint}", {"key": str(key), "nearest": near, "hint": hint}
            )
        return data


def _spread_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class LaunchSettings(Settings):
    """How a stage's processes are started. Never part of a content key."""

    kind: Literal["auto", "torchrun", "process", "in_process", "accelerate", "deepspeed", "environment"] = Field(
        default="auto",
        description="Launcher. auto: torchrun for several processes, one plain process otherwise. "
        "in_process runs the work inside the calling process (for tests and notebooks); environment joins what Slurm, "
        "Kubernetes, MPI or an enclosing torchrun has started.",
    )
    processes: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Number of worker processes on each machine; auto: one per GPU, or on a CPU two where there are "
        "two cores.",
    )
    threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="CPU threads per process; unset: cores are shared out."
    )
    max_restarts: int = Field(default=0, ge=0, description="Restarts of lost workers before the stage fails.")
    grace_s: float = Field(default=60.0, gt=0, description="Seconds from SIGTERM to SIGKILL when workers are stopped.")
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds without a sign of life after which workers count as hung; unset: never.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Extra environment variables of the workers. Never a secret: export those."
    )
    devices: list[int | str] | None = Field(
        default=None, description="GPUs to use, in this order, as CUDA_VISIBLE_DEVICES names them; unset: all visible."
    )
    device_order: Literal["PCI_BUS_ID", "FASTEST_FIRST"] | None = Field(
        default=None, description="How CUDA numbers the GPUs (CUDA_DEVICE_ORDER)."
    )
    nodes: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^\d+(:\d+)?$")] = Field(
        default=1, description='Machines that train together; "1:4" is at least one and at most four. Training only.'
    )
    node_rank: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Which machine this is; 0 (or unset) leads and runs the pipeline, the others join."
    )
    rendezvous: str | None = Field(
        default=None, description="host:port of the leading machine, where the others find it."
    )
    join_timeout_s: float = Field(default=600.0, gt=0, description="Seconds that the machines wait for each other.")
    interface: str | None = Field(
        default=None, description="Network interface of the workers' messages; unset: the one towards rendezvous."
    )
    config_file: str | None = Field(
        default=None, description="Configuration file of `accelerate config`; kind accelerate only."
    )

    def on_one_machine(self) -> LaunchSettings:
        """These settings, for a stage that runs on one machine."""
        alone = {"nodes": 1, "node_rank": None, "rendezvous": None, "config_file": None}
        kind = "auto" if self.kind in ("accelerate", "environment") else self.kind
        return self.model_copy(update={**alone, "kind": kind})


Launch = Annotated[LaunchSettings, BeforeValidator(_spread_kind)]


class KeyedSettings(Settings):
    """Settings of a stage, each of which declares what it can change."""

    @classmethod
    def affects(cls) -> dict[str, Affects]:
        """What each setting can change, by name."""
        return {
            name: mark.what
            for name, field in cls.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, _AffectsMark)
        }


class StageSettings(KeyedSettings):
    """Settings that every stage with a recipe has."""

    recipe: str | None = setting(
        affects="result",
        default=None,
        description="Python file with this stage's functions, when it is not the pipeline's recipe. "
        "A stage with a file of its own is not re-run when the others' file changes.",
    )
    options: Options = setting(
        affects="result", default_factory=dict, description="Free settings handed to the recipe's function."
    )
    retries: int = setting(
        affects="nothing",
        default=3,
        ge=0,
        le=20,
        description="Failures of the stage that are retried; a preemption is free.",
    )


class PrepareConfig(StageSettings):
    """prepare-data: source data to Arrow shards."""

    sources: list[str] = setting(
        affects="result",
        default_factory=list,
        description="What the data is made from: local paths, s3:// or gs:// or https:// URLs, package:NAME, stdlib:. "
        "A changed source prepares anew; an undeclared one is tracked by the recipe's code only.",
    )
    shard_rows: int = setting(affects="result", default=8192, ge=1, description="Rows per shard file.")
    allow_nan: bool = setting(
        affects="result", default=False, description="Accept NaN and infinite values in the data."
    )
    launch: Launch = setting(
        affects="nothing", default=LaunchSettings(processes=1), description="How the process is started; always one."
    )


class TrainConfig(StageSettings):
    """train: prepared data and arguments to a model."""

    model: Options = setting(
        affects="result", default_factory=dict, description="Settings handed to the recipe's build_model."
    )
    args: Options = setting(
        affects="result",
        default_factory=dict,
        description="TrainingArguments by name (learning_rate, num_train_epochs, seed ...).",
    )
    launch: Launch = setting(affects="nothing", default=LaunchSettings(), description="How the processes are started.")
    train_split: str = setting(
        affects="result", default="train", min_length=1, description="Name of the split to train on."
    )
    eval_split: str | None = setting(
        affects="selection", default=None, description="Split evaluated while training; unset: none."
    )

    def with_launchers_arguments(self) -> TrainConfig:
        """These settings, with the arguments of accelerate's configuration file; a contradiction is refused."""
        if self.launch.kind != "accelerate" or self.launch.config_file is None:
            return self
        from trainer_lib.launch import accelerate

        return self.model_copy(update={"args": accelerate.merged(self.args, self.launch.config_file)})


class EvaluateConfig(StageSettings):
    """evaluate: model and splits to metrics."""

    enabled: bool = setting(affects="nothing", default=True, description="False leaves the stage out.")
    splits: list[str] = setting(
        affects="result", default_factory=lambda: ["test"], min_length=1, description="Splits to measure."
    )
    args: Options = setting(
        affects="result",
        default_factory=dict,
        description="TrainingArguments for this stage; what is unset comes from train.args.",
    )
    launch: Launch | None = setting(
        affects="nothing", default=None, description="How the processes are started; unset: like train."
    )


class PredictConfig(StageSettings):
    """predict: model and a split to sharded Parquet files."""

    enabled: bool = setting(affects="nothing", default=True, description="False leaves the stage out.")
    split: str = setting(
        affects="result", default="test", min_length=1, description="Name of the split to predict; it needs no labels."
    )
    rows_per_file: int = setting(affects="result", default=10_000, ge=1, description="Rows per Parquet file.")
    args: Options = setting(
        affects="result",
        default_factory=dict,
        description="TrainingArguments for this stage; what is unset comes from train.args.",
    )
    launch: Launch | None = setting(
        affects="nothing", default=None, description="How the processes are started; unset: like train."
    )


class PublishConfig(KeyedSettings):
    """push-to-hub: model, card and metrics to a hub."""

    enabled: bool = setting(affects="nothing", default=True, description="False leaves the stage out.")
    to: str | None = setting(
        affects="result",
        default=None,
        description="hf://organisation/name or any folder URL; unset: hub/<name> below the storage.",
    )
    private: bool = setting(
        affects="nothing", default=True, description="Make a new Hub repository private (hf:// only)."
    )
    revision: str | None = setting(
        affects="result", default=None, description="Branch on the Hub; unset: main (hf:// only)."
    )
    title: str | None = setting(
        affects="result", default=None, description="Title of the model card; unset: the pipeline's name."
    )
    description: str = setting(
        affects="result", default="", description="Text of the model card: what the model is for, in Markdown."
    )
    license: str | None = setting(
        affects="result", default=None, description="Licence of the model, as a Hub identifier (apache-2.0)."
    )
    tags: list[str] = setting(affects="result", default_factory=list, description="Tags of the model card.")
    base_model: str | None = setting(
        affects="result", default=None, description="Model this one was made from, as a Hub name."
    )
    retries: int = setting(
        affects="nothing", default=3, ge=0, le=20, description="How many failures of the stage are retried."
    )


class TrackingConfig(Settings):
    """Where params, curves and models are recorded."""

    enabled: bool = Field(default=True, description="False records nothing in MLflow.")
    uri: str | None = Field(
        default=None,
        description="MLflow server or database; unset: MLFLOW_TRACKING_URI, else sqlite beside the storage.",
    )
    experiment: str | None = Field(default=None, min_length=1, description="Experiment; unset: the pipeline's name.")
    run_name: str | None = Field(default=None, description="Name of the MLflow run; unset: the pipeline's name.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the MLflow run.")
