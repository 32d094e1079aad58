"""Before a training: what workers find out about it, on fake tensors or in a few real steps. Nothing is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainer_lib.base.metric_names import read_metrics
from trainer_lib.errors import ConfigError, Interrupted, Preempted, TrainflowError
from trainer_lib.launch import warm
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.variables import threads_of
from trainer_lib.protocol.footprint import Estimate, Probe
from trainer_lib.protocol.requests import EstimateRequest, EvaluateRequest, ProbeRequest
from trainer_lib.storage import Store
from trainflow.tasks.configs import EvaluateConfig, StageSettings, TrainConfig
from trainflow.tasks.keys.spec_words import in_words_of_spec
from trainflow.tasks.keys.stage_code import code_of
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageFolder
from trainflow.tasks.stage.worker import model_fields, sent_arguments

PROBED_STEPS = 13
_FOLDER = "probe"
_REHEARSED = {f"evaluate.{name}" for name in ("metrics", "slices", "confidence", "resamples", "benchmarks")}
_ONLY_PROBED: dict[str, Any] = {  # the schedule and the limits of a whole training mean nothing here
    "max_steps": PROBED_STEPS,
    "warmup_steps": 0,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "save_total_limit": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "eval_on_start": False,
    "eval_delay": 0,
    "push_to_hub": False,
    "report_to": "none",
}


def announce_probe(config: TrainConfig, context: StageContext) -> None:
    """Have the workers of an estimate and a probe import torch while the data is prepared."""
    args = context.resolver.arguments(config.args, prefix="train.args")
    own = context.resolver.launch(config.launch, use_cpu=args.use_cpu)
    warm.expect([("estimate", _alone(own)), ("probe", own)])


def estimate_training(config: TrainConfig, context: StageContext, data: StageManifest[PrepareFacts]) -> Estimate:
    """Build the model without values in one worker, and run a step on fake tensors."""
    args = context.resolver.arguments(config.args, prefix="train.args")
    own = context.resolver.launch(config.launch, use_cpu=args.use_cpu)
    request = EstimateRequest(
        **_fields(config, context, StageFolder("train", Store.open(context.storage)), data),
        args=sent_arguments(config.args, context),
        model=config.model,
        train_split=config.train_split,
        eval_split=config.eval_split,
        processes=own.world_size,
    )
    with in_words_of_spec("train"):
        return launch(request, _alone(own), env={}, on_line=_ignore, on_event=_ignore, shared=True)


def needs_rehearsal(config: EvaluateConfig, context: StageContext, named: Mapping[str, str]) -> bool:
    """Whether an evaluation may refuse something that neither the spec nor the data's columns show."""
    if config.metrics or config.slices or config.benchmarks or named:
        return True
    code = code_of(config, context)
    # A name that is not defined as a function may be an object, which is given batch by batch.
    is_open = code.defines("compute_metrics") and not code.functions("compute_metrics")
    return bool(config.resamples) and (is_open or bool(context.resolver.arguments(config.args).batch_eval_metrics))


def rehearse_evaluation(
    config: EvaluateConfig,
    train: TrainConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    *,
    named: Mapping[str, str],
    on_event: Callable[[dict[str, Any]], None],
) -> None:
    """Have one worker try what evaluate is asked to measure, on a few rows and the model as it begins.

    `named` has settings and the metrics that they need. `on_event` takes a warning where it could not be tried.
    """
    args = context.resolver.arguments(config.args, prefix="evaluate.args")
    own = context.resolver.launch(config.launch or train.launch, use_cpu=args.use_cpu)
    request = EvaluateRequest(
        **_fields(config, context, StageFolder("evaluate", Store.open(context.storage)), data),
        args=sent_arguments(config.args, context),
        model=train.model,
        model_url="",
        splits=tuple(config.splits),
        resamples=config.resamples,
        confidence=config.confidence,
        metrics=read_metrics(config.metrics),
        slices=tuple(config.slices),
        benchmarks=tuple(entry.to_request(context.limit) for entry in config.benchmarks),
        is_rehearsal=True,
        named=dict(named),
    )
    try:
        with in_words_of_spec("evaluate"):
            # It writes nothing, so runs of one storage may rehearse at the same time.
            stop = context.stop.is_set
            launch(request, _alone(own), env={}, on_line=_ignore, on_event=on_event, should_cancel=stop, shared=True)
    except (Interrupted, Preempted):
        raise
    except TrainflowError as error:
        if isinstance(error, ConfigError) and error.field in {*_REHEARSED, *named}:
            raise
        message = f"The metrics could not be tried before the training ({error.message})."
        on_event({"event": "warning", "message": message})


def _alone(own: LaunchConfig) -> LaunchConfig:
    """The launch of one worker, from the launch `own` of all."""
    here = own.engine is None and own.kind != "in_process"
    return LaunchConfig(
        kind="in_process" if own.kind == "in_process" else "process",
        processes=1,
        # As many as each of all has: the number decides the order of additions.
        threads=int(threads_of(own, {**os.environ, **own.env})) if here else None,
        env=own.env,
        devices=own.devices,
        device_order=own.device_order,
    )


def probe_training(
    config: TrainConfig, context: StageContext, data: StageManifest[PrepareFacts], *, on_line: Callable[[str], None]
) -> Probe:
    """Train a few steps as the spec says, evaluate some rows and save once, in a folder that is removed."""
    args = context.resolver.arguments(config.args, prefix="train.args")
    own = context.resolver.launch(config.launch, use_cpu=args.use_cpu)
    changed: dict[str, Any] = dict(_ONLY_PROBED)
    for name in ("eval", "save"):
        if str(getattr(args, f"{name}_strategy")) != "no":
            changed |= {f"{name}_strategy": "steps", f"{name}_steps": PROBED_STEPS}
    folder = f"{_FOLDER}-{os.urandom(8).hex()}"
    store = Store.open(context.storage).child(folder)
    request = ProbeRequest(
        **_fields(config, context, StageFolder("train", store), data),
        args=sent_arguments({**config.args, **changed}, context),
        model=config.model,
        train_split=config.train_split,
        eval_split=config.eval_split if "eval_steps" in changed else None,
    )
    started = time.monotonic()

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "wait":
            on_line(str(event.get("message")))

    try:
        with in_words_of_spec("train"):
            found = launch(request, own, env={}, on_line=on_line, on_event=on_event, what="a probe")
    finally:
        Store.open(context.storage).delete_tree(folder)
    whole = time.monotonic() - started
    rows = data.facts.splits[request.eval_split].rows if request.eval_split else 0
    evaluation = (found.evaluation_row_s or 0.0) * min(request.rows, rows)
    known = PROBED_STEPS * found.step_s + found.warm_up_s + evaluation + (found.save_s or 0.0)
    return replace(found, overhead_s=max(0.0, whole - known))


def _fields(
    config: StageSettings, context: StageContext, output: StageFolder, data: StageManifest[PrepareFacts]
) -> dict[str, Any]:
    return {**model_fields(config, context, output, data), "tracking": False}


def _ignore(_: object) -> None:
    return
