"""`Snapshots`: the content of a checkpoint and of an exported model.

Callbacks may keep tensors (an average of the weights), and `past_index` keeps what the model remembers of the last
batch. JSON values stay in the JSON files; a tensor among them is replaced by a reference, and is written bit for bit to
the rank's ``extra/rank-00000.safetensors``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.arguments.enums import SaveStrategy
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot, snapshot_optimizer
from trainer_lib.checkpoint.sharded import digest_copies
from trainer_lib.checkpoint.snapshot import Snapshot, shard_snapshot
from trainer_lib.checkpoint.values import capture_rng, from_json, to_json
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.state import collect_callback_states
from trainer_lib.trainer.model import models
from trainer_lib.trainer.model.seeding import capture_seeds

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.run import TrainingRun
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors ``[...]`` go into `tensors`, under names that start with `name`."""

    def keep(key: str, tensor: Tensor) -> dict[str, Any]:
        tensors[key] = tensor.detach()
        # "own" is the device of the process, which may be another one on resume.
        return {"__tensor__": key, "device": "cpu" if tensor.device.type == "cpu" else "own"}

    return to_json(value, name, keep)


def decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The value that `encoded` received; its tensors ``[...]`` on the CPU if they were there, else on `device`."""

    def find(reference: dict[str, Any]) -> Tensor:
        tensor = tensors.get(str(reference["__tensor__"]))
        if tensor is None:
            remedy = "Use an earlier checkpoint."
            raise DamagedError(f"The tensor {reference['__tensor__']!r} is not in the checkpoint.", remedy=remedy)
        return tensor.clone() if reference.get("device") == "cpu" else tensor.to(device, copy=True)

    return from_json(value, find)


class Snapshots:
    """Collects the state of a training, and the files of its model."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._frozen: tuple[nn.Module, str | None] | None = None

    def take(self, run: TrainingRun, *, best_url: str | None = None) -> Snapshot:
        """All resumable state. Collective. `best_url`: destination of the checkpoint, when it is the best so far.

        Weights (of a model with adapters: all but the frozen base), and trained ones outside of the model; optimizer,
        schedule and loss scaler; the random number generators of every rank; the position in the data and the losses
        since the last log; counters, log history, best metric and callbacks' states (trainer_state.json).
        """
        trainer, engine, world = self._trainer, self._internals.engine, self._internals.world
        extra: dict[str, torch.Tensor] = {}
        states = collect_callback_states(self._internals.events.stateful())
        # A resume reads the callbacks' tensors from rank 0's file, so the other ranks drop theirs.
        trainer.state.stateful_callbacks = encoded(states, "callbacks", extra if world.save_group.rank == 0 else {})
        if world.save_group.rank == 0:
            extra.update(engine.outside.tensors())
        whole = not trainer.args.save_only_model or run.stopping  # a stop must be resumable
        strategy, schedule = engine.strategy, trainer.lr_scheduler
        state = models.in_saving_order(trainer.model, strategy.local_state(trainer.model_wrapped))
        trained = models.trained_state(trainer.model, state)
        kept = capture_seeds(trainer.model)  # by layers of the model, on each rank its own
        seeds = {"seeds": kept} if kept else {}
        snapshot = Snapshot(
            step=trainer.state.global_step,
            model=strategy.checkpoint_tensors(trained),
            optimizer=self._optimizer() if whole else None,
            scheduler=schedule.state_dict() if whole and schedule is not None else None,
            scaler=engine.precision.scaler_state() if whole else None,
            rng={**capture_rng(), **seeds, **self._past(extra)} if whole else {},
            data=run.position(),
            trainer_state=trainer.state.to_dict() | ({} if best_url is None else {"best_model_checkpoint": best_url}),
            training_args=trainer.args.to_dict(),
            files=self._files(trained),
            meta={
                **strategy.describe(),
                "world_size": world.comm.world_size,
                "global_samples": run.samples,
                "precision": engine.precision.name,
                "optimizer": engine.optimizer_classes(),
                "frozen": self.frozen_fingerprint(),
                "earlier_runs": list(self._internals.checkpoints.occupied.names),
            },
            extra=extra,
            place=world.mesh.describe(),
        )
        snapshot = shard_snapshot(snapshot, world.comm.rank)
        if snapshot.parts is None and world.save_group.world_size > 1:
            snapshot.copies = self._copies(snapshot, trained)
        return snapshot

    def _copies(self, snapshot: Snapshot, trained: Mapping[str, Tensor]) -> dict[str, int]:
        """Digests of what ranks hold alike: parameters, and their state unless the strategy divides it."""
        engine = self._internals.engine
        # Keras keeps seeds and running statistics, which differ by rank, in parameters that are not trained.
        named = {name: param for name, param in engine.named_parameters().items() if param.requires_grad}
        params = {name: param for name, param in named.items() if name in trained}
        optimizer = None if engine.strategy.places_model else snapshot.optimizer
        return digest_copies(params, {} if optimizer is None else optimizer.tensors)

    def _past(self, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The model's memory of the last batch (`past_index`), which differs by rank."""
        past = self._internals.forward.past
        if past is None:
            return {}
        try:
            return {"past": encoded(past, "past", extra)}
        except ConfigError as error:
            _log.warning("The memory of past_index is not saved, so a resumed run starts without it: %s", error)
            return {}

    def _optimizer(self) -> OptimizerSnapshot | None:
        trainer, strategy = self._trainer, self._internals.engine.strategy
        if trainer.optimizer is None:
            return None
        taken = snapshot_optimizer(trainer.optimizer, self._internals.engine.named_parameters())
        return dataclasses.replace(taken, tensors=strategy.checkpoint_tensors(taken.tensors))

    def check_optimizer(self) -> None:
        """Raise ConfigError when the optimizer's state cannot be saved: after the first step, not hours later."""
        args, engine = self._trainer.args, self._internals.engine
        is_saved = args.save_strategy != SaveStrategy.NO and not args.save_only_model
        # DeepSpeed's state is gathered when it is read, and holds nothing but tensors by parameter.
        if is_saved and engine.strategy.name != "deepspeed":
            snapshot_optimizer(engine.ready_optimizer(), engine.named_parameters())

    def _files(self, trained: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        if models.is_adapted(self._trainer.model):
            # The files of an adapter hold whole tensors, even those of a sharded model.
            trained = dict(self._internals.engine.strategy.gathered(trained))
        return self.model_files(trained) if self._internals.world.save_group.rank == 0 else {}

    def frozen_fingerprint(self, *, again: bool = False) -> str | None:
        """A digest of the frozen weights that checkpoints of a model with adapters leave out. Collective.

        `again`: other weights may have been loaded since the last call.
        """
        trainer, strategy = self._trainer, self._internals.engine.strategy
        # Kept, because it gathers the whole model, and the frozen base does not change between saves.
        if again or self._frozen is None or self._frozen[0] is not trainer.model:
            state = strategy.gathered(strategy.local_state(trainer.model_wrapped))
            digest = self._internals.world.comm.broadcast_json(models.frozen_fingerprint(trainer.model, state))
            self._frozen = trainer.model, digest
        return self._frozen[1]

    def model_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """The files that make the weights usable elsewhere: the model's configuration and the processing class.

        Of a model with adapters also the adapters, out of `state`: tensors ``[...]`` by name. Without a processor,
        the collator's tokenizer is saved.
        """
        trainer = self._trainer
        with self._internals.model.use_cache_as_given():
            files = models.model_files(trainer.model, state)
            config = None if files else _config_json(getattr(trainer.model, "config", None))
        if config is not None:
            files["config.json"] = config.encode()
        processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        save = getattr(processing, "save_pretrained", None)
        return {**files, **models.folder_files(save)} if callable(save) else files


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
