"""Before the first step: data, length, model, optimizer, and what a checkpoint restores."""

from __future__ import annotations

import logging
import math
import sys
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.global_batch import describe_step
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.data.foreign import ForeignLoader
from trainer_lib.data.loader import TrainSource
from trainer_lib.errors import ConfigError, DataError, InfrastructureError
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.trainer.checkpointing import SavePlan
from trainer_lib.trainer.history import SpikeWatch, StepHistory
from trainer_lib.trainer.run import TrainingRun
from trainer_lib.trainer.weighting import LossScale, StepWeights

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
# fp16 finds its loss scale by overflowing: 24 halvings lead from 2**16 to 2**-8, where the model is to blame.
_OVERFLOWS = 24
_NORMS = ("_clip_grad_norm", "_get_grad_norm")


def training_length(args: TrainingArguments, steps_per_epoch: int | None) -> tuple[int, int]:
    """(optimizer steps, epochs) to do. Raises ConfigError and DataError.

    Args:
        steps_per_epoch: None when the data has no length.
    """
    if args.max_steps > 0:
        # A stream is read again from its start until `max_steps` is reached.
        epochs = sys.maxsize if not steps_per_epoch else -(-args.max_steps // steps_per_epoch)
        return args.max_steps, epochs
    if steps_per_epoch is None:
        raise ConfigError(
            "The training data has no length, so the number of steps cannot follow from num_train_epochs.",
            field="max_steps",
            value=args.max_steps,
            remedy="Give max_steps.",
        )
    if steps_per_epoch == 0:
        raise DataError("The training data has no batch.", field="train_dataset", remedy="Give more data.")
    return math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)


def training_values(
    trainer: Trainer, source: TrainSource, args: TrainingArguments
) -> tuple[int, int, int, float, int, int | None, int]:
    """What `Trainer.set_initial_training_values` documents."""
    max_steps, epochs = training_length(args, source.steps_per_epoch)
    step = trainer.get_total_train_batch_size(args)
    samples = source.epoch_samples if source.epoch_samples is not None else step * max_steps
    steps = source.steps_per_epoch or max_steps
    trained = step * max_steps if args.max_steps > 0 else samples * args.num_train_epochs
    return epochs, steps, samples, trained, step, source.micros_per_epoch, max_steps


def _planned_length(trainer: Trainer, source: TrainSource, loader: Any) -> tuple[int, int]:
    """(optimizer steps, epochs) to do, as the Trainer's `set_initial_training_values` says. Raises ConfigError."""
    values = trainer.set_initial_training_values(trainer.args, loader)
    epochs, steps, max_steps = values[0], values[1], values[-1]
    if source.steps_per_epoch is not None and steps != source.steps_per_epoch:
        raise ConfigError(
            f"An epoch of this data has {source.steps_per_epoch} optimizer steps; the override returns {steps}.",
            field="set_initial_training_values",
            value=steps,
            remedy="Change the epochs or the steps in all; for shorter epochs, override get_train_dataloader.",
        )
    return int(max_steps), int(epochs)


def begin_run(
    trainer: Trainer, internals: Internals, url: str | None, trial: Any, ignore_keys: list[str] | None
) -> tuple[TrainingRun, Checkpoint | None]:
    """Prepare everything that trains; returns the run, and the checkpoint at `url` that it continues. Collective."""
    args, engine = trainer.args, internals.engine
    if internals.stop is None:
        raise InfrastructureError("The training loop runs outside of train().")
    engine.start_training(measures_norm=not internals.signatures.overridden.isdisjoint(_NORMS))
    loaded = _open_checkpoint(internals, url)  # before the loader is made: it may lower the micro-batch
    source = internals.loaders.train_source()
    max_steps, num_epochs = _planned_length(trainer, source, trainer.callback_handler.train_dataloader)
    internals.checkpoints.claim_folder(SavePlan.of(args, max_steps, source.steps_per_epoch), resumed=loaded)
    if loaded is not None:
        max_steps = internals.restore.accept_batch(loaded, source, max_steps)
        internals.restore.load_model(loaded.url)
    internals.forward.find_rule()
    internals.model.prepare()
    engine.prepare_to_train()
    trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
    engine.unwrap_optimizers()
    engine.set_optimizer_mode("train")  # again: `prepare_to_train` found only an optimizer that was given
    engine.resolve()
    per_step, per_epoch = _count_micro_batches(trainer, internals, source, max_steps)
    run = TrainingRun(
        source=source,
        history=_step_history(internals, args),
        weights=_step_weights(internals, args),
        stop=internals.stop,
        max_steps=max_steps,
        num_epochs=num_epochs,
        micros_per_step=per_step,
        micros_per_epoch=per_epoch,
        trial=trial,
        ignore_keys=ignore_keys,
    )
    internals.loop.use_run(run)
    internals.checkpoints.open()
    _begin_state(trainer, internals, run, loaded)
    internals.attempts.apply_rollback(run, trainer.state.global_step)
    internals.events.show_parts()
    _log.info(
        "Training %d steps over %s, %s (%s, %s), %d trainable parameters%s.",
        *(max_steps, "a stream" if source.epoch_samples is None else f"{trainer.num_examples(source)} samples"),
        _step_in_words(trainer, internals, source),
        *(engine.strategy.name, engine.precision.name, trainer.get_num_trainable_parameters()),
        f", from {url}" if url else "",
    )
    return run, loaded


def _step_in_words(trainer: Trainer, internals: Internals, source: TrainSource) -> str:
    if isinstance(source, ForeignLoader):
        return f"{source.global_batch or '?'} samples a step"
    size = internals.world.comm.data_parallel.size
    return describe_step(trainer.args, data_parallel_size=size, micro_batch=trainer._train_batch_size)


def _step_history(internals: Internals, args: TrainingArguments) -> StepHistory:
    sigma, engine = args.loss_spike_sigma, internals.engine
    watch = None if sigma is None else SpikeWatch(sigma, args.loss_spike_window)
    limit = args.max_nonfinite_steps + (_OVERFLOWS if engine.precision.name == "fp16" else 0)
    return StepHistory(engine.strategy, nonfinite_limit=limit, spikes=watch)


def _count_micro_batches(
    trainer: Trainer, internals: Internals, source: TrainSource, max_steps: int
) -> tuple[int, int]:
    """Micro-batches of a full step and of an epoch, as one process counts them: logs are equal on any number."""
    if internals.world.comm.data_parallel.size == 1 or source.epoch_samples is None or source.steps_per_epoch is None:
        per_step = source.micro_steps(0)
        # A stream without a length is one epoch of `max_steps` steps.
        return per_step, source.micros_per_epoch or max_steps * per_step
    step, micro = trainer.get_total_train_batch_size(trainer.args), trainer._train_batch_size
    full, rest = divmod(min(source.epoch_samples, source.steps_per_epoch * step), step)
    per_step = math.ceil(step / micro)
    return per_step, full * per_step + math.ceil(rest / micro)


def _step_weights(internals: Internals, args: TrainingArguments) -> StepWeights:
    return StepWeights(
        data_parallel_size=internals.world.comm.data_parallel.size,
        over_ranks=args.average_tokens_across_devices,
        by_targets=internals.forward.rule.undivided is LossScale.MEAN,
    )


def _begin_state(trainer: Trainer, internals: Internals, run: TrainingRun, loaded: Checkpoint | None) -> None:
    """Make the Trainer's state: a new one, or the checkpoint's, with all else that the checkpoint restores."""
    state = internals.restore.load_state(run, loaded) if loaded is not None else TrainerState()
    internals.events.use_state(state)
    # If the next best checkpoint cannot be saved, this is the best again.
    run.kept_best = (state.best_metric, state.best_global_step)
    state.is_hyper_param_search = internals.trials.is_trial_running
    state.train_batch_size = trainer._train_batch_size
    state.compute_steps(trainer.args, run.max_steps)
    state.init_training_references(trainer, run.max_steps, min(run.num_epochs, run.max_steps), run.trial)


def _open_checkpoint(internals: Internals, url: str | None) -> Checkpoint | None:
    """Open the checkpoint to resume from, and adopt its micro-batch."""
    if url is None:
        return None
    internals.restore.hold(url)
    loaded = internals.restore.open(url)
    internals.attempts.adopt_limit(loaded.trainer_state.get("train_batch_size"))
    return loaded


def begin_callbacks(trainer: Trainer, internals: Internals, run: TrainingRun, loaded: Checkpoint | None) -> None:
    """Fire `on_train_begin`, and evaluate before the first step if asked for. Collective.

    After a resume, `control` holds what the stopped run still had to do.
    """
    pending = internals.restore.load_callbacks(loaded) if loaded is not None else TrainerControl()
    internals.events.fire("on_train_begin")
    if trainer.args.eval_on_start and trainer.state.global_step == 0:
        trainer._evaluate(run.trial, run.ignore_keys, skip_scheduler=True)
    if loaded is None:
        internals.restore.part_random_numbers()
        return
    trainer.control.should_evaluate, trainer.control.should_save = pending.should_evaluate, pending.should_save
