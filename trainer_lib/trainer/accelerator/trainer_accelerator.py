"""`TrainerAccelerator`: an `accelerate.Accelerator` whose work the Trainer's engine does.

Libraries that subclass the Trainer call it and check its type. Nothing of accelerate acts behind the Trainer: it forms
no process group, wraps no model a second time, makes no second loss scaler, and makes the host wait for the device only
where its caller asks for a number. Our own loop does not go through it. Every public member of accelerate's is served
here (`FACTS`, or a method), inherited because its own code does no more than that, or refused by name (`REFUSED`).
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    convert_outputs_to_fp32,
    gather_object,
    recursively_apply,
)
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from trainer_lib.data.loading.iterable import IterableLoader
from trainer_lib.data.loading.loader import EvalLoader, TrainLoader
from trainer_lib.distributed.communicator import Communicator, leads
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.accelerator import shared_state

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_CHECKPOINT = "Set control.should_save in a callback, or call trainer.save_model."
_STATE = "Keep the state in a callback that is an ExportableState: checkpoints hold it."
_TRACKERS = "Name trackers in report_to, and call log."
_PARALLEL = "Remove it: processes differ in their share of the data only."
#: Member of accelerate's -> what to do instead.
REFUSED: Mapping[str, str] = {
    "save_state": _CHECKPOINT,
    "load_state": "Call trainer.train(resume_from_checkpoint=...).",
    "register_for_checkpointing": _STATE,
    "register_save_state_pre_hook": "Override _save_checkpoint, or use a callback's on_save.",
    "register_load_state_pre_hook": "Override _load_from_checkpoint.",
    **dict.fromkeys(("init_trackers", "get_tracker", "end_training"), _TRACKERS),
    "deepspeed_ulysses_dl_adapter": _PARALLEL,
    "pipeline_parallel_rank": _PARALLEL,
    "context_parallel_rank": _PARALLEL,
}
_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_SHARDING = ("fsdp", "deepspeed")
_ORIGINAL_FORWARD = "_original_forward"  # accelerate's name
_ABSENT = (
    *("flag_tensor", "ddp_handler", "scaler_handler", "init_handler", "autocast_handler", "fp8_recipe_handler"),
    *("ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler", "profile_handler"),
)


# -- trees of tensors between ranks: nothing is pickled ----------------------------------------------------------------


def _leaves_of(tree: Any, *, field: str) -> list[torch.Tensor]:
    """The tensors ``[...]`` of a tree of lists, tuples and mappings, in order. Raises ConfigError."""
    found: list[torch.Tensor] = []
    _replace_leaves(tree, lambda leaf: found.append(leaf) or leaf, field=field)  # type: ignore[func-returns-value]
    return found


def _replace_leaves(tree: Any, function: Callable[[torch.Tensor], Any], *, field: str) -> Any:
    """The tree with `function` of every tensor ``[...]`` in its place. Raises ConfigError for other leaves."""
    try:
        return recursively_apply(function, tree, error_on_other_type=True)
    except TypeError as error:
        what = "Only tensors, and lists, tuples and mappings of tensors, can be exchanged."
        remedy = "Use gather_for_metrics for other objects."
        raise ConfigError(what, field=field, value=type(tree).__name__, remedy=remedy) from error


def gather_tree(comm: Communicator, tree: Any, *, contributes: bool = True, field: str = "gather") -> Any:
    """Every rank's tensors ``[batch, ...]``, joined along their first dimension in the order of the ranks. Collective.

    A scalar ``[]`` counts as one row. Without `contributes`, this rank's rows are left out. `field`: the caller's
    method. Shapes travel first, as one small message between the hosts that no device waits for. So tensors may differ
    in their first dimension, and other dimensions or dtypes that differ are the same ConfigError on every rank.
    """
    leaves = _leaves_of(tree, field=field)
    own = [[contributes, str(leaf.dtype), list(leaf.shape)] for leaf in leaves]
    ranks = zip(*comm.broadcast_json(comm.gather_json(own)), strict=True)
    gathered = iter([_gather_leaf(comm, leaf, forms, field) for leaf, forms in zip(leaves, ranks, strict=True)])
    return _replace_leaves(tree, lambda _: next(gathered), field=field)


def _gather_leaf(
    comm: Communicator, leaf: torch.Tensor, ranks: Sequence[tuple[bool, str, list[int]]], field: str
) -> torch.Tensor:
    """The tensors of the ranks that contribute ``[rows of all, ...]``; `ranks`: whether each does, dtype and shape."""
    present = [rank for rank in ranks if rank[0]] or [ranks[comm.rank]]
    if len({(dtype, tuple(shape[1:]), len(shape)) for _, dtype, shape in present}) > 1:
        what = f"The tensors differ between the processes: {', '.join(str(tuple(shape)) for *_, shape in present)}."
        remedy = "Call pad_across_processes on the dimensions that differ before."
        raise ConfigError(what, field=field, value=tuple(leaf.shape), remedy=remedy)
    dtype: torch.dtype = getattr(torch, present[0][1].removeprefix("torch."))
    trailing = present[0][2][1:]
    per_row = math.prod(trailing) * dtype.itemsize
    counts = [(shape[0] if shape else 1) if contributes else 0 for contributes, _, shape in ranks]
    # As bytes: gloo does not know every dtype.
    sent = torch.zeros(max(counts) * per_row, dtype=torch.uint8, device=leaf.device)
    if counts[comm.rank]:
        own = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
        sent[: own.numel()] = own
    received = comm.gather_tensor(sent) if sent.numel() else [sent] * len(counts)
    parts = [part[: count * per_row] for part, count in zip(received, counts, strict=True)]
    return torch.cat(parts).view(dtype).reshape(sum(counts), *trailing)


class TrainerAccelerator(Accelerator):  # type: ignore[misc]  # accelerate ships no types
    """The Trainer's accelerator.

    What belongs to the Trainer is not prepared a second time: its model becomes the module that its engine trains, its
    optimizer and its schedule stay as they are. When a prepared loader, optimizer or schedule becomes the Trainer's,
    the Trainer takes what is inside of it.
    """

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        # Without `super().__init__()`, which would find out ranks, device and precision by itself.
        self._trainer, self._internals = trainer, internals
        args, batching = trainer.args, internals.world.batching
        self.project_configuration = ProjectConfiguration(project_dir=args.output_dir)
        self.dataloader_config = DataLoaderConfiguration(
            split_batches=batching.split_batches,
            dispatch_batches=False,
            even_batches=True,
            use_seedable_sampler=True,
            data_seed=args.seed if args.data_seed is None else args.data_seed,
            non_blocking=batching.non_blocking,
        )
        self.gradient_state = shared_state.LiveGradientState(
            lambda: None if internals.run is None else internals.run.weights
        )
        self.gradient_state.plugin_kwargs = {"sync_each_batch": True} if batching.sync_each_batch else {}
        self.device_placement, self.step_scheduler_with_optimizer = True, True
        self.trackers: list[Any] = []
        self.log_with: list[Any] = []
        self.rng_types = ["generator"]
        self.step = 0
        self._is_fp8 = bool(args.fp8)
        self.has_lomo_optimizer = self.has_fp8_handler = self.fp8_enabled = self.delayed_fp8_autocast = False
        for name in _ABSENT:
            setattr(self, name, None)
        for name in ("_optimizers", "_models", "_schedulers", "_dataloaders", "_custom_objects"):
            setattr(self, name, [])
        self._load_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self._save_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self._refresh()

    # -- the step -----------------------------------------------------------------------------------------------------

    @override
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagate a loss ``[]``, which is divided by `gradient_accumulation_steps` only if that was set here.

        `learning_rate` and `scale_wrt_gas`, which the reference passes for some engines, have no meaning. Raises
        ConfigError for other `kwargs` where DeepSpeed trains, since its backward takes none.
        """
        engine, steps = self._internals.engine, self.gradient_accumulation_steps
        more = {name: value for name, value in kwargs.items() if name not in ("learning_rate", "scale_wrt_gas")}
        loss, gradient = loss / steps if steps != 1 else loss, more.pop("gradient", None)
        if not more:
            engine.backward(loss, gradient)
            return
        if engine.strategy.name == "deepspeed":
            what = "DeepSpeed's backward does not take this argument."
            raise ConfigError(what, field="backward", value=", ".join(more), remedy="Remove it.")
        scaler = engine.precision.scaler
        (loss if scaler is None else scaler.scale(loss)).backward(gradient, **more)

    @override
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, once per step; without an optimizer, those of the Trainer's."""
        engine = self._internals.engine
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for inner in (shared_state.unwrap(outer) for outer in given):
            if inner is None or inner is self._trainer.optimizer:
                engine.unscale_gradients()
            elif engine.precision.scaler is not None:
                engine.precision.scaler.unscale_(inner)

    @override
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients to a norm. Returns the norm before clipping, ``[]`` on the device. Raises ConfigError."""
        self.unscale_gradients()
        given: Any = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        strategy = self._internals.engine.strategy
        if norm_type == 2:
            return strategy.clip_grad_norm(given, max_norm)
        if strategy.places_model:
            what = "Gradients of sharded parameters have an L2 norm only."
            raise ConfigError(what, field="norm_type", value=norm_type, remedy="Remove it.")
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)

    @override
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]. Raises ConfigError."""
        if self._internals.engine.strategy.name == "deepspeed":
            remedy = "Set max_grad_norm instead."
            raise ConfigError("DeepSpeed holds the gradients.", field="clip_grad_value_", remedy=remedy)
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the newest step was left out because of a non-finite gradient. The host waits for the device."""
        norm = self._internals.engine.last_norm
        return (norm is not None and not bool(torch.isfinite(norm))) or super().optimizer_step_was_skipped

    @override
    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """The context of mixed precision; `autocast_handler` (AutocastKwargs) may switch it off."""
        precision = self._internals.engine.precision
        if autocast_handler is None or precision.dtype is None:
            return precision.autocast()
        given = {"enabled": autocast_handler.enabled, "cache_enabled": autocast_handler.cache_enabled}
        return torch.autocast(self.device.type, dtype=precision.dtype, **given)

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients stay on their rank."""
        if model is self._trainer.model_wrapped:
            if model is self._trainer.model and not self._trainer.is_in_train:
                return contextlib.nullcontext()  # the strategy has not wrapped it yet
            return self._internals.engine.strategy.no_sync(model)
        own: Any = getattr(model, "no_sync", contextlib.nullcontext)
        context: AbstractContextManager[Any] = own()
        return context

    @override
    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """A micro-step of a loop of the caller's; inside of the Trainer's loop, which accumulates itself, nothing."""
        if self._internals.run is not None:
            yield
            return
        with super().accumulate(*models):
            yield

    # -- other ranks --------------------------------------------------------------------------------------------------

    @override
    def gather(self, tensor: Any) -> Any:
        """Join every rank's tensors ``[batch, ...]`` along the first dimension, which may differ; a scalar is one row.

        Raises ConfigError when other dimensions or dtypes differ.
        """
        return tensor if self.num_processes == 1 else gather_tree(self._internals.world.comm, tensor)

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what metrics are computed from: a dummy batch's rows and repeated samples are left out.

        `use_gather_object`: tensors go as objects, and the result is a list. Else ConfigError when shapes differ.
        """
        if self.num_processes == 1:
            return input_data
        contributes = self._internals.accelerator.has_own_batch() and leads(self._internals.world.comm)
        state = self.gradient_state
        # In the last round of a prepared loader, samples are repeated to fill up the batches.
        keep = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        field = "gather_for_metrics"
        leaves: list[torch.Tensor] | None = None
        with contextlib.suppress(ConfigError):  # raised for other objects
            leaves = None if use_gather_object else _leaves_of(input_data, field=field)
        if leaves is None:
            objects = input_data if isinstance(input_data, list | tuple) else [input_data]
            joined: list[Any] = gather_object(list(objects) if contributes else [])
            return joined[:keep]
        scalars = iter([leaf.ndim == 0 for leaf in leaves])
        gathered = gather_tree(self._internals.world.comm, input_data, contributes=contributes, field=field)
        return _replace_leaves(gathered, lambda leaf: leaf if next(scalars) else leaf[:keep], field=field)

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or max over ranks of tensors ``[...]`` in any structure, as new tensors. Raises ConfigError."""
        if scale != 1.0:
            remedy = "Multiply what reduce returns."
            raise ConfigError("A scale is not supported.", field="scale", value=scale, remedy=remedy)
        if reduction not in ("sum", "mean", "max", "none"):
            remedy = "Use sum, mean, max or none."
            raise ConfigError("The reduction is unknown.", field="reduction", value=reduction, remedy=remedy)
        if reduction == "none":  # which accelerate's own adds up
            return _replace_leaves(tensor, torch.clone, field="reduce")
        return super().reduce(tensor, reduction)

    @override
    def wait_for_everyone(self) -> None:
        self._internals.world.comm.barrier()

    @override
    def main_process_first(self) -> AbstractContextManager[None]:
        return self._ordered(is_first=self.is_main_process)

    @override
    def local_main_process_first(self) -> AbstractContextManager[None]:
        return self._ordered(is_first=self.is_local_main_process)

    @contextlib.contextmanager
    def _ordered(self, *, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    @override
    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Pass values to the trackers of `report_to`."""
        self._internals.events.report(values, step)

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules to train with; any other object stays as it is.

        Raises ConfigError when `device_placement` has another length, or the strategy cannot train one of the models.
        """
        places: list[Any] = device_placement or [None] * len(args)
        if len(places) != len(args):
            what = f"There are {len(args)} objects to prepare."
            remedy = "Give one value for each object, or none at all."
            raise ConfigError(what, field="device_placement", value=places, remedy=remedy)
        prepared = list(args)
        # A model changes an optimizer's parameters, and a schedule follows an optimizer.
        kinds: list[tuple[type, Any]] = [
            (nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
        ]
        for kind, prepare_one in kinds:
            for index, part in enumerate(args):
                if isinstance(part, kind):
                    prepared[index] = prepare_one(part, device_placement=places[index])
        for index, part in enumerate(args):
            if isinstance(part, LRScheduler):
                prepared[index] = self.prepare_scheduler(part)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    # -- models -------------------------------------------------------------------------------------------------------

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model to train or, in `evaluation_mode`, to predict with, on the device and in the Trainer's precision.

        The Trainer's own model becomes the module that the Trainer trains. Another model gets replicas that average
        their gradients; ConfigError where the strategy shards models, or DeepSpeed has not started yet.
        """
        if self.unwrap_model(model) is self._trainer.model:
            return self._prepare_own_model(model, device_placement, evaluation_mode=evaluation_mode)
        if not getattr(model, "_is_accelerate_prepared", False):
            strategy = self._internals.engine.strategy
            if not evaluation_mode and strategy.name in _SHARDING:
                what = "The strategy shards one model, the Trainer's, and cannot train a second one."
                remedy = "Make both parts of one module, or give evaluation_mode=True."
                raise ConfigError(what, field="prepare_model", value=type(model).__name__, remedy=remedy)
            self._place(model, device_placement)
            self._compute_in_precision(model)
            if not evaluation_mode and any(param.requires_grad for param in model.parameters()):
                model = strategy.setup_model(model)
            model._is_accelerate_prepared = True  # type: ignore[assignment]
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def _prepare_own_model(self, model: nn.Module, placement: bool | None, *, evaluation_mode: bool) -> nn.Module:
        engine, trainer = self._internals.engine, self._trainer
        if not evaluation_mode:
            if engine.strategy.name == "deepspeed" and trainer.model_wrapped is trainer.model:
                what = "DeepSpeed makes its engine of the model and its optimizer together, when training begins."
                remedy = "Call train(), and override training_step or create_optimizer."
                raise ConfigError(what, field="prepare_model", value=type(model).__name__, remedy=remedy)
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
        """The user's own module, under all wrappers of strategies and of torch.compile; a PeftModel is none of them."""
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
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write a model's weights on the main process. Raises ConfigError."""
        if self._internals.engine.strategy.name in _SHARDING and self.unwrap_model(model) is self._trainer.model:
            remedy = "Call trainer.save_model(folder)."
            raise ConfigError("The model is sharded over the processes.", field="save_model", remedy=remedy)
        super().save_model(model, save_directory, max_shard_size, safe_serialization)

    # -- optimizers, schedules, loaders -------------------------------------------------------------------------------

    @override
    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An optimizer that steps and unscales where an accumulation ends; the Trainer's own, which does so, stays."""
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
        """A loader of this rank's share of the batches; the Trainer's own loaders are that and stay as they are."""
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


#: Member of accelerate's that is read off the world and the engine.
FACTS: Mapping[str, Callable[[TrainerAccelerator], Any]] = {
    "is_main_process": lambda self: self._internals.world.comm.rank == 0,
    "is_local_main_process": lambda self: self._internals.world.comm.local_rank == 0,
    "should_save_model": lambda self: self.is_local_main_process,
    "use_distributed": lambda self: self._internals.world.comm.world_size > 1,
    "mixed_precision": lambda self: shared_state.precision_name(self._internals.engine),
    "native_amp": lambda self: self._internals.engine.precision.dtype is not None,
    "scaler": lambda self: self._internals.engine.precision.scaler,  # the only one there is
    "fp8_backend": lambda self: FP8BackendType.AO if self._is_fp8 else FP8BackendType.NO,
    "torch_device_mesh": lambda self: shared_state.device_mesh(self._internals.engine.strategy),
    "tensor_parallel_rank": lambda self: self._internals.world.mesh.coordinates["tensor"],
    "data_parallel_rank": lambda self: self._internals.world.mesh.coordinates["replicate"],
    "data_parallel_shard_rank": lambda self: self._internals.world.mesh.coordinates["shard"],
}


def _refused_member(name: str) -> Any:
    def refuse(self: TrainerAccelerator, *_: Any, **__: Any) -> Any:
        remedy = REFUSED[name]
        raise ConfigError("The Trainer's accelerator does not have this.", field=f"accelerator.{name}", remedy=remedy)

    refuse.__name__, refuse.__doc__ = name, f"Raise ConfigError: {REFUSED[name]}"
    return property(refuse) if name.endswith("_rank") else refuse


for _name, _read in FACTS.items():
    setattr(TrainerAccelerator, _name, property(_read))
for _name in REFUSED:
    setattr(TrainerAccelerator, _name, _refused_member(_name))
