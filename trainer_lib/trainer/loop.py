"""`TrainingLoop`: `train()`, from the request to train to its result.

Glossary
    step        one optimizer step; `global_step` counts them
    micro-step  one forward and backward; a step has `gradient_accumulation_steps` of them on every rank
    quiet step  a step without log, evaluation and save: the host never waits for the device in it

Below the loop, what happens before the first step: data, length, model, optimizer, and what a checkpoint restores.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import describe_step
from trainer_lib.arguments.enums import SaveStrategy
from trainer_lib.base.memory import empty_device_cache
from trainer_lib.base.outputs import TrainOutput, speed_metrics
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.data.loading.foreign import ForeignLoader
from trainer_lib.data.loading.items import describe_row
from trainer_lib.data.loading.loader import TrainSource
from trainer_lib.data.loading.mixture_order import MixtureOrder
from trainer_lib.errors import ConfigError, DataError, InfrastructureError, Preempted, lost_peer_error
from trainer_lib.search.base import TrialPruned
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.trainer.attempts import MemoryRanOut, call_within_memory
from trainer_lib.trainer.checkpoints.checkpointing import SavePlan
from trainer_lib.trainer.history import SpikeFound, SpikeWatch, StepHistory
from trainer_lib.trainer.model.forward import LossRule
from trainer_lib.trainer.model.source_losses import SourceLosses, take_sources
from trainer_lib.trainer.run import StopAgreed, StopRequest, TimeSpent, TrainingRun
from trainer_lib.trainer.trainer_checks import without_length
from trainer_lib.trainer.weighting import LossScale, StepWeights

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_STOPPED = (Preempted, KeyboardInterrupt, TrialPruned)  # ended early, by intent


class TrainingLoop:
    """Puts run, engine, checkpoints and the Trainer's methods in order; owner of the run and of `is_in_train`."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        trainer.is_in_train = False

    def set_up(self) -> None:
        """Start with the accumulation that the arguments ask for."""
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps

    def train(self, resume_from: str | bool | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """Train; `Trainer.train` documents it."""
        trainer, internals, comm = self._trainer, self._internals, self._internals.world.comm
        internals.read_signatures()
        trainer._memory_tracker.start("train")
        trainer.is_in_train = True
        trainer._hp_search_setup(trial)
        try:
            url = internals.restore.find(resume_from)
            with StopRequest(comm, on_sigterm=trainer.args.enable_jit_checkpoint) as internals.stop:
                try:
                    with internals.attempts.begin(url):
                        while True:
                            try:
                                return self._attempt(internals.attempts.url, trial, ignore_keys)
                            except (MemoryRanOut, SpikeFound) as error:
                                failure = error.with_traceback(None)  # it would keep the attempt's tensors alive
                            internals.attempts.recover(failure)
                finally:
                    internals.checkpoints.close()
        except BaseException as error:
            internals.events.close_trackers("KILLED" if isinstance(error, _STOPPED) else "FAILED")
            if isinstance(error, TrialPruned):
                internals.events.fire("on_train_end")
            # A rank that survives sees only a failed collective: the error then says that a process is gone.
            if comm.world_size > 1 and (peer := lost_peer_error(error, rank=comm.rank)) is not None:
                raise peer from error
            raise
        finally:
            if internals.run is not None:
                internals.run.source.close()
            trainer.is_in_train, internals.stop, internals.run = False, None, None
            internals.restore.release()
            trainer._memory_tracker.abandon()

    def use_run(self, run: TrainingRun) -> None:
        """Make `run` the training under way."""
        self._internals.run = run

    def drop_run(self) -> None:
        """Forget the training under way, with the tensors that it holds."""
        self._internals.run = None

    def _attempt(self, url: str | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """One training with one micro-batch size."""
        trainer, internals = self._trainer, self._internals
        # Inside the attempt: after out of memory, the next attempt needs the initial weights again.
        if trainer.model_init is not None:
            internals.model.initialize_again(trial)
        with internals.model.hooked():
            return trainer._inner_training_loop(
                batch_size=trainer._train_batch_size,
                args=trainer.args,
                resume_from_checkpoint=url,
                trial=trial,
                ignore_keys_for_eval=ignore_keys,
            )

    def run(self, url: str | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """Epochs of steps, each step several micro-batches, and what the callbacks ask for in between."""
        trainer, internals = self._trainer, self._internals
        began = time.monotonic()
        run, loaded = begin_run(trainer, internals, url, trial, ignore_keys)
        run.spent = TimeSpent(0.0 if loaded is None else time.monotonic() - began)
        fire, model, stop = internals.events.fire, trainer.model_wrapped, run.stop
        try:
            begin_callbacks(trainer, internals, run, loaded)
            if loaded is not None:
                self._report(run, None, None)  # what the stopped run still had to do
                # Last, after all that may draw random numbers.
                internals.restore.finish(loaded)
            while run.epoch < run.num_epochs and not trainer.control.should_training_stop:
                batches = run.open_epoch()
                samples: list[Any] = []
                internals.forward.past, run.restored_past = run.restored_past, None
                fire("on_epoch_begin")
                while trainer.state.global_step < run.max_steps:
                    stop.begin_step()  # the flags of all ranks travel while the step computes
                    samples = self._next_samples(run, batches)
                    if not samples:
                        break
                    fire("on_step_begin")
                    loss, norm = self._step(model, samples, run)
                    self._count_step(run, loss, norm)
                    fire("on_step_end")
                    self._report(run, loss, norm)
                    # After the report: an evaluation or a save that is due at this step comes first.
                    if stop.agreed():
                        raise StopAgreed
                    if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                        break
                self._close_epoch(run, exhausted=not samples)
                fire("on_epoch_end")
                self._report(run, None, None)
                if trainer.state.global_step >= run.max_steps:
                    break
        except StopAgreed:
            self._save_and_stop()
        return trainer._finalize_training(trial, run.samples - run.first_samples, run.started)

    def current_run(self) -> TrainingRun:
        """The training under way, also right after it ended early. Raises InfrastructureError outside of one."""
        if self._internals.run is None:
            raise InfrastructureError("The training loop runs outside of train().")
        return self._internals.run

    # -- one step -----------------------------------------------------------------------------------------------------

    def _next_samples(self, run: TrainingRun, batches: Any) -> list[Any]:
        """The micro-batches of the next step, with their target items counted; none at the end of the epoch."""
        trainer, weights = self._trainer, run.weights
        weights.items, batches.drawn = [], []
        if run.step_in_epoch == run.source.steps_per_epoch:
            # Not through an override, which may expect a batch. The data may be longer than it says.
            extra = next(batches, None)
            if extra is None:
                return []
            batches = itertools.chain((extra,), batches)
        count = run.source.micro_steps(run.step_in_epoch)
        place = (self._internals.world.device,) if self._internals.signatures.samples_take_device else ()
        samples, weights.num_items = trainer.get_batch_samples(batches, count, *place)
        if len(weights.items) != len(samples):  # an override counted in its own way
            weights.count(samples, self._internals.forward.target_items)
        weights.note_targets()
        if trainer.state.global_step == run.first_step:
            self._internals.world.check_samples(samples)
        # The last step of an epoch may have fewer micro-batches, and overridden steps divide by this number.
        weights.micro_steps = trainer.current_gradient_accumulation_steps = len(samples)
        if run.skip_until > trainer.state.global_step:
            return samples
        one_by_one = "_track_num_input_tokens" in self._internals.signatures.overridden
        for inputs in samples if one_by_one else [samples]:
            trainer._track_num_input_tokens(inputs)
        return samples

    def _step(
        self, model: nn.Module, samples: list[Any], run: TrainingRun
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Gradients, then the optimizer: (loss on this rank, norm before clipping), both 0-dim on the device."""
        engine, comm = self._internals.engine, self._internals.world.comm
        if run.skip_until > self._trainer.state.global_step:  # after a loss spike
            engine.skip_step(run)
            return None, None
        if not self._internals.attempts.halves:
            loss = self._forward_backward(model, samples, run)
            return loss, self._update(model, loss, samples, run)
        # A rank that runs out of memory in a backward would leave the others waiting for its gradients.
        loss = call_within_memory(comm, lambda: self._forward_backward(model, samples, run))
        engine.strategy.sync_gradients(model)
        return loss, call_within_memory(comm, lambda: self._update(model, loss, samples, run))

    def _update(self, model: nn.Module, loss: torch.Tensor, samples: list[Any], run: TrainingRun) -> torch.Tensor:
        """Step the optimizer, unless the step has no targets and therefore no loss; the norm ``[]``, or NaN."""
        engine, comm = self._internals.engine, self._internals.world.comm
        takes_all = run.weights.has_targets or engine.strategy.name == "deepspeed"  # it skips NaN by itself
        if takes_all or not comm.any(not math.isfinite(loss.item())):
            return engine.step(model, run)
        trainer = self._trainer
        decode = getattr(trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None), "decode", None)
        decode = decode if callable(decode) else None
        run.history.example = run.history.example or describe_row(samples[0], trainer.label_names, decode)
        engine.skip_step(run)
        engine.ready_optimizer().zero_grad()
        model.zero_grad()
        return torch.full_like(loss, math.nan)

    def _forward_backward(self, model: nn.Module, samples: list[Any], run: TrainingRun) -> torch.Tensor:
        """All micro-steps of a step: gradients are complete afterwards. The step's loss on this rank, 0-dim."""
        trainer, internals, weights = self._trainer, self._internals, run.weights
        with_items = internals.signatures.training_step_takes_items
        syncs_last = not internals.attempts.halves
        syncs_each = syncs_last and internals.world.batching.sync_each_batch
        last, total = len(samples) - 1, None
        weights.computing = True
        # `weights` is the loop's target: `training_step` and `accelerator.sync_gradients` read the micro-step there.
        for weights.micro_step, batch in enumerate(samples):
            if weights.num_items and not weights.items[weights.micro_step]:  # its own loss would be 0/0
                if internals.world.comm.world_size == 1 and internals.engine.strategy.skips_micro_steps:
                    continue
                batch = weights.substitute(batch, samples)
            if run.history.sources is not None:
                batch, sources = take_sources(batch)
                internals.forward.sources = sources if weights.has_items else None
            internals.engine.set_optimizer_mode("train")  # not before a checkpoint is restored, with its mode
            syncs = syncs_each or (syncs_last and weights.micro_step == last)
            with contextlib.nullcontext() if syncs else internals.engine.strategy.no_sync(model):
                if with_items:
                    loss = trainer.training_step(model, batch, weights.num_items)
                else:
                    loss = trainer.training_step(model, batch)
            total = loss if total is None else total + loss
            internals.counters.count_flos(batch)
            if weights.micro_step != last:
                internals.events.fire("on_substep_end")
        weights.computing = False
        return total if total is not None else torch.zeros((), device=internals.world.device)

    def _count_step(self, run: TrainingRun, loss: torch.Tensor | None, norm: torch.Tensor | None) -> None:
        """Note that a step is done: history, samples, position. A skipped step has no loss."""
        state, history = self._trainer.state, run.history
        if loss is not None and norm is not None:
            weights = run.weights
            history.append(loss, norm, has_targets=weights.has_targets, empty_batches=weights.empty_batches)
            run.samples += run.source.step_samples(run.step_in_epoch)
        run.step_in_epoch += 1
        state.global_step += 1
        # In micro-batches: the last step of an epoch may have fewer than the others.
        done = run.step_in_epoch * run.micros_per_step
        state.epoch = run.epoch + (done / run.micros_per_epoch if done < run.micros_per_epoch else 1.0)
        if state.global_step == run.first_step + 1:
            self._internals.snapshots.check_optimizer()
        if history.full:
            history.collect(state.global_step)
        every = self._trainer.args.torch_empty_cache_steps
        if every and state.global_step % every == 0:
            empty_device_cache(self._internals.world.device)

    # -- between steps ------------------------------------------------------------------------------------------------

    def _report(self, run: TrainingRun, loss: torch.Tensor | None, norm: torch.Tensor | None) -> None:
        """Log, evaluate and save, if the callbacks ask for it."""
        trainer = self._trainer
        self._internals.checkpoints.observe()  # may fire `on_save`, which replaces `control`
        control, signatures = trainer.control, self._internals.signatures
        asked = control.should_log or control.should_evaluate or control.should_save
        is_overridden = "_maybe_log_save_evaluate" in signatures.overridden
        if asked or is_overridden:  # an override counts on it
            given = (norm, trainer.model_wrapped, run.trial, trainer.state.epoch, run.ignore_keys, run.started)
            if not is_overridden:
                trainer._maybe_log_save_evaluate(loss, *given, learning_rate=run.rate)
                return
            # An override of any age gets the loss as the reference gives it: the sum since the last log.
            if asked:  # else the host need not wait
                run.history.collect(trainer.state.global_step)
            total, count = run.history.sum_since_log().to(self._internals.world.device), signatures.report_takes - 1
            rate = {"learning_rate": run.rate} if signatures.report_takes_rate else {}
            taken: tuple[Any, ...] = given[1:5] if count == 4 else given[:count]
            trainer._maybe_log_save_evaluate(total, *taken, **rate)

    def log_evaluate_save(
        self, model: nn.Module, trial: Any, ignore_keys: list[str] | None, start_time: float | None, learning_rate: Any
    ) -> None:
        """Do what callbacks requested: log, then evaluate, then save. The host waits for the device here."""
        trainer, internals, run = self._trainer, self._internals, self.current_run()
        # First: after a non-finite step, no evaluation is the best.
        run.history.collect(trainer.state.global_step)
        # A skipped step has been logged before the rollback, where a log was due.
        if trainer.control.should_log and run.history.steps_since_log and trainer.state.global_step > run.skip_until:
            logs = run.history.take(hide_nonfinite=trainer.args.logging_nan_inf_filter)
            if run.spikes:
                logs["loss_spikes"] = len(run.spikes)
            logs["learning_rate"] = float(trainer._get_learning_rate() if learning_rate is None else learning_rate)
            internals.log(logs, start_time)
        if trainer.control.should_evaluate:
            with run.spent.count("evaluated"):
                metrics = trainer._evaluate(trial, ignore_keys)
            best = trainer._determine_best_metric(metrics, trial)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = best
        if trainer.control.should_save:
            with run.spent.count("saved"):
                trainer._save_checkpoint(model, trial)
            internals.checkpoints.announce(trainer.state)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _close_epoch(self, run: TrainingRun, *, exhausted: bool) -> None:
        step, is_read = self._trainer.state.global_step, exhausted or run.step_in_epoch == run.source.steps_per_epoch
        if run.step_in_epoch == 0:
            if step == run.first_step:
                remedy = "Give data that is not empty."
                raise DataError("The training data gave no batch.", field="train_dataset", remedy=remedy)
            _log.warning("The training data gave no more batches at step %d: stopping there.", step)
            self._trainer.control.should_training_stop = True
        elif is_read and not run.weights.has_targets:
            run.history.collect(step)
            run.history.require_targets(step, run.step_in_epoch)
        if exhausted and run.step_in_epoch and run.source.steps_per_epoch is None:
            run.note_pass(run.step_in_epoch * (run.source.global_batch or 1))
            self._trainer.state.epoch = run.epoch + 1.0
        if is_read or self._trainer.control.should_epoch_stop:  # else a later run may continue this epoch
            run.epoch, run.step_in_epoch = run.epoch + 1, 0

    def _save_and_stop(self) -> None:
        step = self._trainer.state.global_step
        if self._internals.checkpoints.occupied.forbids(step):
            what = f"Stopped on request at step {step}, which is not saved: checkpoints of another run are in the way."
            remedy = "Run it again: it starts from the beginning. Use another output_dir to save a stop."
            raise Preempted(what, remedy=remedy)
        _log.warning("A stop was requested: saving step %d.", step)
        run = self.current_run()
        run.stopping = True
        self._internals.checkpoints.save_now(run)
        what = f"Stopped on request at step {step}; a checkpoint of it is committed."
        raise Preempted(what, step=step, remedy='Continue with resume_from_checkpoint="auto".')

    def finalize(self) -> TrainOutput:
        """The best model if asked for, the metrics of the run, `on_train_end`, the final push."""
        trainer, internals, state = self._trainer, self._internals, self._trainer.state
        run = self.current_run()
        run.history.collect(state.global_step)
        run.history.require_targets(state.global_step, state.global_step)
        state.num_samples_seen = run.samples
        with run.spent.count("saved"):
            internals.checkpoints.complete()  # before other weights are loaded: it may have to save this step
        internals.engine.set_optimizer_mode("eval")  # the weights to use; before it would mix its state into the best
        if trainer.args.load_best_model_at_end:
            trainer._load_best_model()
        trainer.store_flos()
        tokens = (state.num_input_tokens_seen - run.first_tokens) / internals.world.comm.data_parallel.size
        metrics = speed_metrics(
            "train",
            run.started,
            num_samples=(run.samples - run.first_samples) or None,
            num_steps=state.global_step - run.first_step,
            num_tokens=tokens if trainer.args.include_tokens_per_second else None,
        )
        metrics |= {"total_flos": state.total_flos, "train_loss": run.history.mean_loss()}
        metrics |= run.history.counts()
        if run.spikes:
            metrics["loss_spikes"] = len(run.spikes)
        trainer.is_in_train = False
        trainer._memory_tracker.stop("train", metrics)
        internals.log(metrics)
        trainer.model.zero_grad()
        internals.events.fire("on_train_end")
        internals.publisher.push_final_model(is_stop_requested=lambda: run.stop.requested)
        internals.checkpoints.keep_best_alone()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)


# fp16 finds its loss scale by overflowing: 24 halvings lead from 2**16 to 2**-8, where the model is to blame.
_OVERFLOWS = 24
_NORMS = ("_clip_grad_norm", "_get_grad_norm")


def training_length(args: TrainingArguments, steps_per_epoch: int | None) -> tuple[int, int]:
    """(optimizer steps, epochs) to do; `steps_per_epoch` is None for a stream. Raises ConfigError and DataError."""
    if args.max_steps > 0:
        # A stream is read again from its start until `max_steps` is reached.
        epochs = sys.maxsize if not steps_per_epoch else -(-args.max_steps // steps_per_epoch)
        return args.max_steps, epochs
    if steps_per_epoch is None:
        raise without_length(args)
    if steps_per_epoch == 0:
        raise DataError("The training data has no batch.", field="train_dataset", remedy="Give more data.")
    return math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)


def _planned_length(trainer: Trainer, source: TrainSource, loader: Any) -> tuple[int, int]:
    """(optimizer steps, epochs) to do, as the Trainer's `set_initial_training_values` says. Raises ConfigError."""
    values = trainer.set_initial_training_values(trainer.args, loader)
    epochs, steps, max_steps = values[0], values[1], values[-1]
    if source.steps_per_epoch is not None and steps != source.steps_per_epoch:
        what = f"An epoch of this data has {source.steps_per_epoch} optimizer steps; the override returns {steps}."
        remedy = "Change the epochs or the steps in all; for shorter epochs, override get_train_dataloader."
        raise ConfigError(what, field="set_initial_training_values", value=steps, remedy=remedy)
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
    loader = trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    source = internals.loaders.source_of(loader)
    max_steps, num_epochs = _planned_length(trainer, source, loader)
    internals.checkpoints.claim_folder(SavePlan.of(args, max_steps, source.steps_per_epoch), resumed=loaded)
    if loaded is not None:
        max_steps = internals.restore.accept_batch(loaded, source, max_steps)
        internals.restore.load_model(loaded.url)
    internals.forward.rule = LossRule.of(trainer, computes_own="compute_loss" in internals.signatures.overridden)
    internals.model.prepare()
    engine.prepare_to_train()
    trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
    engine.unwrap_optimizers()
    engine.resolve()
    per_step, per_epoch = _count_micro_batches(trainer, internals, source, max_steps)
    run = TrainingRun(
        source=source,
        history=_step_history(internals, args, source),
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


def _step_history(internals: Internals, args: TrainingArguments, source: TrainSource) -> StepHistory:
    sigma, engine = args.loss_spike_sigma, internals.engine
    watch = None if sigma is None else SpikeWatch(sigma, args.loss_spike_window)
    limit = args.max_nonfinite_steps + (_OVERFLOWS if engine.precision.name == "fp16" else 0)
    order = getattr(source, "order", None)
    sources = SourceLosses(order.names) if isinstance(order, MixtureOrder) else None
    return StepHistory(engine.strategy, nonfinite_limit=limit, spikes=watch, sources=sources)


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
