"""The verb *evaluate_checkpoint*: what an evaluation inside the training would have measured at a checkpoint's step.

The Trainer is set up as training sets it up (kernels, caches, position, random numbers), so that on the same device and
with as many processes the metrics are equal bit for bit.
"""

from __future__ import annotations

from trainer_lib.checkpoint.values import restore_rng
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.protocol.requests import CheckpointMetrics, EvaluateCheckpointRequest
from trainer_lib.recipes import DataInfo
from trainer_lib.state import TrainerState
from trainer_lib.storage import Store
from trainer_lib.trackers.vendors import numbers_only
from trainer_lib.trainer.model.seeding import restore_seeds
from trainer_lib.worker.process.assembly import (
    add_metrics,
    arguments,
    build_model,
    build_trainer,
    events_callback,
    leave_together,
)
from trainer_lib.worker.process.session import Work

# What an evaluation logs besides its metrics.
_POSITION = ("global_step", "max_steps", "epoch", "num_input_tokens_seen")


def run(work: Work[EvaluateCheckpointRequest]) -> CheckpointMetrics:
    """Evaluate the checkpoint. The result is complete on rank 0."""
    request = work.request
    args = arguments(work, "evaluate_checkpoint", Store.open(request.output, field="storage").url)
    model = build_model(work, args, DataInfo(work.prepared))
    trainer = build_trainer(
        work,
        args,
        model,
        [events_callback(work, args)],
        train_dataset=ArrowSplit(work.prepared, request.train_split),
        eval_dataset=ArrowSplit(work.prepared, request.eval_split),
    )
    add_metrics(trainer, request.metrics)
    # Where the training was when it wrote the checkpoint; the optimizer is left out.
    internals = trainer._trainflow
    internals.model.prepare()
    internals.restore.load_model(request.checkpoint)
    loaded = internals.restore.open(request.checkpoint)
    saved = TrainerState.from_dict(loaded.trainer_state)
    for name in _POSITION:
        setattr(trainer.state, name, getattr(saved, name))
    rank = internals.world.save_group.rank
    if loaded.has_rng(rank):  # the model may draw in an evaluation, too
        state = loaded.read_rng(rank)
        restore_rng(state)
        restore_seeds(trainer.model, state.get("seeds", {}))
    step = trainer.state.global_step
    work.events.emit("progress", message=f"evaluating the checkpoint of step {step}")
    metrics = trainer.evaluate()
    leave_together(trainer)
    return CheckpointMetrics(step, numbers_only(metrics))
