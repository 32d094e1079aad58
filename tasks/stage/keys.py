"""Content keys: what decides whether a stage's committed result is still the right one.

A key is the SHA-256 of canonical JSON. Every field that went into it is kept beside the result (``key.json``), so a
miss can be explained field by field. A key holds what can change the output: the resolved settings, the recipe's source
closure, the content digests of the inputs, and the versions that change numerics. It holds no absolute path, no
storage URL, no time, no run id, and nothing about where or on how many processes the work runs: training is keyed by
its *global* batch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tasks.configs import EvaluateConfig, PredictConfig, PrepareConfig, PublishConfig, TrainConfig
from tasks.stage.sources import memory
from trainer_lib.errors import ConfigError
from trainer_lib.hub.transport import parse_target

if TYPE_CHECKING:
    from tasks.stage.context import StageContext
    from tasks.stage.manifest import StageManifest

NUMERICS = 1
"""Raised when trainer_lib changes what the same arguments train, measure or predict."""

SCHEMAS = {"prepare-data": 1, "train": 1, "evaluate": 1, "predict": 1, "push-to-hub": 1}
"""Per stage: raised when what it writes changes shape, so that older results are not taken for current ones."""

_PACKAGES = ("torch", "numpy")

# Arguments that can change what evaluate and predict put out. Batch size and workers cannot.
_EVALUATION_FIELDS = (
    *("seed", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "full_determinism", "remove_unused_columns"),
    *("label_names", "label_smoothing_factor", "prediction_loss_only", "include_for_metrics", "batch_eval_metrics"),
    *("eval_do_concat_batches", "past_index", "length_column_name", "torch_compile", "torch_compile_backend"),
    *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
)


@dataclass(frozen=True)
class StageKey:
    """A stage's content key and the fields it was made from."""

    stage: str
    fields: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """SHA-256, 64 hex digits."""
        return hashlib.sha256(canonical({"stage": self.stage, **self.fields})).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the stage's folder on the storage."""
        return self.digest[:16]

    def to_json(self) -> bytes:
        """The contents of ``key.json``."""
        record = {"format": 1, "stage": self.stage, "key": self.digest, "fields": self.fields}
        return json.dumps(record, indent=1, sort_keys=True, default=_plain).encode()


@dataclass(frozen=True)
class Difference:
    """One field that differs between two keys; None where one of them lacks it."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if _is_digest(self.old) or _is_digest(self.new):
            change = "added" if self.old is None else "removed" if self.new is None else "changed"
            return f"{self.field} {change}"
        return f"{self.field}: {_shown(self.old)} -> {_shown(self.new)}"


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def stage_key(stage: str, fields: Mapping[str, Any]) -> StageKey:
    """The key of a stage (also one of your own) from everything that can change its result.

    Raises:
        ConfigError: a field is not plain data.
    """
    try:
        plain = json.loads(canonical({"schema": SCHEMAS.get(stage, 1), **fields}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A key holds plain data only: {error}.", field=stage, remedy="Use numbers, texts, lists and mappings."
        ) from error
    return StageKey(stage, plain)


def versions() -> dict[str, str]:
    """Versions that change numerics, read without importing anything."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "trainer_lib": f"numerics {NUMERICS}"}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The fields in which two keys differ, by dotted name."""
    before, after = dict(_flat(old)), dict(_flat(new))
    names = [*after, *(name for name in before if name not in after)]
    return [
        Difference(name, before.get(name), after.get(name))
        for name in names
        if name not in before or name not in after or before[name] != after[name]
    ]


# -- the stages' keys -------------------------------------------------------------------------------------------------


def prepare_key(config: PrepareConfig, context: StageContext) -> StageKey:
    """prepare-data: options, sources, the recipe."""
    return stage_key(
        "prepare-data",
        {
            "options": config.options,
            "shard_rows": config.shard_rows,
            "allow_nan": config.allow_nan,
            "sources": context.resolver.sources(config.sources, root=context.root, memory=memory(context.storage)),
            "recipe": _recipe_files(config.recipe, context),
        },
    )


def train_key(config: TrainConfig, context: StageContext, data: StageManifest) -> StageKey:
    """train: model and arguments, the recipe, versions, and the content of the prepared data."""
    from trainer_lib.arguments import evaluation_matters, numeric_fields

    args = context.resolver.arguments(config.args, prefix="train.args")
    launch = context.resolver.launch(config.launch, use_cpu=args.use_cpu)
    return stage_key(
        "train",
        {
            "model": config.model,
            "options": config.options,
            "args": numeric_fields(args, data_parallel_size=launch.world_size),
            "train_split": config.train_split,
            "eval_split": config.eval_split if evaluation_matters(args) else None,
            "data": data.content_digest,
            "recipe": _recipe_files(config.recipe, context),
            "versions": versions(),
        },
    )


def evaluate_key(config: EvaluateConfig, context: StageContext, data: StageManifest, model: StageManifest) -> StageKey:
    """evaluate: splits and options, the recipe, versions, and the contents of data and model."""
    return stage_key(
        "evaluate",
        {
            "splits": config.splits,
            "options": config.options,
            "args": _evaluation_fields(config.args, context, "evaluate.args"),
            "data": data.content_digest,
            "model": model.content_digest,
            "recipe": _recipe_files(config.recipe, context),
            "versions": versions(),
        },
    )


def predict_key(config: PredictConfig, context: StageContext, data: StageManifest, model: StageManifest) -> StageKey:
    """predict: split and options, the recipe, versions, and the contents of data and model."""
    return stage_key(
        "predict",
        {
            "split": config.split,
            "rows_per_file": config.rows_per_file,
            "options": config.options,
            "args": _evaluation_fields(config.args, context, "predict.args"),
            "data": data.content_digest,
            "model": model.content_digest,
            "recipe": _recipe_files(config.recipe, context),
            "versions": versions(),
        },
    )


def publish_key(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest,
    model: StageManifest,
    evaluation: StageManifest | None = None,
) -> StageKey:
    """push-to-hub: the target, what the card says, and the content digests and keys of the stages it stands on.

    Raises:
        ConfigError: the target's address is malformed.
    """
    inputs = [data, model, *([] if evaluation is None else [evaluation])]
    target = parse_target(config.to, revision=config.revision) if config.to else None
    card = {key: getattr(config, key) for key in ("title", "description", "license", "tags", "base_model")}
    return stage_key(
        "push-to-hub",
        {
            "name": context.name,
            # A folder below the storage goes by its name: no absolute path, which may move.
            "to": target.url if target else f"hub/{context.name}",
            "revision": target.revision if target else config.revision,
            "card": card,
            "inputs": {one.stage: one.content_digest for one in inputs},
            "stage_keys": {one.stage: one.key for one in inputs},
            "versions": versions(),
        },
    )


def _recipe_files(recipe: str | None, context: StageContext) -> dict[str, str]:
    return context.resolver.closure(recipe or context.recipe, context.root).files


def _evaluation_fields(args: Mapping[str, Any], context: StageContext, prefix: str) -> dict[str, Any]:
    every = context.resolver.arguments(args, prefix=prefix).to_dict()
    return {name: every[name] for name in _EVALUATION_FIELDS if name in every}


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
