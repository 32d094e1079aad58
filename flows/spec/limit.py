"""A check of a whole pipeline on a few rows: the spec that `limit` makes of a spec.

A limited run has a storage of its own below the real one, and the limit is part of every key, so neither is ever a hit
for the other. It publishes below that storage, whatever hub the spec names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.spec.spec import PipelineSpec
    from tasks.stage.resolver import Resolver
    from trainer_lib.arguments import TrainingArguments

FOLDER = "limited"
"""Name of the storage of limited runs, below the real one."""

LIMIT_STEPS = 4
"""Optimizer steps of a limited training: two, an evaluation and a save, and the same again."""

_EVERY = LIMIT_STEPS // 2


def limit_spec(spec: PipelineSpec, resolver: Resolver) -> PipelineSpec:
    """Return the spec of the check that `spec.limit` asks for; the spec itself without a limit.

    Raises:
        ConfigError: an argument of the training is unknown or has a value that it does not take.
    """
    if spec.limit is None:
        return spec
    tracking, publish = spec.tracking, spec.publish
    return spec.model_copy(
        update={
            "storage": _below(spec.storage),
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


def _below(storage: str) -> str:
    url = storage.rstrip("/")
    # The spec that a limited run has recorded names its storage already.
    return url if url.rpartition("/")[2] == FOLDER else f"{url}/{FOLDER}"


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
