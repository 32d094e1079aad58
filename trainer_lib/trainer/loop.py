"""`train()`: the loop, and what happens between two steps.

Glossary
    step        one optimizer step, `global_step` counts them
    micro-step  one forward and backward; a step has `gradient_accumulation_steps` of them on every rank
    quiet step  one that neither logs nor evaluates nor saves: the host never waits for the device in it
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn

from trainer_lib.agreement import lost_peer_error
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.enums import SaveStrategy
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.errors import DataError, InfrastructureError, Preempted
from trainer_lib.memory import empty_device_cache
from trainer_lib.outputs import TrainOutput, speed_metrics
from trainer_lib.search.base import TrialPruned
from trainer_lib.state import TrainerControl, TrainerState
from trainer_lib.trainer.evaluate import EvaluationMixin
from trainer_lib.trainer.history import StepHistory
from trainer_lib.trainer.micro_batch_search import call_within_memory
from trainer_lib.trainer.preparing import PreparingMixin
from trainer_lib.trainer.publishing import PublishingMixin
from trainer_lib.trainer.resuming import ResumingMixin
from trainer_lib.trainer.run import TrainingRun
from trainer_lib.trainer.stop import StopAgreed, StopRequest

_log = logging.getLogger(__name__)
_STOPPED = (Preempted, KeyboardInterrupt, TrialPruned)  # ended early, by intent


class LoopMixin(PublishingMixin, ResumingMixin, PreparingMixin, EvaluationMixin):
    """Training."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: True = the newest good checkpoint in output_dir, "auto" = that or a new start, or
                the URL of one; None = as the arguments say.
            trial: a search's trial, or its parameters.
            ignore_keys_for_eval: keys of the model's output left out of predictions in evaluations.

        Raises:
            Preempted: SIGTERM or SIGINT came; a checkpoint of the step it names is committed.
            NonFiniteError: loss or gradients stayed NaN or infinite.
            ConfigError, DataError: see the class; StorageError: a save failed.
        """
        self._memory_tracker.start("train")
        self.is_in_train = True
        self._trial = trial
        try:
            url = self._checkpoint_to_resume(resume_from_checkpoint)
            with StopRequest(self.comm, on_sigterm=self.args.enable_jit_checkpoint) as self._stop:
                try:
                    search = self._trainflow_micro_batches
                    return search.train(url, lambda url: self._attempt(url, trial, ignore_keys_for_eval))
                finally:
                    self._close_saver()
        except BaseException as error:
            self._close_trackers("KILLED" if isinstance(error, _STOPPED) else "FAILED")
            if isinstance(error, TrialPruned):
                self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            if self.comm.world_size > 1 and (peer := lost_peer_error(error, rank=self.comm.rank)) is not None:
                raise peer from error
            raise
        finally:
            if self._run is not None:
                self._run.source.close()
            self.is_in_train, self._stop, self._run = False, None, None
            self._release_checkpoint()
            self._memory_tracker.abandon()

    def _attempt(self, url: str | None, trial: Any, ignore_keys_for_eval: list[str] | None) -> TrainOutput:
        """One training with one micro-batch size."""
        if self.model_init is not None:
            self._reinitialise_model(trial)
        with self._hooked():
            return self._inner_training_loop(
                batch_size=self._train_batch_size,
                args=self.args,
                resume_from_checkpoint=url,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """The story of a training: epochs of steps, each step several micro-batches, and what the callbacks ask for."""
        run, loaded = self._begin(resume_from_checkpoint, trial)
        model, handler = self.model_wrapped, self.callback_handler
        try:
            self._begin_callbacks(run, loaded, trial, ignore_keys_for_eval)
            while run.epoch < run.num_epochs and not self.control.should_training_stop:
                batches = run.open_epoch()
                samples: list[Any] = []
                self._past = run.take_past()
                self.control = handler.on_epoch_begin(self.args, self.state, self.control)
                while self.state.global_step < run.max_steps:
                    self._request().begin_step()
                    samples = self._next_samples(run, batches)
                    if not samples:
                        break
                    self.control = handler.on_step_begin(self.args, self.state, self.control)
                    loss, norm = self._step(model, samples, run)
                    self._count_step(run, loss, norm)
                    self.control = handler.on_step_end(self.args, self.state, self.control)
                    self._report(run, loss, norm, trial, ignore_keys_for_eval)
                    if self._request().agreed():
                        raise StopAgreed
                    if self.control.should_epoch_stop or self.control.should_training_stop:
                        break
                if run.step_in_epoch == 0:
                    self._no_batch(run)
                run.close_epoch(exhausted=not samples or self.control.should_epoch_stop)
                self.control = handler.on_epoch_end(self.args, self.state, self.control)
                self._report(run, None, None, trial, ignore_keys_for_eval)
                if self.state.global_step >= run.max_steps:
                    break
        except StopAgreed:
            self._save_and_stop(model, trial)
        return self._finalize_training(trial, run)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin(self, url: str | None, trial: Any) -> tuple[TrainingRun, Checkpoint | None]:
        """Data, length, model, optimizer, and whatever a checkpoint restores."""
        if self._trained_before:
            self._reset_optimizer()
        self._trained_before = True
        if url is not None:
            self._hold_checkpoint(url)
        loaded = self._open_checkpoint(url) if url is not None else None
        self._claim_output_dir(url)
        if loaded is not None:
            self._trainflow_micro_batches.adopt(loaded.trainer_state.get("train_batch_size"))
        source = self._train_source()
        max_steps, num_epochs = self._length(source.steps_per_epoch)
        if loaded is not None:
            max_steps = self._accept_batch(loaded, source, max_steps)
            self._load_from_checkpoint(loaded.url, self.model)
        self._prepare_model()
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self._optimizer_mode("train")
        self._settle_optimizer()
        run = TrainingRun(
            source=source,
            history=StepHistory(self.strategy, nonfinite_limit=self._nonfinite_limit()),
            data_parallel_size=self.comm.data_parallel.size,
            max_steps=max_steps,
            num_epochs=num_epochs,
        )
        self._run = run
        self._open_saver()
        self.state = self._resume(run, loaded) if loaded is not None else TrainerState()
        run.kept_best = (self.state.best_metric, self.state.best_global_step)
        self.state.is_hyper_param_search = self._trainflow_trials.is_trial_running
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, min(num_epochs, max_steps), trial)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        examples = "a stream" if source.epoch_samples is None else self.num_examples(source)
        _log.info(
            "Training %d steps of %s samples (of %s) on %d processes (%s, %s), %d trainable parameters%s.",
            *(max_steps, source.global_batch or "?", examples, self.comm.world_size),
            *(self.strategy.name, self.precision.name, self.get_num_trainable_parameters()),
            f", from {url}" if url else "",
        )
        return run, loaded

    def _nonfinite_limit(self) -> int:
        # fp16 finds its loss scale by overflowing: 24 halvings lead from 2**16 to 2**-8, where it is the model's own.
        return self.args.max_nonfinite_steps + (24 if self.precision.name == "fp16" else 0)

    def _begin_callbacks(
        self, run: TrainingRun, loaded: Checkpoint | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> None:
        """`on_train_begin`; the evaluation before the first step, or what a stopped run still had to do."""
        pending = TrainerControl()
        if loaded is not None:
            pending = self._restore_callbacks(loaded)
        handler = self.callback_handler
        self.control = handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and self.state.global_step == 0:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        if loaded is None:
            self._part_random_numbers()
            return
        self.control.should_evaluate, self.control.should_save = pending.should_evaluate, pending.should_save
        self._report(run, None, None, trial, ignore_keys_for_eval)
        self._restore_random_numbers(loaded)
        self.comm.barrier()  # every rank has read what it needs
        self._release_checkpoint()

    # -- one step -----------------------------------------------------------------------------------------------------

    def _next_samples(self, run: TrainingRun, batches: Any) -> list[Any]:
        run.items = []
        count = run.source.micro_steps(run.step_in_epoch)
        samples, run.num_items = self.get_batch_samples(batches, count, self.device)
        if len(run.items) != len(samples):  # an override counted in its own way
            reals = run.reals(len(samples))
            run.items = [self.target_items(each) if real else 0 for each, real in zip(samples, reals, strict=True)]
        run.micro_steps = self.current_gradient_accumulation_steps = len(samples)
        self._track_num_input_tokens(samples, run)
        return samples

    def _track_num_input_tokens(self, samples: list[Any], run: TrainingRun) -> None:
        if self.args.include_num_input_tokens_seen == "no" and not self.args.include_tokens_per_second:
            return
        total = sum(self._input_tokens(batch) for batch, items in zip(samples, run.items, strict=True) if items)
        self.state.num_input_tokens_seen += self.comm.sum_ints([total])[0]

    def _step(self, model: nn.Module, samples: list[Any], run: TrainingRun) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients, then the optimizer: (loss on this rank, norm before clipping), both on the device."""
        if not self.args.auto_find_batch_size:
            return self._forward_backward(model, samples, run), self._optimizer_step(model, run)
        loss = call_within_memory(self.comm, lambda: self._forward_backward(model, samples, run))
        self.strategy.sync_gradients(model)
        return loss, call_within_memory(self.comm, lambda: self._optimizer_step(model, run))

    def _exchanges(self, run: TrainingRun) -> bool:
        """Whether gradients are exchanged in the backward of the micro-step under way."""
        # A rank that runs out of memory would leave the others waiting for it in the middle of a backward.
        return not self.args.auto_find_batch_size and (run.syncs or self._batching.sync_each_batch)

    def _forward_backward(self, model: nn.Module, samples: list[Any], run: TrainingRun) -> torch.Tensor:
        """All micro-steps of a step: gradients are complete afterwards; the step's loss on this rank, on the device."""
        total: torch.Tensor | None = None
        for run.micro_step, batch in enumerate(samples):
            batch = self._usable(batch, samples, run)
            if batch is None:
                continue
            with contextlib.nullcontext() if self._exchanges(run) else self.strategy.no_sync(model):
                if self._training_step_takes_items:
                    loss = self.training_step(model, batch, run.num_items)
                else:
                    loss = self.training_step(model, batch)
            total = loss if total is None else total + loss
            self.current_flos += float(self.floating_point_ops(batch))
            if not run.syncs:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        return total if total is not None else torch.zeros((), device=self.device)

    def _usable(self, batch: Any, samples: list[Any], run: TrainingRun) -> Any:
        """A micro-batch without a single target has no mean loss (0/0): alone it is skipped, and among several ranks
        one that has targets is computed at weight zero in its place. When the whole step has none, nothing can be done.
        """
        if run.items[run.micro_step] or not run.num_items:
            return batch
        if self.comm.world_size == 1 and self.strategy.skips_micro_steps:
            return None
        return next((each for each, items in zip(samples, run.items, strict=True) if items), batch)

    def _optimizer_step(self, model: nn.Module, run: TrainingRun) -> torch.Tensor:
        """Clip, step (unless not finite), advance the schedule; the norm before clipping."""
        handler, optimizer = self.callback_handler, self._ready_optimizer()
        self._unscale()
        norm = self._clip_grad_norm(model)
        self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self._step_if_finite(norm)
        self.control = handler.on_optimizer_step(self.args, self.state, self.control)
        run.rate = self._get_learning_rate()
        self._step_schedule()
        optimizer.zero_grad()
        return norm

    def _count_step(self, run: TrainingRun, loss: torch.Tensor, norm: torch.Tensor) -> None:
        run.history.append(loss, norm)
        run.samples += run.source.step_samples(run.step_in_epoch)
        run.step_in_epoch += 1
        self.state.global_step += 1
        steps = run.source.steps_per_epoch or run.max_steps
        self.state.epoch = run.epoch + run.step_in_epoch / steps
        if run.history.full:
            run.history.collect(self.state.global_step)
        every = self.args.torch_empty_cache_steps
        if every and self.state.global_step % every == 0:
            empty_device_cache(self.device)

    def _report(
        self,
        run: TrainingRun,
        loss: torch.Tensor | None,
        norm: torch.Tensor | None,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
    ) -> None:
        self._observe_save()
        control, model, epoch = self.control, self.model_wrapped, self.state.epoch
        if control.should_log or control.should_evaluate or control.should_save:
            self._maybe_log_save_evaluate(
                loss, norm, model, trial, epoch, ignore_keys_for_eval, run.started, learning_rate=run.rate
            )

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: Any = None,
    ) -> None:
        """What the callbacks asked for: log, then evaluate, then save. The host waits for the device here."""
        run = self._training_run()
        run.history.collect(self.state.global_step)
        if self.control.should_log and run.history.anything:
            logs = run.history.take(hide_nonfinite=self.args.logging_nan_inf_filter)
            logs["learning_rate"] = float(self._get_learning_rate() if learning_rate is None else learning_rate)
            self._log(logs, start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            best = self._determine_best_metric(metrics, trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self._announce_save(self.state)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _no_batch(self, run: TrainingRun) -> None:
        if self.state.global_step == run.first_step:
            raise DataError(
                "The training data gave no batch.", field="train_dataset", remedy="Give data that is not empty."
            )
        _log.warning("The training data gave no more batches at step %d: stopping there.", self.state.global_step)
        self.control.should_training_stop = True

    def _request(self) -> StopRequest:
        if self._stop is None:
            raise InfrastructureError("The training loop runs outside of train().")
        return self._stop

    def _save_and_stop(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        _log.warning("Asked to stop: saving step %d.", step)
        run = self._training_run()
        run.stopping = True
        self._save_checkpoint(model, trial)
        self._finish_save()
        self._announce_save(self.state)
        if run.save_error is not None:
            raise run.save_error
        raise Preempted(
            f"Stopped on request at step {step}; a checkpoint of it is committed.",
            step=step,
            remedy='Continue with resume_from_checkpoint="auto".',
        )

    def _finalize_training(self, trial: Any, run: TrainingRun) -> TrainOutput:
        """The best model if asked for, the metrics of the run, `on_train_end`."""
        run.history.collect(self.state.global_step)
        self.state.num_samples_seen = run.samples
        self._settle_saves(self.model_wrapped, trial)
        if self.args.load_best_model_at_end:
            self._load_best_model()
        self.store_flos()
        steps = self.state.global_step - run.first_step
        tokens = (self.state.num_input_tokens_seen - run.first_tokens) / self.comm.data_parallel.size
        metrics = speed_metrics(
            "train",
            run.started,
            num_samples=(run.samples - run.first_samples) or None,
            num_steps=steps,
            num_tokens=tokens if self.args.include_tokens_per_second else None,
        )
        metrics |= {"total_flos": self.state.total_flos, "train_loss": run.history.mean_loss()}
        if run.history.nonfinite_steps:
            metrics["nonfinite_steps"] = run.history.nonfinite_steps
        self.is_in_train = False
        self._memory_tracker.stop("train", metrics)
        self._log(metrics)
        self.model.zero_grad()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._trainflow_publisher.push_final_model(is_stop_requested=lambda: self._request().requested)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)
