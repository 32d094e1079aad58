"""Going on from a checkpoint: which one, and how all of it comes back to where `saving._snapshot` took it from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.checkpoint.catalogue import (
    delete_leftovers,
    find_newest_intact,
    list_checkpoints,
    list_foreign,
    set_aside_damaged,
)
from trainer_lib.checkpoint.layout import DATA, OPTIMIZER, SCALER, SCHEDULER, TRAINER_STATE, rng_file
from trainer_lib.checkpoint.optimizer import restore_optimizer
from trainer_lib.checkpoint.preload import PreloadedCheckpoint
from trainer_lib.checkpoint.reader import Checkpoint, load_checkpoint, open_checkpoint
from trainer_lib.checkpoint.rng import restore_rng
from trainer_lib.commit import COMMIT, withdraw_folder
from trainer_lib.data.loader import TrainSource
from trainer_lib.data.order import derive
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.locks.readers import protect_from_removal
from trainer_lib.sharding import BroadcastTensors, describe_tensors
from trainer_lib.state import ExportableState, TrainerControl, TrainerState
from trainer_lib.storage import Store
from trainer_lib.trainer import batch_change, models
from trainer_lib.trainer.extras import decoded
from trainer_lib.trainer.nodes import newest_common
from trainer_lib.trainer.run import TrainingRun
from trainer_lib.trainer.saving import SavingMixin
from trainer_lib.trainer.seeding import set_seed

_log = logging.getLogger(__name__)
_IMPORT = "`trainflow checkpoints import SOURCE DESTINATION` makes a checkpoint of it that can be resumed."


class ResumingMixin(SavingMixin):
    """Resuming."""

    _ahead: PreloadedCheckpoint | None = None

    # -- which ---------------------------------------------------------------------------------------------------------

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
            url = Store.open(asked, field="resume_from_checkpoint").url.rstrip("/")
            self.comm.agree(self._read_ahead(url))
        else:
            url = self._newest_whole()
        if url is None and asked is True:
            foreign = list_foreign(self._checkpoint_root())
            but = f", but one that another program wrote ({foreign[0]})" if foreign else ""
            remedy = 'Give "auto" to start anew when there is none, or the URL of one.'
            raise ConfigError(
                f"There is no checkpoint in {self._get_output_dir(self._trial)}{but}.",
                field="resume_from_checkpoint",
                value=True,
                remedy=_IMPORT if foreign else remedy,
            )
        return url

    def _newest_whole(self) -> str | None:
        """The newest checkpoint of which every byte is as committed: read, and kept until it is taken up. Collective.

        A damaged one is named and set aside, and the one before it is read, on all ranks together.
        """
        root, damaged = self._checkpoint_root(), list[str]()
        while True:
            if self.args.save_on_each_node:
                url = newest_common(root, self.comm, skip=damaged)
            else:
                url = self.comm.broadcast_json(self._on_main_process(lambda: self._find_checkpoint(damaged)))
            if url is None:
                return None
            damage = self._read_ahead(url)
            name = url.rpartition("/")[2]
            found = self._disk.gather_json(None if damage is None else f"{damage.field}: {damage.message}")
            if not self.comm.any(damage is not None):
                return str(url)
            damaged.append(name)
            if problems := [each.removeprefix(f"{root.child(name).url}/") for each in found or () if each]:
                _log.warning("%s", set_aside_damaged(root, name, list(dict.fromkeys(problems))))

    def _find_checkpoint(self, skip: Collection[str]) -> str | None:
        """By names, sizes and commit files: what the bytes are is seen when they are read."""

        def tell(what: str) -> None:
            _log.warning("%s", what)

        root = self._checkpoint_root()
        # One that holds only a model is better than none: what is asked for can then be said.
        for resumable in (True, False):
            found = find_newest_intact(root, on_damage=tell, digests=False, resumable=resumable, skip=skip)
            if found is not None:
                return found.url
        return None

    def _read_ahead(self, url: str) -> DamagedError | None:
        """Read a checkpoint whole, for `_open_checkpoint`; what is damaged of it on this rank. Collective."""
        parent, _, name = url.rpartition("/")
        root, damage = Store.open(parent or ".", field="resume_from_checkpoint"), list[DamagedError]()
        self._hold_checkpoint(url)

        def read() -> PreloadedCheckpoint | None:
            # Where a forward is one of all ranks together, rank 0 reads whole tensors for all of them.
            alone = self.strategy.forward_communicates
            try:
                loaded = open_checkpoint(root, name, PreloadedCheckpoint)
                loaded.preload(rank=self._disk.rank, tensors=not alone or self.comm.rank == 0)
            except DamagedError as error:
                damage.append(error)
                return None
            return loaded

        self._ahead = run_on_all_ranks(self.comm, read)
        return damage[0] if damage else None

    def _hold_checkpoint(self, url: str) -> None:
        """Let nobody's retention remove a checkpoint until `_release_checkpoint`."""
        self._release_checkpoint()
        if self._disk.rank == 0:
            parent, _, name = url.rstrip("/").rpartition("/")
            root = Store.open(parent or ".", field="resume_from_checkpoint")
            self._held.enter_context(protect_from_removal(root.child(name)))

    def _release_checkpoint(self) -> None:
        self._held.close()

    def _open_checkpoint(self, url: str) -> Checkpoint:
        if self._ahead is not None and self._ahead.url == url.rstrip("/"):
            return self._ahead
        parent, _, name = url.rstrip("/").rpartition("/")
        return load_checkpoint(Store.open(parent or ".", field="resume_from_checkpoint"), name, self.comm)

    # -- the weights ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Raises ConfigError when they belong to another one."""
        loaded, target = self._open_checkpoint(resume_from_checkpoint), model or self.model
        keep: set[str] = set()
        if (frozen := loaded.commit.meta.get("frozen")) is not None:
            self._frozen = None  # what was loaded in between is not known
            if frozen != self._frozen_fingerprint():
                raise ConfigError(
                    "The adapters were trained on other base weights than this model has.",
                    field="resume_from_checkpoint",
                    value=loaded.url,
                    remedy="Put them on the base they were trained on.",
                )
            state = self.strategy.local_state(target)
            keep = state.keys() - models.trained_state(target, state).keys()
        self.strategy.load_model_state(target, self._read(loaded, loaded.read_model), keep=keep)

    def _read(self, loaded: Checkpoint, read: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """A checkpoint's tensors. Where parameters are divided, rank 0 reads whole ones for all. Collective."""
        if loaded.is_sharded or not self.strategy.forward_communicates:
            return read()
        own = run_on_all_ranks(self.comm, lambda: read() if self.comm.rank == 0 else {})
        return BroadcastTensors(own, self.comm.broadcast_json(describe_tensors(own)), self.comm.rank)

    def _load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model."""
        best = self.state.best_model_checkpoint
        if best is None:
            _log.warning("No evaluation was better than any other: the model keeps its last weights.")
            return
        here = self._checkpoint_root().child(best.rsplit("/", 1)[-1])
        best = here.url if here.exists(COMMIT) else best  # the run's folder may have moved since
        _log.info("Loading the best model, %s (%s).", best, self.state.best_metric)
        self._hold_checkpoint(best)
        self._load_from_checkpoint(best, self.model)
        self.comm.barrier()  # the others read as well
        self._release_checkpoint()

    # -- everything else -----------------------------------------------------------------------------------------------

    def _resume(self, run: TrainingRun, loaded: Checkpoint) -> TrainerState:
        """Everything but the weights and the random numbers; returns the saved state."""
        if not loaded.has_optimizer or loaded.scheduler is None:
            raise ConfigError(
                "holds only a model (save_only_model), which cannot be resumed.",
                field="resume_from_checkpoint",
                value=loaded.url,
                remedy="Load its weights and start anew, or resume from a whole checkpoint.",
            )
        saved = TrainerState.from_dict(loaded.trainer_state)
        snapshot = loaded.read_optimizer(lambda read: self._read(loaded, read))
        if self.optimizer is not None and snapshot is not None:
            with loaded.treat_errors_as_damage(OPTIMIZER):
                restore_optimizer(self.optimizer, self.strategy.named_parameters(self.model_wrapped), snapshot)
        if self.lr_scheduler is not None:
            with loaded.treat_errors_as_damage(SCHEDULER):
                self.lr_scheduler.load_state_dict(loaded.scheduler)
        with loaded.treat_errors_as_damage(SCALER):
            self.precision.load_scaler_state(loaded.scaler)
        with loaded.treat_errors_as_damage(DATA):
            run.load_position(loaded.data, from_position=not self.args.ignore_data_skip)
        run.saved_step = run.first_step = saved.global_step
        run.first_tokens = saved.num_input_tokens_seen
        self._warn_of_changes(loaded)
        return saved

    def _accept_batch(self, loaded: Checkpoint, source: TrainSource, max_steps: int) -> int:
        """The steps to do in all. Raises ConfigError for a global batch that changed without being allowed to."""
        if self.args.ignore_data_skip or batch_change.saved_batch(loaded.data, source) is None:
            return max_steps
        if not self.args.allow_global_batch_change:
            raise batch_change.refusal(loaded, source, self.args, self.comm.data_parallel.size)
        max_steps = batch_change.total_steps(loaded, source, self.args, max_steps)
        if self.is_world_process_zero():
            _log.warning("%s", batch_change.consequence(loaded, source, max_steps))
        return max_steps

    def _warn_of_changes(self, loaded: Checkpoint) -> None:
        now, then = self.args.to_dict(), loaded.training_args
        if not self.is_world_process_zero():
            return
        for name in sorted(now.keys() & then.keys()):
            if now[name] != then[name] and name not in ("output_dir", "logging_dir", "resume_from_checkpoint"):
                _log.warning("%s was %r when the checkpoint was written, and is %r now.", name, then[name], now[name])

    def _restore_random_numbers(self, loaded: Checkpoint) -> None:
        """This rank's generators; a rank the saved run did not have is seeded from (seed, step, rank)."""
        if loaded.has_rng(self._disk.rank):
            state = loaded.read_rng(self._disk.rank)
            restore_rng(state)
            self._restore_past(loaded, state.get("past"))
            return
        self._part_random_numbers()
        _log.warning("The checkpoint has no random state for this rank: dropout differs from an uninterrupted run.")

    def _restore_past(self, loaded: Checkpoint, past: Any) -> None:
        if past is None:
            return
        if (loaded.world_size, loaded.trainer_state.get("train_batch_size")) != (
            self._disk.world_size,
            self._train_batch_size,
        ):
            _log.warning("What the model remembers (past_index) was of other batches: it begins without.")
            return
        with loaded.treat_errors_as_damage(rng_file(self._disk.rank)):
            self._training_run().past = decoded(past, loaded.read_extra(self._disk.rank), self.device)

    def _part_random_numbers(self) -> None:
        """Let every rank but the first draw its own: equal dropout masks on all ranks would be half the noise."""
        share = self.comm.data_parallel.rank
        if share > 0:
            set_seed(int(derive(self.args.seed, self.state.global_step, share)[0]) & 0xFFFFFFFF)

    def _restore_callbacks(self, loaded: Checkpoint) -> TrainerControl:
        """Give stateful callbacks their state back (by class, in order); the saved control.

        With `restore_callback_states_from_checkpoint` the constructor's arguments are restored too: the callback is
        replaced. A saved one that is absent now is warned of.
        """
        control = TrainerControl()
        handler = self.callback_handler
        with loaded.treat_errors_as_damage(TRAINER_STATE):
            saved = TrainerState.from_dict(loaded.trainer_state).stateful_callbacks or {}
            every: dict[str, Any] = decoded(saved, loaded.read_extra(0), self.device)
        for name, states in every.items():
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
            if attribute.startswith("__") or callable(getattr(type(callback), attribute, None)):
                raise DamagedError(
                    "is no part of a callback's state.",
                    field=f"trainer_state.json: {type(callback).__name__}",
                    value=attribute,
                    remedy="The checkpoint was made by something else: resume from another.",
                )
            setattr(callback, attribute, value)

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _claim_output_dir(self, resumed_from: str | None) -> None:
        """Refuse to mix a new run's checkpoints with an earlier run's, whose newest a later resume would take.

        What interrupted saves left is removed.
        """

        def claim() -> None:
            root = self._checkpoint_root()
            self._spare_foreign(root)
            if resumed_from is None:
                self._clear_earlier_run(root)
            delete_leftovers(root)

        self._on_main_process(claim)

    def _spare_foreign(self, root: Store) -> None:
        """A checkpoint of ours would take the place of another program's of the same step."""
        foreign = list_foreign(root)
        if foreign and self.args.save_strategy != "no" and not self.args.overwrite_output_dir:
            raise ConfigError(
                f"holds checkpoints that another program wrote ({foreign[0]}).",
                field="output_dir",
                value=root.url,
                remedy=f"Choose another. {_IMPORT}",
            )

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
            withdraw_folder(root.child(info.name))
