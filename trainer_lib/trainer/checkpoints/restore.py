"""`Restore`: resuming. Which checkpoint, and how its state returns to where `Snapshots.take` collected it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_lib.arguments.configs.parallelism_config import Grid
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.checkpoint.catalogue import (
    IMPORT,
    find_newest_intact,
    list_checkpoints,
    list_foreign,
    set_aside_damaged,
)
from trainer_lib.checkpoint.layout import DATA, OPTIMIZER, SCHEDULER, TRAINER_STATE, rng_file
from trainer_lib.checkpoint.optimizer import restore_optimizer
from trainer_lib.checkpoint.reader import Checkpoint, load_checkpoint, open_checkpoint
from trainer_lib.checkpoint.values import restore_rng
from trainer_lib.data.loading.loader import TrainSource
from trainer_lib.data.loading.order import derive
from trainer_lib.distributed.communicator import run_on_all_ranks
from trainer_lib.distributed.sharding import BroadcastTensors, describe_tensors
from trainer_lib.errors import ConfigError, DamagedError, NewerVersionError, TrainflowError
from trainer_lib.locks.removal import protect_from_removal
from trainer_lib.state import TrainerControl, TrainerState, has_exportable_state
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT
from trainer_lib.trainer.checkpoints.snapshots import decoded
from trainer_lib.trainer.model import models
from trainer_lib.trainer.model.seeding import part_seeds, restore_seeds, set_seed
from trainer_lib.trainer.overrides import takes_positionals
from trainer_lib.trainer.run import position_in, saved_batch
from trainer_lib.trainer.world import newest_common

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.run import TrainingRun
    from trainer_lib.trainer.trainer import Trainer


@contextlib.contextmanager
def keep_hyperparameters(optimizer: Optimizer | None, schedule: Any, rate: float, rate_then: Any) -> Iterator[None]:
    """Inside, another training's optimizer and schedule are restored; afterwards their settings are those of now.

    The learning rate is where the restored schedule is, from `rate`, that of the arguments; `rate_then`: that of the
    other training's.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    present = [{name: _copied(value) for name, value in group.items() if name != "params"} for group in groups]
    bases = list(getattr(schedule, "base_lrs", ()))
    yield
    groups = [] if optimizer is None else optimizer.param_groups  # a restored optimizer has new ones
    for group, settings in zip(groups, present, strict=True):
        # A schedule keeps the rate that it multiplies next to the one that it sets.
        then, now = group.get("initial_lr"), settings.get("initial_lr")
        if then is None or now is None:
            then, now = rate_then, rate
        reached = float(group["lr"])
        group.update(settings)
        scaled = reached * float(now) / float(then) if then else float(now)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
    if bases:
        schedule.base_lrs = bases
    if hasattr(schedule, "_last_lr"):
        schedule._last_lr = [_copied(group["lr"]) for group in groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _placed_like(present: Any, saved: Any) -> Any:
    """The saved state of a schedule, its 0-dim tensors copied to the devices of those that it has at present."""
    if isinstance(saved, torch.Tensor):
        return saved.to(present.device if isinstance(present, torch.Tensor) else "cpu", copy=True)
    if isinstance(saved, dict) and isinstance(present, dict):
        return {key: _placed_like(present.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        return [_placed_like(*pair) for pair in zip(present, saved, strict=True)]
    return saved


_log = logging.getLogger(__name__)
_FIELD = "resume_from_checkpoint"


class Restore:
    """Finds, protects, reads and restores checkpoints."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._held = contextlib.ExitStack()
        self._preloaded: Checkpoint | None = None
        self._asked: str | None = None
        self._is_automatic = False

    # -- which checkpoint ---------------------------------------------------------------------------------------------

    def find(self, given: str | bool | None) -> str | None:
        """The URL of the checkpoint to resume from, equal on every rank; None for a new start. Raises ConfigError.

        `given` is as `Trainer.train` documents it.
        """
        trainer, self._asked = self._trainer, None
        given = trainer.args.resume_from_checkpoint if given is None else given
        self._is_automatic = given == "auto"
        if not given:
            return None
        url: str | None
        if isinstance(given, str) and given != "auto":
            url = Store.open(given, field=_FIELD).url.rstrip("/")
            self._internals.world.comm.agree(self._preload(url))
        else:
            url = self._newest_intact()
            if url is None and given == "auto" and (url := self._internals.trials.origin) is not None:
                self._internals.world.comm.agree(self._preload(url))
        self._asked = url
        if url is None and given is True:
            foreign = list_foreign(self._internals.checkpoints.root())
            but = f", but one that another program wrote ({foreign[0]})" if foreign else ""
            remedy = 'Give "auto" to start from the beginning when there is none, or the URL of one.'
            what = f"No checkpoint is in {trainer._get_output_dir(trainer._trial)}{but}."
            raise ConfigError(what, field=_FIELD, value=True, remedy=IMPORT if foreign else remedy)
        return url

    def newest_good(self, step: int) -> str | None:
        """The newest intact checkpoint of this run up to `step`, for a rollback; None without any. Collective."""
        checkpoints = self._internals.checkpoints
        known = checkpoints.occupied.names
        return self._newest_intact(
            [i.name for i in list_checkpoints(checkpoints.root()) if i.step > step or i.name in known]
        )

    def _newest_intact(self, leave: Collection[str] = ()) -> str | None:
        """The newest checkpoint whose every byte is as committed, in memory until `open`, but for those in `leave`.

        Collective. A damaged checkpoint is logged and set aside, and all ranks read the one before it.
        """
        root, damaged, world = self._internals.checkpoints.root(), list(leave), self._internals.world
        while True:
            if self._trainer.args.save_on_each_node:
                url = newest_common(root, world.comm, skip=damaged)
            else:
                found = world.run_on_main_process(lambda: _newest_by_name(root, damaged))
                url = world.comm.broadcast_json(found)
            if url is None:
                return None
            damage = self._preload(url)
            name = url.rpartition("/")[2]
            reports = world.save_group.gather_json(None if damage is None else f"{damage.field}: {damage.message}")
            if not world.comm.any(damage is not None):
                return str(url)
            damaged.append(name)
            if problems := [report.removeprefix(f"{root.child(name).url}/") for report in reports or () if report]:
                _log.warning("%s", set_aside_damaged(root, name, list(dict.fromkeys(problems))))

    def _preload(self, url: str, *, weights: bool = False) -> TrainflowError | None:
        """Read a whole checkpoint for `open`, or its weights alone; the damage that this rank found. Collective."""
        parent, _, name = url.rpartition("/")
        root, damage = Store.open(parent or ".", field=_FIELD), list[TrainflowError]()
        kinds = (DamagedError, ConfigError) if weights else (DamagedError,)
        world, strategy = self._internals.world, self._internals.engine.strategy
        self.hold(url)  # before the first read: another process may rotate checkpoints

        def read() -> Checkpoint | None:
            # Where ranks compute a forward together, rank 0 reads whole tensors for all of them, one by one.
            alone = strategy.forward_communicates
            try:
                loaded = open_checkpoint(root, name)
                loaded.reads_singly = alone
                tensors = not alone or world.comm.rank == 0
                loaded.preload(rank=world.save_group.rank, tensors=tensors, weights=weights)
            except NewerVersionError:
                raise
            except kinds as error:
                damage.append(error)
                return None
            return loaded

        self._preloaded = run_on_all_ranks(world.comm, read)
        return damage[0] if damage else None

    def hold(self, url: str) -> None:
        """Protect a checkpoint from rotation, by this and other processes, until `release`."""
        self.release()
        if self._internals.world.save_group.rank == 0:
            parent, _, name = url.rstrip("/").rpartition("/")
            self._held.enter_context(protect_from_removal(Store.open(parent or ".", field=_FIELD).child(name)))

    def release(self) -> None:
        """End the protection of `hold`."""
        self._held.close()

    def open(self, url: str) -> Checkpoint:
        """The checkpoint at this URL; Raises DamagedError when its files are not as committed."""
        if self._preloaded is not None and self._preloaded.url == url.rstrip("/"):
            return self._preloaded
        parent, _, name = url.rstrip("/").rpartition("/")
        loaded = load_checkpoint(Store.open(parent or ".", field=_FIELD), name, self._internals.world.comm)
        loaded.reads_singly = self._internals.engine.strategy.forward_communicates
        return loaded

    # -- the weights --------------------------------------------------------------------------------------------------

    def load_model(self, url: str) -> None:
        """Load a checkpoint's weights through the Trainer's method, which may be an override without `model`."""
        trainer = self._trainer
        model = (trainer.model,) if takes_positionals(trainer._load_from_checkpoint, 2) else ()
        trainer._load_from_checkpoint(url, *model)

    def load_weights(self, url: str, model: nn.Module | None) -> None:
        """Load a checkpoint's weights into the model. Raises ConfigError when they belong to another one."""
        loaded, target = self.open(url), model or self._trainer.model
        strategy, snapshots = self._internals.engine.strategy, self._internals.snapshots
        keep: set[str] = set()
        if (frozen := loaded.commit.meta.get("frozen")) is not None:
            if frozen != snapshots.frozen_fingerprint(again=True):
                what = "The adapters were trained on other base weights than this model has."
                remedy = "Put them on the base they were trained on."
                raise ConfigError(what, field=_FIELD, value=loaded.url, remedy=remedy)
            state = strategy.local_state(target)
            keep = state.keys() - models.trained_state(target, state).keys()
        # `keep`: the frozen base, which the checkpoint leaves out by design.
        strategy.load_model_state(target, self._read(loaded, loaded.read_model), keep=keep)

    def _read(self, loaded: Checkpoint, read: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """A checkpoint's tensors; where parameters are sharded, rank 0 reads whole tensors for all. Collective."""
        comm = self._internals.world.comm
        if loaded.is_sharded or not self._internals.engine.strategy.forward_communicates:
            return read()
        own = run_on_all_ranks(comm, lambda: read() if comm.rank == 0 else {})
        return BroadcastTensors(own, comm.broadcast_json(describe_tensors(own)), comm.rank)

    def load_best(self) -> None:
        """Load the weights of the best checkpoint; the model keeps its last ones where it is gone. Collective."""
        state = self._trainer.state
        best = state.best_model_checkpoint
        if best is None:
            _log.warning("No evaluation was better than any other: the model keeps its last weights.")
            return
        here = self._internals.checkpoints.root().child(best.rsplit("/", 1)[-1])
        best = here.url if here.exists(COMMIT) else best  # the run's folder may have moved since
        problem = self._preload(best, weights=True)
        if self._internals.world.comm.any(problem is not None):
            # The training is done: its last weights are worth more than an error.
            why = "Another rank cannot read it." if problem is None else f"{problem.field}: {problem.message}"
            what = f"The best checkpoint, {best} ({state.best_metric}), cannot be loaded: {why}"
            _log.warning("%s The model keeps its last weights.", what)
            state.best_model_checkpoint = None
        else:
            _log.info("Loading the best model, %s (%s).", best, state.best_metric)
            self.load_model(best)
        self._preloaded = None
        self._internals.world.comm.barrier()  # the other ranks read as well
        self.release()

    # -- everything else ----------------------------------------------------------------------------------------------

    def load_state(self, run: TrainingRun, loaded: Checkpoint) -> TrainerState:
        """Restore all but weights, random numbers and callbacks; returns the saved state of the Trainer."""
        trainer = self._trainer
        saved = TrainerState.from_dict(loaded.trainer_state)
        if not loaded.has_optimizer or loaded.scheduler is None:
            if self._is_automatic:
                what = (
                    "The checkpoint holds only a model (save_only_model), so a resumed run would differ from a whole "
                    "one."
                )
                remedy = "Give True or its URL to resume with a new optimizer, or resume from a whole checkpoint."
                raise ConfigError(what, field=_FIELD, value=loaded.url, remedy=remedy)
            _log.warning(
                "%s holds only a model (save_only_model): optimizer, loss scale and random numbers begin again at step "
                "%d.",
                *(loaded.url, saved.global_step),
            )
            self._internals.engine.advance_schedule(saved.global_step)
        if self._internals.engine.outside.named:
            self._internals.engine.outside.load(loaded.read_extra(0), loaded.url)
        trainer._load_optimizer_and_scheduler(loaded.url)
        trainer._load_scaler(loaded.url)
        # A return of the Trainer's own is to the position: only a resume that was asked for may leave it.
        from_position = not trainer.args.ignore_data_skip or loaded.url != self._asked
        with loaded.treat_errors_as_damage(DATA):
            run.load_position(loaded.data, from_position=from_position)
            run.rollback_step = int(loaded.data.get("rollback_step", saved.global_step))
        run.saved_step = run.first_step = saved.global_step  # `saved_step`: this step needs no second save
        run.first_tokens = saved.num_input_tokens_seen
        now, then = trainer.args.to_dict(), loaded.training_args
        for name in sorted(now.keys() & then.keys()) if trainer.is_world_process_zero() else ():
            # Where a run lies, and where it resumes from, does not change what it computes.
            if now[name] != then[name] and name not in ("output_dir", "logging_dir", "resume_from_checkpoint"):
                _log.warning("%s was %r when the checkpoint was written, and is %r now.", name, then[name], now[name])
        return saved

    def load_optimizer(self, url: str) -> None:
        """Restore optimizer and schedule; `Trainer._load_optimizer_and_scheduler` documents it."""
        trainer, loaded = self._trainer, self.open(url)
        snapshot = loaded.read_optimizer(lambda read: self._read(loaded, read))
        if trainer.optimizer is not None and snapshot is not None:
            now, then = self._internals.engine.optimizer_classes(), loaded.commit.meta.get("optimizer")
            if then is None and snapshot.groups:  # imported: other settings tell most classes apart
                known = trainer.optimizer.param_groups[0].keys()
                others = sorted(snapshot.groups[0].keys() - known - {"initial_lr", "param_names"})
                then = [f"an optimizer with {', '.join(others)}"] if others else None
            if now and then and not {*now} & {*then}:  # no base in common
                what = f"The checkpoint holds the state of {then[0]}."
                remedy = f"Resume with {then[0]}; an empty override of _load_optimizer_and_scheduler begins a new one."
                raise ConfigError(what, field="optimizer", value=now[0], remedy=remedy)
        rates = trainer.args.learning_rate, loaded.training_args.get("learning_rate")
        keeps = loaded.url == self._internals.trials.origin
        kept = keep_hyperparameters(trainer.optimizer, trainer.lr_scheduler, *rates)
        with kept if keeps else contextlib.nullcontext():
            if trainer.optimizer is not None and snapshot is not None:
                with loaded.treat_errors_as_damage(OPTIMIZER):
                    restore_optimizer(trainer.optimizer, self._internals.engine.named_parameters(), snapshot)
            if trainer.lr_scheduler is not None and loaded.scheduler is not None:
                with loaded.treat_errors_as_damage(SCHEDULER):
                    state = trainer.lr_scheduler.state_dict()
                    trainer.lr_scheduler.load_state_dict(_placed_like(state, loaded.scheduler))

    def accept_batch(self, loaded: Checkpoint, source: TrainSource, max_steps: int) -> int:
        """The optimizer steps to do in all, after a change of the global batch if there is one. Raises ConfigError."""
        args, saved, batch = self._trainer.args, saved_batch(loaded.data, source), source.global_batch
        if args.ignore_data_skip or saved is None:
            return max_steps
        if not args.allow_global_batch_change:
            shares = self._internals.world.comm.data_parallel.size
            then, now = _made_of(loaded.training_args, loaded.world_size), _made_of(args.to_dict(), shares)
            raise ConfigError(
                f"The global batch was {saved} when the checkpoint was written ({then}) "
                f"and is {batch} now ({now}), so its position in the data does not fit.",
                field="global_batch_size",
                value=batch,
                remedy="Restore it (for a change of processes: set global_batch_size to the old product), start from "
                "the beginning, or set allow_global_batch_change=True.",
            )
        epoch, (steps, again) = int(loaded.data["epoch"]), position_in(loaded.data, source)
        # max_steps counts optimizer steps, whatever their batch.
        if args.max_steps <= 0 and source.steps_per_epoch is not None:
            done = epoch * source.steps_per_epoch + steps
            max_steps = loaded.step + max(0, math.ceil(args.num_train_epochs * source.steps_per_epoch) - done)
        if self._trainer.is_world_process_zero():
            _log.warning(
                "The global batch was %d when the checkpoint was written and is %d now: training goes on at sample %d "
                "of epoch %d%s, and it and its schedule end at step %d.",
                *(saved, batch, steps * batch, epoch),
                f" ({again} samples before it are trained on a second time)" if again else "",
                max_steps,
            )
        return max_steps

    def load_random_numbers(self, url: str) -> None:
        """Restore this rank's generators; a rank that the saved run did not have is seeded from (seed, step, rank)."""
        loaded, run, world = self.open(url), self._internals.run, self._internals.world
        rank, layout = world.save_group.rank, loaded.commit.meta.get("layout")
        if world.save_group is world.comm:  # then a rank that had the same share of the data
            with loaded.treat_errors_as_damage(COMMIT):
                saved = Grid({"replicate": loaded.world_size} if layout is None else dict(layout))
                rank = world.comm.data_parallel.rank * (saved.size // saved.data_size)
        if loaded.has_rng(rank):
            state = loaded.read_rng(rank)
            restore_rng(state)
            restore_seeds(self._trainer.model, state.get("seeds", {}))
            if run is not None:
                self._load_past(run, loaded, state.get("past"))
            return
        self.part_random_numbers()
        _log.warning("The checkpoint has no random state for this rank: dropout differs from an uninterrupted run.")

    def finish(self, loaded: Checkpoint) -> None:
        """Restore the random numbers, last of all, and end the checkpoint's protection. Collective."""
        self._trainer._load_rng_state(loaded.url)
        self._internals.world.comm.barrier()  # every rank has read what it needs
        self.release()

    def part_random_numbers(self) -> None:
        """Let every rank but the first draw its own numbers: equal dropout masks on all ranks are half the noise."""
        share = self._internals.world.comm.data_parallel.rank
        if share > 0:
            numbers = (self._trainer.args.seed, self._trainer.state.global_step, share)
            set_seed(int(derive(*numbers)[0]) & 0xFFFFFFFF)
            part_seeds(self._trainer.model, *numbers)

    def _load_past(self, run: TrainingRun, loaded: Checkpoint, past: Any) -> None:
        """Restore what the model remembers (`past_index`), if the batches have the size they had."""
        if past is None:
            return
        world = self._internals.world
        saved = (loaded.world_size, loaded.trainer_state.get("train_batch_size"))
        if saved != (world.save_group.world_size, self._trainer._train_batch_size):
            _log.warning("The memory of past_index belongs to batches of another size: training starts without it.")
            return
        with loaded.treat_errors_as_damage(rng_file(world.save_group.rank)):
            run.restored_past = decoded(past, loaded.read_extra(world.save_group.rank), world.device)

    def load_callbacks(self, loaded: Checkpoint) -> TrainerControl:
        """Give stateful callbacks their state back, by class and in order; returns the saved control.

        With `restore_callback_states_from_checkpoint` a callback is replaced by one with the saved constructor
        arguments. A saved callback that is missing now is logged.
        """
        control, handler = TrainerControl(), self._trainer.callback_handler
        with loaded.treat_errors_as_damage(TRAINER_STATE):
            saved = TrainerState.from_dict(loaded.trainer_state).stateful_callbacks or {}
            tensors = loaded.read_extra(0)  # callbacks are equal on all ranks: rank 0 saved them
            every: dict[str, Any] = decoded(saved, tensors, self._internals.world.device)
        for name, states in every.items():
            listed = states if isinstance(states, list) else [states]
            if name == TrainerControl.__name__:
                control = TrainerControl.from_state(listed[0])
                continue
            present = [callback for callback in handler.callbacks if type(callback).__name__ == name]
            for index, state in enumerate(listed):
                if index >= len(present) or not has_exportable_state(present[index]):
                    _log.warning("The checkpoint has the state of a %s, which is not among the callbacks.", name)
                    continue
                self._load_callback(present[index], state)
        return control

    def _load_callback(self, callback: TrainerCallback, state: Mapping[str, Any]) -> None:
        if self._trainer.args.restore_callback_states_from_checkpoint:
            callbacks = self._trainer.callback_handler.callbacks
            kind: Any = type(callback)
            callbacks[callbacks.index(callback)] = kind.from_state(state)
            return
        for attribute, value in state.get("attributes", {}).items():
            # A file from elsewhere must not replace a method.
            if attribute.startswith("__") or callable(getattr(type(callback), attribute, None)):
                what = "The attribute is not part of a callback's state."
                remedy = "The checkpoint was made by something else: resume from another."
                raise DamagedError(
                    what, field=f"trainer_state.json: {type(callback).__name__}", value=attribute, remedy=remedy
                )
            setattr(callback, attribute, value)


def _newest_by_name(root: Store, skip: Collection[str]) -> str | None:
    """The URL of the newest checkpoint by names, sizes and commit files; its bytes are checked when they are read."""
    # A checkpoint that holds only a model beats none: the error can then name what is missing.
    for resumable in (True, False):
        found = find_newest_intact(root, on_damage=_log.warning, digests=False, resumable=resumable, skip=skip)
        if found is not None:
            return found.url
    return None


def _made_of(args: Mapping[str, Any], processes: int) -> str:
    """The sizes of which the global batch is the product, in words."""
    if args.get("global_batch_size"):
        return "global_batch_size"
    micro, steps = args.get("per_device_train_batch_size"), args.get("gradient_accumulation_steps")
    return f"{micro} per device x {steps} micro-batches x {processes} processes"
