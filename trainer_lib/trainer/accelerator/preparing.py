"""`prepare` and its inverse: models, optimizers, schedules and loaders of the user's own, beside those of the Trainer.

What belongs to the Trainer is not wrapped a second time: its model becomes the module that its engine trains, its
optimizer and its schedule stay as they are. When a prepared loader, optimizer or schedule becomes the Trainer's, the
Trainer takes what is inside of it.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from trainer_lib.data.iterable import IterableLoader
from trainer_lib.data.loader import EvalLoader, TrainLoader
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.accelerator import shared_state

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_SHARDING = ("fsdp", "deepspeed")
_ORIGINAL_FORWARD = "_original_forward"  # accelerate's name


class PreparingAccelerator(Accelerator):  # type: ignore[misc]  # accelerate ships no types
    """Prepares objects to train with, through the Trainer's engine."""

    _trainer: Trainer
    _internals: Internals

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules to train with; any other object stays as it is.

        Args:
            args: the objects.
            device_placement: for each of them, whether it is moved to the device.

        Returns:
            The prepared objects in the order of `args`: one alone, several or none as a tuple.

        Raises:
            ConfigError: `device_placement` has another length, or the strategy cannot train one of the models.
        """
        places: list[Any] = device_placement or [None] * len(args)
        if len(places) != len(args):
            raise ConfigError(
                f"There are {len(args)} objects to prepare.",
                field="device_placement",
                value=places,
                remedy="Give one value for each object, or none at all.",
            )
        prepared = list(args)
        # A model changes an optimizer's parameters, and a schedule follows an optimizer.
        kinds: list[tuple[type, Any]] = [
            (nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
        ]
        for kind, prepare_one in kinds:
            for index, each in enumerate(args):
                if isinstance(each, kind):
                    prepared[index] = prepare_one(each, device_placement=places[index])
        for index, each in enumerate(args):
            if isinstance(each, LRScheduler):
                prepared[index] = self.prepare_scheduler(each)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    # -- models -------------------------------------------------------------------------------------------------------

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model to train or, in `evaluation_mode`, to predict with, on the device and in the Trainer's precision.

        The Trainer's own model becomes the module that the Trainer trains. Another model gets replicas that average
        their gradients where there are several processes; no strategy shards it.

        Raises:
            ConfigError: the strategy shards models, and this is not the Trainer's; or DeepSpeed has not started yet.
        """
        if self.unwrap_model(model) is self._trainer.model:
            return self._prepare_own_model(model, device_placement, evaluation_mode=evaluation_mode)
        if not getattr(model, "_is_accelerate_prepared", False):
            strategy = self._internals.engine.strategy
            if not evaluation_mode and strategy.name in _SHARDING:
                raise ConfigError(
                    "The strategy shards one model, the Trainer's, and cannot train a second one.",
                    field="prepare_model",
                    value=type(model).__name__,
                    remedy="Make both parts of one module, or give evaluation_mode=True.",
                )
            self._place(model, device_placement)
            self._compute_in_precision(model)
            if not evaluation_mode and any(each.requires_grad for each in model.parameters()):
                model = strategy.setup_model(model)
            model._is_accelerate_prepared = True  # type: ignore[assignment]
        if not any(each is model for each in self._models):
            self._models.append(model)
        return model

    def _prepare_own_model(self, model: nn.Module, placement: bool | None, *, evaluation_mode: bool) -> nn.Module:
        engine, trainer = self._internals.engine, self._trainer
        if not evaluation_mode:
            if engine.strategy.name == "deepspeed" and trainer.model_wrapped is trainer.model:
                raise ConfigError(
                    "DeepSpeed makes its engine of the model and its optimizer together, when training begins.",
                    field="prepare_model",
                    value=type(model).__name__,
                    remedy="Call train(), and override training_step or create_optimizer.",
                )
            return engine.prepare_model()
        if not engine.strategy.places_model:
            self._place(model, placement)
        return model

    def _place(self, model: nn.Module, placement: bool | None) -> None:
        if placement is None:
            placement = self.device_placement and not self.verify_device_map(model)
        if placement and not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.device)

    def _compute_in_precision(self, model: nn.Module) -> None:
        """Run the forward of a model in the Trainer's precision, with outputs in float32."""
        precision = self._internals.engine.precision
        if precision.dtype is None:
            return
        autocast: Any = precision.autocast()  # a decorator as well
        forward: Any = model.forward
        setattr(model, _ORIGINAL_FORWARD, forward)
        function = getattr(forward, "__func__", None)
        if function is None:
            model.forward = convert_outputs_to_fp32(autocast(forward))
        else:
            model.forward = MethodType(convert_outputs_to_fp32(autocast(function)), model)

    @override
    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The user's own module, under all wrappers of strategies and of torch.compile; a PeftModel is not a wrapper.

        Args:
            model: a module, wrapped or not.
            keep_fp32_wrapper: keep the forward that `prepare_model` made for the precision.
            keep_torch_compile: keep the wrapper of torch.compile.
        """
        inner = model
        while True:
            compiled = vars(inner).get("_modules", {}).get("_orig_mod")
            if compiled is not None and not keep_torch_compile:
                inner = compiled
            elif isinstance(inner, _WRAPPERS):
                inner = inner.module
            else:
                break
        if compiled is None:
            inner = self._internals.engine.strategy.unwrap(inner)
        if not keep_fp32_wrapper and _ORIGINAL_FORWARD in vars(inner):
            del inner.__dict__["forward"], inner.__dict__[_ORIGINAL_FORWARD]
        return inner

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole state, name -> tensor ``[...]``; of a sharded model with values on rank 0 only. Collective."""
        own = self.unwrap_model(model)
        if own is self._trainer.model:
            return self._internals.engine.strategy.model_state(model)
        return dict((own if unwrap else model).state_dict())

    @override
    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights on the main process. Raises ConfigError."""
        if self._internals.engine.strategy.name in _SHARDING and self.unwrap_model(model) is self._trainer.model:
            raise ConfigError(
                "The model is sharded over the processes.",
                field="save_model",
                remedy="Call trainer.save_model(folder).",
            )
        super().save_model(model, save_directory, max_shard_size, safe_serialization)

    # -- optimizers, schedules, loaders -------------------------------------------------------------------------------

    @override
    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An optimizer that steps at the end of an accumulation only, and unscales gradients under fp16.

        The Trainer's own optimizer stays as it is, since the Trainer does both.
        """
        if shared_state.unwrap(optimizer) is self._trainer.optimizer or isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        self._refresh()
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.gradient_state = self.gradient_state
        return prepared

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A schedule that steps when its optimizer does; the Trainer's own schedule stays as it is."""
        if shared_state.unwrap(scheduler) is self._trainer.lr_scheduler:
            return scheduler
        self._refresh()
        prepared = super().prepare_scheduler(scheduler)
        prepared.gradient_state = self.gradient_state
        return prepared

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this rank's share of the batches, which come on the device.

        The Trainer's own loaders are their rank's share already and stay as they are.
        """
        if isinstance(data_loader, TrainLoader | EvalLoader | IterableLoader):
            return data_loader
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if prepared is not data_loader:
            prepared._is_accelerate_prepared = True
            setattr(prepared, shared_state.ORIGINAL, shared_state.unwrap(data_loader))
        return prepared

    def _refresh(self) -> None:
        """Read the world and the engine again."""
        world, engine = self._internals.world, self._internals.engine
        shared_state.publish_state(world, engine)
        self.state = shared_state.own_state(world, engine)
