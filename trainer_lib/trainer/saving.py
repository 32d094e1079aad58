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

from trainer_lib.checkpoint.catalogue import rotate
from trainer_lib.checkpoint.collective import together
from trainer_lib.checkpoint.optimizer import snapshot_optimizer
from trainer_lib.checkpoint.rng import capture_rng
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.checkpoint.writer import Snapshot, save_checkpoint
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.state import callback_states
from trainer_lib.storage import Store
from trainer_lib.trainer import models
from trainer_lib.trainer.reporting import ReportingMixin
from trainer_lib.trainer.run import TrainingRun

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
        state = dict(self.strategy.model_state(self.model_wrapped))
        self._on_main_process(lambda: self._save(output_dir, state_dict=state))

    def _on_main_process(self, work: Callable[[], T]) -> T | None:
        """`work()` on rank 0 (of each machine with `save_on_each_node`); what it raises is raised on every rank."""
        return together(self.comm, lambda: work() if self._disk.rank == 0 else None)

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
        """Commit a checkpoint of this step, then remove those beyond `save_total_limit`. Collective.

        The best and the newest are never removed. Raises StorageError (on every rank) when it cannot be written.
        """
        run = self._training_run()
        root, name = self._checkpoint_root(), f"{PREFIX}-{self.state.global_step}"
        if run.saved_step == self.state.global_step:
            return  # resumed from it, with an evaluation still to do: its weights are these
        run.history.collect(self.state.global_step)
        self.store_flos()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = root.child(name).url
        save_checkpoint(root, self._snapshot(run), self._disk)
        run.saved_step = self.state.global_step
        self._own_checkpoints.add(root.child(name).url)
        self._rotate_checkpoints(root)

    def _rotate_checkpoints(self, root: Store) -> None:
        if self.args.save_total_limit is None or self._disk.rank != 0:
            return
        best = self.state.best_model_checkpoint
        protected = {best.rsplit("/", 1)[-1]} if best else set()
        try:
            rotate(root, keep=self.args.save_total_limit, protect={*protected, *self._being_pushed})
        except StorageError as error:  # one checkpoint too many is no reason to stop
            _log.warning("An old checkpoint could not be removed: %s", error)

    def _snapshot(self, run: TrainingRun) -> Snapshot:
        """All resumable state, in one place.

        weights (of a model with adapters: all but the frozen base); optimizer, schedule, loss scaler; random number
        generators of every rank; position in the data and the losses since the last log; counters, log history, best
        metric and callbacks' states (trainer_state.json).
        """
        self.state.stateful_callbacks = callback_states(self._stateful_callbacks())
        whole = not self.args.save_only_model
        optimizer = self.optimizer if whole else None
        named = dict(self.model.named_parameters())
        state = models.in_saving_order(self.model, self.strategy.model_state(self.model_wrapped))
        return Snapshot(
            step=self.state.global_step,
            model=models.trained_state(self.model, state),
            optimizer=snapshot_optimizer(optimizer, named) if optimizer is not None else None,
            scheduler=self.lr_scheduler.state_dict() if whole and self.lr_scheduler is not None else None,
            scaler=self.precision.scaler_state() if whole else None,
            rng=capture_rng() if whole else {},
            data=run.position(),
            trainer_state=self.state.to_dict(),
            training_args=self.args.to_dict(),
            files=self._model_files(state) if self._disk.rank == 0 else {},
            meta={
                **self.strategy.describe(),
                "world_size": self.comm.world_size,
                "global_samples": run.samples,
                "precision": self.precision.name,
                "frozen": models.frozen_fingerprint(self.model, state),
            },
        )

    def _training_run(self) -> TrainingRun:
        if self._run is None:
            raise ConfigError("A checkpoint can only be saved while training.", field="save", remedy="Use save_model.")
        return self._run


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
