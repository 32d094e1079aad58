"""Saving: checkpoints, the exported model. What a checkpoint holds is listed in `_snapshot`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.checkpoint.background import BackgroundSaver
from trainer_lib.checkpoint.catalogue import rotate_checkpoints
from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot, snapshot_optimizer
from trainer_lib.checkpoint.rng import capture_rng
from trainer_lib.checkpoint.snapshot import Snapshot, shard_snapshot
from trainer_lib.checkpoint.staging import bytes_to_copy
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.errors import ConfigError, InfrastructureError, LeaseLostError, OutOfMemoryError, StorageError
from trainer_lib.sharding import local_rows
from trainer_lib.state import TrainerState, collect_callback_states
from trainer_lib.storage import Store
from trainer_lib.trainer import models
from trainer_lib.trainer.extras import encoded
from trainer_lib.trainer.reporting import ReportingMixin
from trainer_lib.trainer.run import Saving, TrainingRun

_log = logging.getLogger(__name__)
PREFIX = "checkpoint"
WEIGHTS = "model.safetensors"
T = TypeVar("T")


class SavingMixin(ReportingMixin):
    """Checkpoints and exports. Every public method may be overridden."""

    # -- the model by itself ------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model to a folder: any fsspec URL, output_dir when not given.

        ``model.safetensors``, ``config.json`` and the processing class if there are any, ``training_args.json``: what
        `from_pretrained` loads, for transformers' models. Of a model with peft adapters only these are written.
        Written by rank 0; a failure there is raised on all.
        """
        state = self.strategy.model_state(self.model_wrapped)
        self._on_main_process(lambda: self._save(output_dir, state_dict=state))

    def _on_main_process(self, work: Callable[[], T]) -> T | None:
        """`work()` on rank 0 (of each machine with `save_on_each_node`); what it raises is raised on every rank."""
        return run_on_all_ranks(self.comm, lambda: work() if self._disk.rank == 0 else None)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        store = Store.open(output_dir or str(self.args.output_dir), field="output_dir")
        state = self.strategy.model_state(self.model_wrapped) if state_dict is None else state_dict
        if not models.is_adapted(self.model):
            with store.open_write(WEIGHTS) as writer:
                write_safetensors(writer, models.in_saving_order(self.model, state))
        for name, data in self._model_files(state).items():
            store.write_bytes(name, data)
        store.write_bytes("training_args.json", self.args.to_json_string().encode())
        store.sync()

    def _model_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """What makes the weights usable elsewhere: the model's configuration (with adapters: these, of `state`), and
        the processing class (or else the collator's tokenizer), as files."""
        with self._use_cache_as_given():
            files = models.model_files(self.model, state)
            config = None if files else _config_json(getattr(self.model, "config", None))
        if config is not None:
            files["config.json"] = config.encode()
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        save = getattr(processing, "save_pretrained", None)
        return {**files, **models.folder_files(save)} if callable(save) else files

    @contextlib.contextmanager
    def _use_cache_as_given(self) -> Iterator[None]:
        """What training sets for itself is not what the saved configuration should say."""
        in_training = [(config, config.use_cache) for config, _ in self._caches]
        for config, before in self._caches:
            config.use_cache = before
        try:
            yield
        finally:
            for config, value in in_training:
                config.use_cache = value

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any = None) -> str:
        """Where this training writes."""
        return str(self.args.output_dir)

    def _checkpoint_root(self) -> Store:
        return Store.open(self._get_output_dir(self._trial), field="output_dir")

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Save this step. Committed on return or, with `save_async`, copied on return and committed in the background.

        Collective. At most one save is under way: one before is waited for. After a commit the checkpoints beyond
        `save_total_limit` are removed; never the best, the newest intact one, or one in use.

        Raises StorageError (on every rank) when saves failed, `max_failed_saves` in a row; earlier checkpoints are
        intact.
        """
        run = self._training_run()
        self._finish_save()
        if run.saved_step == self.state.global_step and not (run.stopping and self.args.save_only_model):
            return  # resumed from it, with an evaluation still to do: its weights are these
        run.history.collect(self.state.global_step)
        self.store_flos()
        root, is_best = self._checkpoint_root(), self.state.best_global_step == self.state.global_step
        url = root.child(checkpoint_name(self.state.global_step)).url
        snapshot = self._snapshot(run, best_url=url if is_best else None)
        run.saving = Saving(url, is_best, TrainerState.from_dict(snapshot.trainer_state))
        best = run.saving.state.best_model_checkpoint
        if self._saves_in_background(root, snapshot, best):
            return
        try:
            save_checkpoint(root, snapshot, self._disk, keep=self.args.save_total_limit)
        except StorageError as error:
            self._save_failed(run, error)
            return
        self._save_committed(run)
        self._rotate_checkpoints(root, snapshot.step, best)

    def _saves_in_background(self, root: Store, snapshot: Snapshot, best: str | None) -> bool:
        """Copy the snapshot and begin to save it; False when it has to be saved here and now."""
        if self._saver is None:
            return False
        try:
            self._saver.start(root, snapshot, after_commit=lambda: self._rotate_checkpoints(root, snapshot.step, best))
        except OutOfMemoryError as error:
            _log.warning("Training waits for the checkpoint of step %d: %s", snapshot.step, error)
            return False
        return True

    def _rotate_checkpoints(self, root: Store, step: int, best: str | None) -> None:
        """After the commit of a step, in the thread that saved. `best`: URL of the best checkpoint."""
        if self.args.save_total_limit is None or self._disk.rank != 0:
            return
        protected = {best.rsplit("/", 1)[-1]} if best else set()
        try:
            rotate_checkpoints(
                root,
                keep=self.args.save_total_limit,
                protect={*protected, *self._trainflow_publisher.checkpoints_being_pushed},
                just_written=checkpoint_name(step),
            )
        except StorageError as error:  # one checkpoint too many is no reason to stop
            _log.warning("An old checkpoint could not be removed: %s", error)

    # -- what follows a save ------------------------------------------------------------------------------------------

    def _open_saver(self) -> None:
        """With `save_async`: what saves in the background. Collective."""
        self._close_saver()
        if self.args.save_async:
            timeout_s, keep = self.args.ddp_timeout, self.args.save_total_limit
            self._saver = BackgroundSaver(self.comm, self._disk, timeout_s=timeout_s, keep=keep)

    def _observe_save(self) -> None:
        """At a step boundary: see to a background save that has ended on every rank. Collective."""
        saver = self._saver
        if saver is None:
            return
        if saver.has_ended():
            self._finish_save()
        elif self._disk.rank == 0 and self.state.global_step == self._training_run().first_step + 1:
            saver.memory.reserve(self._state_size())  # the optimizer has its state now

    def _finish_save(self) -> None:
        """Wait for the background save under way, if any, and see to its outcome. Collective."""
        if self._saver is None or not self._saver.is_busy:
            return
        run = self._training_run()
        try:
            self._saver.finish()
        except StorageError as error:
            self._save_failed(run, error)
            return
        self._save_committed(run)
        asked = self.control.should_save  # for the step that has just ended
        self._announce_save(_begun(run).state)
        self.control.should_save = self.control.should_save or asked

    def _save_committed(self, run: TrainingRun) -> None:
        saving = _begun(run)
        run.saved_step, run.save_error, run.failed_saves = saving.state.global_step, None, 0
        self._own_checkpoints.add(saving.url)
        if saving.best:
            self.state.best_model_checkpoint = saving.url
            run.kept_best = (saving.state.best_metric, saving.state.best_global_step)

    def _save_failed(self, run: TrainingRun, error: StorageError) -> None:
        """Tell it, and raise it when that is enough. What is lost with it is not the best any more."""
        saving = _begun(run)
        run.save_error, run.failed_saves = error, run.failed_saves + 1
        if saving.best and self.state.best_global_step == saving.state.global_step:
            self.state.best_metric, self.state.best_global_step = run.kept_best
        too_many = run.failed_saves >= self.args.max_failed_saves and not run.stopping
        if too_many or isinstance(error, LeaseLostError):
            raise error
        _log.error(
            "The checkpoint of step %d could not be saved (%d in a row, training ends at %d); others are intact. %s",
            *(saving.state.global_step, run.failed_saves, self.args.max_failed_saves, error),
        )

    def _announce_save(self, state: TrainerState) -> None:
        """`on_save` and the push, once the newest save is committed; `state`: as it was at that step."""
        run = self._training_run()
        self.control.should_save = False
        is_committed = run.save_error is None and (self._saver is None or not self._saver.is_busy)
        if not is_committed or run.announced_step == state.global_step:
            return
        run.announced_step = state.global_step
        self.control = self.callback_handler.on_save(self.args, state, self.control)
        if not run.stopping:
            self._push_from_checkpoint(self._checkpoint_root().child(checkpoint_name(state.global_step)).url)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing, where there is no hub."""

    def _settle_saves(self, model: nn.Module, trial: Any) -> None:
        """Before training may end well: nothing is under way, and after a failed save this step is saved. Collective.

        Raises StorageError when it cannot be, however many failures are allowed.
        """
        run = self._training_run()
        self._finish_save()
        if run.save_error is not None:
            self._save_checkpoint(model, trial)
            self._finish_save()
            self._announce_save(self.state)
        if run.save_error is not None:
            raise run.save_error

    def _close_saver(self) -> None:
        """However training ends: whatever is under way is finished, and its outcome told. Not collective."""
        saver = self._saver
        if saver is None:
            return
        if saver.is_busy:
            _log.warning("A checkpoint is still being written: waiting for it.")
            try:
                url = saver.finish_without_agreement().url
                self._own_checkpoints.add(url)
                _log.warning("%s is committed.", url)
            except KeyboardInterrupt:
                _log.error("Asked not to wait: the checkpoint that is being written does not count.")
                raise
            except Exception as error:  # the reason why training ends is on its way up, or was told
                _log.error("The checkpoint was not committed; earlier ones are intact: %s", error)
        saver.close()
        self._saver = None

    # -- what a checkpoint holds --------------------------------------------------------------------------------------

    def _snapshot(self, run: TrainingRun, *, best_url: str | None = None) -> Snapshot:
        """All resumable state, in one place; `best_url`: where it goes, when it is the best so far.

        weights (of a model with adapters: all but the frozen base); optimizer, schedule, loss scaler; random number
        generators of every rank; position in the data and the losses since the last log; counters, log history, best
        metric and callbacks' states (trainer_state.json).
        """
        extra: dict[str, torch.Tensor] = {}
        states = collect_callback_states(self._stateful_callbacks())
        self.state.stateful_callbacks = encoded(states, "callbacks", extra if self._disk.rank == 0 else {})
        whole = not self.args.save_only_model or run.stopping  # a stop is to be resumed from
        strategy = self.strategy
        state = models.in_saving_order(self.model, strategy.local_state(self.model_wrapped))
        trained = models.trained_state(self.model, state)
        snapshot = Snapshot(
            step=self.state.global_step,
            model=strategy.checkpoint_tensors(trained),
            optimizer=self._optimizer_snapshot() if whole else None,
            scheduler=self.lr_scheduler.state_dict() if whole and self.lr_scheduler is not None else None,
            scaler=self.precision.scaler_state() if whole else None,
            rng={**capture_rng(), **self._past_state(extra)} if whole else {},
            data=run.position(),
            trainer_state=self.state.to_dict() | ({} if best_url is None else {"best_model_checkpoint": best_url}),
            training_args=self.args.to_dict(),
            files=self._checkpoint_files(trained),
            meta={
                **strategy.describe(),
                "world_size": self.comm.world_size,
                "global_samples": run.samples,
                "precision": self.precision.name,
                "frozen": self._frozen_fingerprint(),
            },
            extra=extra,
        )
        return shard_snapshot(snapshot, self.comm.rank)

    def _past_state(self, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What the model remembers of the last batch, for `past_index`; every rank has its own."""
        if self._past is None:
            return {}
        try:
            return {"past": encoded(self._past, "past", extra)}
        except ConfigError as error:
            _log.warning("The memory that past_index keeps is not saved, a resumed run begins without: %s", error)
            return {}

    def _optimizer_snapshot(self) -> OptimizerSnapshot | None:
        if self.optimizer is None:
            return None
        taken = snapshot_optimizer(self.optimizer, self.strategy.named_parameters(self.model_wrapped))
        return dataclasses.replace(taken, tensors=self.strategy.checkpoint_tensors(taken.tensors))

    def _checkpoint_files(self, trained: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        if models.is_adapted(self.model):
            trained = dict(self.strategy.gathered(trained))
        return self._model_files(trained) if self._disk.rank == 0 else {}

    def _frozen_fingerprint(self) -> str | None:
        """Of the weights that checkpoints of a model with adapters leave out; they do not change. Collective."""
        if self._frozen is None or self._frozen[0] is not self.model:
            state = self.strategy.gathered(self.strategy.local_state(self.model_wrapped))
            self._frozen = self.model, self.comm.broadcast_json(models.frozen_fingerprint(self.model, state))
        return self._frozen[1]

    def _state_size(self) -> int:
        """Bytes of the tensors in a snapshot, on this rank."""
        weights = models.trained_state(self.model, self.strategy.local_state(self.model_wrapped))
        states = {} if self.optimizer is None or self.args.save_only_model else self.optimizer.state
        kept = [each for state in states.values() for each in state.values() if isinstance(each, torch.Tensor)]
        return bytes_to_copy(local_rows(each, rank=self.comm.rank).values for each in (*weights.values(), *kept))

    def _training_run(self) -> TrainingRun:
        if self._run is None:
            raise ConfigError("A checkpoint can only be saved while training.", field="save", remedy="Use save_model.")
        return self._run


def _begun(run: TrainingRun) -> Saving:
    if run.saving is None:
        raise InfrastructureError("No save was begun.")
    return run.saving


def _config_json(config: Any) -> str | None:
    """A model's configuration as JSON: transformers' own text, a mapping, or a dataclass; None for anything else."""
    own: Callable[[], str] | None = getattr(config, "to_json_string", None)
    if callable(own):
        return own()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if isinstance(config, Mapping):
        return json.dumps(dict(config), indent=2, sort_keys=True, default=str) + "\n"
    return None
