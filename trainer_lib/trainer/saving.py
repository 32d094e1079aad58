"""Saving and loading: checkpoints, the exported model. What a checkpoint holds is listed in `_snapshot`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.checkpoint.catalogue import clean_leftovers, list_checkpoints, newest_good, rotate
from trainer_lib.checkpoint.collective import together
from trainer_lib.checkpoint.optimizer import restore_optimizer, snapshot_optimizer
from trainer_lib.checkpoint.reader import Loaded, load_checkpoint
from trainer_lib.checkpoint.rng import capture_rng, restore_rng
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.checkpoint.writer import Snapshot, save_checkpoint
from trainer_lib.data.order import derive
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.manifest import COMMIT, withdraw
from trainer_lib.state import ExportableState, TrainerControl, TrainerState, callback_states
from trainer_lib.storage import Store
from trainer_lib.trainer import models
from trainer_lib.trainer.nodes import newest_common
from trainer_lib.trainer.reporting import ReportingMixin
from trainer_lib.trainer.run import TrainingRun
from trainer_lib.trainer.seeding import set_seed

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

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The URL of the checkpoint to go on from; None for a new start. The same on every rank.

        `asked`: True = the newest good one in output_dir, ConfigError if there is none; "auto" = that, or a new start;
        a URL = that one.
        """
        asked = self.args.resume_from_checkpoint if asked is None else asked
        if not asked:
            return None
        url: str | None
        if isinstance(asked, str) and asked != "auto":
            url = Store.open(asked, field="resume_from_checkpoint").url
        elif self.args.save_on_each_node:
            url = newest_common(self._checkpoint_root(), self.comm)
        else:
            url = self.comm.broadcast_json(self._on_main_process(self._find_checkpoint))
        if url is None and asked is True:
            raise ConfigError(
                f"There is no checkpoint in {self._get_output_dir(self._trial)}.",
                field="resume_from_checkpoint",
                value=True,
                remedy='Give "auto" to start anew when there is none, or the URL of one.',
            )
        return url

    def _find_checkpoint(self) -> str | None:
        newest = newest_good(self._checkpoint_root(), on_damage=lambda what: _log.warning("%s", what))
        return None if newest is None else newest.url

    def _open_checkpoint(self, url: str) -> Loaded:
        parent, _, name = url.rstrip("/").rpartition("/")
        return load_checkpoint(Store.open(parent or ".", field="resume_from_checkpoint"), name, self.comm)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Raises ConfigError when they belong to another one."""
        loaded, target = self._open_checkpoint(resume_from_checkpoint), model or self.model
        state = loaded.model()
        if (frozen := loaded.commit.meta.get("frozen")) is not None:
            present = self.strategy.model_state(target)
            if frozen != models.frozen_fingerprint(target, present):
                raise ConfigError(
                    "The adapters were trained on other base weights than this model has.",
                    field="resume_from_checkpoint",
                    value=loaded.url,
                    remedy="Put them on the base they were trained on.",
                )
            state = {**present, **state}
        self.strategy.load_model_state(target, state)

    def _load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model."""
        best = self.state.best_model_checkpoint
        if best is None:
            _log.warning("No evaluation was better than any other: the model keeps its last weights.")
            return
        here = self._checkpoint_root().child(best.rsplit("/", 1)[-1])
        best = here.url if here.exists(COMMIT) else best  # the run's folder may have moved since
        _log.info("Loading the best model, %s (%s).", best, self.state.best_metric)
        self._load_from_checkpoint(best, self.model)

    def _resume(self, run: TrainingRun, loaded: Loaded) -> TrainerState:
        """Everything but the weights and the random numbers; returns the saved state."""
        if not loaded.has_optimizer or loaded.scheduler is None:
            raise ConfigError(
                "holds only a model (save_only_model), which cannot be resumed.",
                field="resume_from_checkpoint",
                value=loaded.url,
                remedy="Load its weights and start anew, or resume from a whole checkpoint.",
            )
        saved = TrainerState.from_dict(loaded.trainer_state)
        snapshot = loaded.optimizer()
        if self.optimizer is not None and snapshot is not None:
            restore_optimizer(self.optimizer, dict(self.model.named_parameters()), snapshot)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded.scheduler)
        self.precision.load_scaler_state(loaded.scaler)
        run.load_position(loaded.data, from_position=not self.args.ignore_data_skip)
        run.saved_step = run.first_step = saved.global_step
        run.first_tokens = saved.num_input_tokens_seen
        self._warn_of_changes(loaded)
        return saved

    def _warn_of_changes(self, loaded: Loaded) -> None:
        now, then = self.args.to_dict(), loaded.training_args
        if not self.is_world_process_zero():
            return
        for name in sorted(now.keys() & then.keys()):
            if now[name] != then[name] and name not in ("output_dir", "logging_dir", "resume_from_checkpoint"):
                _log.warning("%s was %r when the checkpoint was written, and is %r now.", name, then[name], now[name])

    def _restore_random_numbers(self, loaded: Loaded) -> None:
        """This rank's generators; a rank the saved run did not have is seeded from (seed, step, rank)."""
        if self._disk.rank < int(loaded.commit.meta.get("world_size", 1)):
            restore_rng(loaded.rng(self._disk.rank))
            return
        self._part_random_numbers()
        _log.warning("The checkpoint has no random state for this rank: dropout differs from an uninterrupted run.")

    def _part_random_numbers(self) -> None:
        """Let every rank but the first draw its own: equal dropout masks on all ranks would be half the noise."""
        if self.comm.rank > 0:
            set_seed(int(derive(self.args.seed, self.state.global_step, self.comm.rank)[0]) & 0xFFFFFFFF)

    def _restore_callbacks(self, saved: TrainerState) -> TrainerControl:
        """Give stateful callbacks their state back (by class, in order); the saved control.

        With `restore_callback_states_from_checkpoint` the constructor's arguments are restored too: the callback is
        replaced. A saved one that is absent now is warned of.
        """
        control = TrainerControl()
        handler = self.callback_handler
        for name, states in dict(saved.stateful_callbacks or {}).items():
            listed = states if isinstance(states, list) else [states]
            if name == TrainerControl.__name__:
                control = TrainerControl.from_state(listed[0])
                continue
            present = [each for each in handler.callbacks if type(each).__name__ == name]
            for index, state in enumerate(listed):
                if index >= len(present) or not isinstance(present[index], ExportableState):
                    _log.warning("The checkpoint has the state of a %s, which is not among the callbacks.", name)
                    continue
                self._restore_callback(present[index], state)
        return control

    def _restore_callback(self, callback: TrainerCallback, state: Mapping[str, Any]) -> None:
        if self.args.restore_callback_states_from_checkpoint and isinstance(callback, ExportableState):
            callbacks = self.callback_handler.callbacks
            replacement: Any = type(callback).from_state(state)
            callbacks[callbacks.index(callback)] = replacement
            return
        for attribute, value in state.get("attributes", {}).items():
            setattr(callback, attribute, value)

    def _claim_output_dir(self, resumed_from: str | None) -> None:
        """Refuse to mix a new run's checkpoints with an earlier run's, whose newest a later resume would take.

        What interrupted saves left is removed.
        """

        def claim() -> None:
            root = self._checkpoint_root()
            if resumed_from is None:
                self._clear_earlier_run(root)
            clean_leftovers(root)

        self._on_main_process(claim)

    def _clear_earlier_run(self, root: Store) -> None:
        present = list_checkpoints(root)
        foreign = [info.name for info in present if root.child(info.name).url not in self._own_checkpoints]
        if foreign and not self.args.overwrite_output_dir:
            raise ConfigError(
                f"holds checkpoints of an earlier run ({foreign[0]} is the newest).",
                field="output_dir",
                value=root.url,
                remedy='Resume (resume_from_checkpoint="auto"), set overwrite_output_dir=True, or choose another.',
            )
        for info in present:
            withdraw(root.child(info.name))

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
