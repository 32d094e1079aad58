"""ZeRO by DeepSpeed: optimizer state (stage 1), gradients (2) and parameters (3) sharded over processes.

The Trainer keeps its loop, and calls DeepSpeed in this order::

    build           stage 3: layers are sharded as soon as they are built (zero.Init)
    resolve         model and optimizer become an engine, which must be of the requested stage
    no_sync         for all but the last micro-step: stage 1 exchanges nothing; stages 2 and 3 exchange in each
                    micro-step, since no process keeps whole gradients
    backward        of the engine, with our weight in place of its division by the accumulation steps
    clip_grad_norm  the norm of all gradients, by which the engine scales inside its step
    step            of the engine, which skips gradients that are not finite, in every number format
    state           `zero_state`, parameter by parameter; never DeepSpeed's pickled checkpoints

Tested with DeepSpeed 0.19.8. Only this file imports the package, inside functions, because an import takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.deepspeed_config import ZeroPlan, plan
from trainer_lib.arguments.members import ZeroPlugin
from trainer_lib.base.restore_process import variables_kept
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.precision import Precision
from trainer_lib.distributed.sharding import GatheredTensors
from trainer_lib.errors import ConfigError, InfrastructureError, MissingExtraError
from trainer_lib.secrets import mask_value
from trainer_lib.strategies.base import Strategy, cannot_predict_alone, match_names
from trainer_lib.strategies.deepspeed import zero_config
from trainer_lib.strategies.deepspeed.zero_state import (
    Partitions,
    StagesOneTwo,
    StageThree,
    ZeroOptimizer,
    missing_names,
)

Part = TypeVar("Part")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(Precision):
    """A precision without autocast and scaler for the Trainer; it saves the engine's loss scale and counters."""

    def __init__(self, name: str, device: torch.device, engine: Callable[[], Any]) -> None:
        # fp32 for the Trainer: no autocast and no scaler of its own.
        super().__init__("fp32", None, device)
        self.name = name
        # A function, because there is no engine yet.
        self._engine = engine

    @override
    def scaler_state(self) -> dict[str, float] | None:
        """Return the engine's counters, and with fp16 the scale of the loss and when it last changed."""
        engine = self._engine()
        if engine is None:
            return None
        scaler = engine.optimizer.loss_scaler
        state = {name: float(getattr(engine, name)) for name in _COUNTERS}
        return state | {name: float(getattr(scaler, name)) for name in _SCALER if hasattr(scaler, name)}

    @override
    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `scaler_state` returned. State that another strategy wrote has none of these entries."""
        engine = self._engine()
        if engine is None or not state:
            return
        for name in _COUNTERS:
            setattr(engine, name, int(state.get(name, 0)))
        scaler = engine.optimizer.loss_scaler
        for name in _SCALER if self.name == "fp16" else ():
            if hasattr(scaler, name) and name in state:
                # A checkpoint holds floats, and some of the scaler's fields are whole numbers.
                setattr(scaler, name, type(getattr(scaler, name))(state[name]))


_log = logging.getLogger(__name__)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedStrategy(Strategy):
    """A model trained by DeepSpeed's engine.

    With bf16 or fp16 the model computes with copies in that format; the masters are what is saved. Weights are gathered
    one by one to be saved, and loaded part by part. `engine`: DeepSpeed's, None before training.
    """

    name = "deepspeed"
    places_model = True
    skips_micro_steps = False

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        self.plan: ZeroPlan = plan(args, data_parallel_size=comm.data_parallel.size)
        super().__init__(device, comm)
        # The processes that write files; the others need not hold whole tensors.
        self._keeps = comm.rank == 0 or (args.save_on_each_node and comm.local_rank == 0)
        self._mixed = self.plan.precision != "fp32"  # whether the masters are separate tensors
        self._partitions: Partitions | None = None
        self._trained: set[int] = set()
        self._given_dtypes: dict[int, torch.dtype] = {}
        self._masters: dict[str, Tensor] = {}
        self.forward_communicates = self.plan.stage == 3
        self.plugins = {"deepspeed_plugin": ZeroPlugin(self.plan.stage, lambda: self._config(None))}
        self._args = args
        self.engine: Any = None
        self._inference: Any = None
        self._hf_config: Any = None
        self._buffers: list[Tensor] = []
        distributed.form_alone(device)
        self._deepspeed = _start(device, self.plan)
        self._gathering = self._deepspeed.zero.GatheredParameters

    # -- before training -----------------------------------------------------------------------------------------------

    @override
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        if self.plan.stage != 3:
            return make()
        self._set_local_rank()
        self._set_transformers_sharded(True)
        try:
            with self._deepspeed.zero.Init(config_dict_or_path=self._config(None)):
                return make()
        finally:
            self._set_transformers_sharded(False)

    def _set_transformers_sharded(self, sharded: bool) -> None:
        """Let transformers' `from_pretrained` load into sharded parameters, and its `generate` keep ranks in step."""
        if "transformers" not in sys.modules or self.plan.stage != 3:
            return
        from transformers.integrations import deepspeed as known

        if sharded:
            self._hf_config = known.HfDeepSpeedConfig(self._config(None))  # type: ignore[no-untyped-call]
        else:
            known.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]

    @override
    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError when a trained parameter has a number format for which no masters can be kept."""
        for name, param in model.named_parameters():
            if param.requires_grad and self.plan.precision == "fp32" and param.dtype != torch.float32:
                what = f"The parameter {name} is {param.dtype}, but neither bf16 nor fp16 is on."
                remedy = "Give bf16=True (or fp16=True), or the model in float32."
                raise ConfigError(what, field="model", value=type(model).__name__, remedy=remedy)

    @override
    def precision(self, args: TrainingArguments) -> Precision:
        """Return the engine's own precision: the engine casts and scales the loss, so the Trainer does neither."""
        return EnginePrecision(self.plan.precision, self.device, lambda: self.engine)

    @override
    def setup_model(self, model: nn.Module) -> nn.Module:
        self.release()
        return model  # the engine wraps it once there is an optimizer

    @override
    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Raise ConfigError for an optimizer that an earlier training has taken apart."""
        known = {id(param) for param in self.unwrap(model).parameters()}
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if not held or any(id(param) not in known for param in held):
            what = "The optimizer does not hold the model's parameters; an earlier training may have taken it apart."
            remedy = "Give a new optimizer over the model's parameters, or optimizer_cls_and_kwargs."
            raise ConfigError(what, field="optimizers", value=type(optimizer).__name__, remedy=remedy)

    @override
    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the engine, and an optimizer over the model's own parameters. Collective."""
        inner = self.unwrap(model)
        zero_config.check_optimizer(optimizer, self.plan, inner)
        groups = [
            (group, [param for param in group["params"] if param.requires_grad]) for group in optimizer.param_groups
        ]
        groups = [(group, parameters) for group, parameters in groups if parameters]
        # Before the engine casts the model: an export has the formats that were given.
        self._given_dtypes = {id(param): param.dtype for param in inner.parameters()}
        self.engine = self._initialize(inner, self._compiled(optimizer))
        self._partitions = self._checked_partitions()
        self._trained = {id(param) for param in self._partitions.parameters()}
        self._cast_inputs(inner)
        # Weights that were loaded before the masters existed, at full precision. Collective.
        kept, self._masters = self._masters, {}
        for name, param in inner.named_parameters() if kept else ():
            if id(param) in self._trained and name in kept:
                self._partitions.store_part(param, kept[name])
        if kept:
            self._partitions.refresh_model()
        # On unless it is refused, as in DistributedDataParallel.
        if self._args.ddp_broadcast_buffers is not False:
            tensors = self.local_state(inner).values()
            self._buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        return self.engine, ZeroOptimizer(groups, self._partitions, self._step, keeps=self._keeps)

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        self._set_local_rank()
        config = self._config(model, trains=optimizer is not None)
        if self.comm.rank == 0:
            _log.info("DeepSpeed's configuration: %s", json.dumps(mask_value("deepspeed", config), sort_keys=True))
        return self._deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]

    def _set_local_rank(self) -> None:
        # DeepSpeed reads it from here on, at every step of stage 3; plain Python has not set it.
        os.environ.setdefault("LOCAL_RANK", str(self.comm.local_rank))

    def _config(self, model: nn.Module | None, *, trains: bool = True) -> dict[str, Any]:
        size = self.comm.data_parallel.size
        return zero_config.engine_config(self.plan, self._args, model, data_parallel_size=size, trains=trains)

    def _compiled(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return DeepSpeed's own Adam for the CPU over the same groups, if the configuration asks for it."""
        if not self.plan.compiled_adam:
            return optimizer
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        decoupled = isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            group.pop("fused", None)
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled)
        return made

    def _checked_partitions(self) -> Partitions:
        """Return the engine's partitions; raise InfrastructureError if they are not those of the requested stage."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        engine, stage = self.engine, self.plan.stage
        zero = engine.optimizer
        lacking = missing_names(zero, stage)
        if lacking or engine.zero_optimization_stage() != stage:
            raise InfrastructureError(
                f"DeepSpeed {self._deepspeed.__version__} made {type(zero).__name__} of stage"
                f" {engine.zero_optimization_stage()}, although stage {stage} was requested"
                + (f"; it lacks {', '.join(lacking)}." if lacking else "."),
                field="deepspeed",
                remedy="Install the version that is tested: pip install deepspeed==0.19.8.",
            )
        partitions: Partitions = StageThree(zero, combine_grad_norm_groups) if stage == 3 else StagesOneTwo(zero)
        whole = sum(getattr(param, "ds_numel", param.numel()) for param in partitions.parameters())
        held = sum(flat.numel() for flat in partitions.flats())
        most = -(-whole // self.comm.world_size) + 1024 * (1 + sum(1 for _ in partitions.parameters()))  # plus padding
        if held > most or held * self.comm.world_size < whole:
            raise InfrastructureError(
                f"A process holds {held:,} of {whole:,} elements, which {self.comm.world_size} processes should share.",
                field="deepspeed.zero_optimization.stage",
                value=stage,
                remedy="Install the version that is tested: pip install deepspeed==0.19.8.",
            )
        return partitions

    def _cast_inputs(self, model: nn.Module) -> None:
        """Cast floating-point inputs of the forward to the model's number format, as transformers' Trainer does."""
        dtype = _DTYPES[self.plan.precision]
        if dtype is torch.float32 or getattr(model, "_trainflow_casts", False):
            return

        def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return _cast(args, dtype), _cast(kwargs, dtype)

        model.register_forward_pre_hook(cast, with_kwargs=True)
        # Marked on the model, which outlives the engine: one hook is enough.
        model._trainflow_casts = True  # type: ignore[assignment]

    @override
    def release(self) -> None:
        """Take the engine of an earlier training, or of an evaluation before any, off the model."""
        for engine in (self.engine, self._inference):
            if engine is not None:
                engine.destroy()
        self.engine = self._inference = self._partitions = None
        self._trained, self._buffers = set(), []

    # -- forward and backward ------------------------------------------------------------------------------------------

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = model.module if model is self.engine or model is self._inference else model
        return super().unwrap(inner)

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """Return the module itself; in stage 3, an engine gathers its layers while they compute."""
        inner = self.unwrap(model)
        if self.plan.stage < 3:
            return inner.to(self.device)
        if alone:
            raise cannot_predict_alone("deepspeed", "stage 3")
        if self.engine is None and self._inference is None:
            self._inference = self._initialize(inner, None)
            self._cast_inputs(inner)
        self._set_transformers_sharded(True)
        return inner

    @override
    def after_inference(self, model: nn.Module) -> None:
        """Let transformers load other models again."""
        self._set_transformers_sharded(False)

    @override
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        # The engine exchanges gradients and steps at a boundary only.
        _started(self.engine).set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            _started(self.engine).set_gradient_accumulation_boundary(True)

    @override
    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Run the engine's backward. It takes no gradient, so `loss` is multiplied by `gradient` first."""
        # Not divided by the accumulation: the Trainer has weighted the micro-batch already.
        _started(self.engine).backward(loss if gradient is None else loss * gradient, scale_wrt_gas=False)

    @override
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
        """Return the norm of all gradients. The engine scales them to `max_norm` in the step that follows."""
        partitions = _started(self._partitions)
        partitions.zero.clip_grad = float(max_norm or 0.0)
        return partitions.gradient_norm()

    def _step(self) -> bool:
        engine = _started(self.engine)
        engine.step()
        for buffer in self._buffers if self.comm.world_size > 1 else ():  # the engine does not synchronize buffers
            torch.distributed.broadcast(buffer, src=0)
        return bool(engine.was_step_applied())

    @override
    def numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of the whole parameter: a sharded one is empty between its layer's turns."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    # -- weights, out --------------------------------------------------------------------------------------------------

    @override
    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers themselves, by name; a sharded one is empty, shape `[0]`."""
        state = self.unwrap(model).state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    @override
    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # In the number formats of the given model.
        return GatheredTensors(tensors, lambda part: self._whole(part).to(self._given_dtypes.get(id(part), part.dtype)))

    @override
    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are gathered to the first rank when read, at the masters' precision. Collective."""
        return dict(GatheredTensors(tensors, self._whole))

    def _whole(self, value: Tensor) -> Tensor:
        divided = hasattr(value, "ds_id")  # DeepSpeed marks the parameters that it shards
        # The masters have more bits than the tensors that the model computes with.
        if id(value) in self._trained and (divided or self._mixed):
            return self._taken(_started(self._partitions).gather_whole(value))  # type: ignore[arg-type]
        if divided:
            with self._gathering([value]):
                return self._taken(value)
        return value.detach()

    def _taken(self, whole: Tensor) -> Tensor:
        return whole.detach().to("cpu" if self._keeps else "meta", copy=True)

    # -- weights, in ---------------------------------------------------------------------------------------------------

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor], *, keep: Collection[str] = ()) -> None:
        own = self.local_state(model)
        known = match_names(own, state, keep, lambda part: tuple(getattr(part, "ds_shape", part.shape)))
        self._masters = {}
        for first, name in known.items():
            value = state[name]
            self._load(own[first], value)
            if self._partitions is not None and id(own[first]) in self._trained:
                self._partitions.store_part(own[first], value)  # type: ignore[arg-type]
            elif self._mixed and isinstance(own[first], nn.Parameter):
                self._masters[first] = value  # until there is an optimizer to hold it
        if self._partitions is not None:
            self._partitions.refresh_model()

    def _load(self, target: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            if not hasattr(target, "ds_id"):
                target.copy_(value)
            elif id(target) not in self._trained:
                # At the end of the block DeepSpeed sends rank 0's values to the other shards.
                with self._gathering([target], modifier_rank=0):
                    if self.comm.rank == 0:
                        target.copy_(value)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "zero_stage": self.plan.stage,
            "offload_optimizer": self.plan.offload_optimizer,
            "offload_param": self.plan.offload_param,
        }


def _started(part: Part | None) -> Part:
    if part is None:
        raise InfrastructureError("There is no engine: training has not started.", field="deepspeed")
    return part


def create_schedule(args: TrainingArguments, optimizer: torch.optim.Optimizer, num_training_steps: int) -> Any:
    """Return DeepSpeed's schedule if the configuration names one, else None."""
    named = plan(args).schedule
    if named is None:
        return None
    from deepspeed.runtime import lr_schedules

    kind, params = named
    settings = zero_config.schedule_settings(kind, params, args, num_training_steps)
    try:
        return getattr(lr_schedules, kind)(optimizer, **settings)
    except (TypeError, ValueError) as error:
        what = f"The schedule {kind} does not take these settings: {error}."
        remedy = "Correct them, or remove the scheduler from the configuration."
        raise ConfigError(what, field="deepspeed.scheduler.params", value=settings, remedy=remedy) from error


def _start(device: torch.device, plan: ZeroPlan) -> Any:
    """Import the package and let it use the process group that was formed already."""
    try:
        # On a CPU without a search for devices; the import itself sets these variables.
        choice = {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
        is_cpu = device.type == "cpu"
        with variables_kept(choice, "PYTORCH_NVML_BASED_CUDA_CHECK") if is_cpu else contextlib.nullcontext():
            import deepspeed
            from deepspeed.accelerator import get_accelerator, set_accelerator

            accelerator = get_accelerator()
    except ImportError as error:
        message = f"ZeRO needs the package deepspeed ({error})."
        raise MissingExtraError(message, field="deepspeed", extra="deepspeed") from error
    if device.type == "cpu":
        if accelerator.device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # DeepSpeed would compile an exchange through shared memory at its first use, for minutes; gloo needs none.
        # By import_module, because the attribute `torch` of that package is torch itself.
        exchange: Any = importlib.import_module("deepspeed.comm.torch")
        exchange.build_shm_op = lambda: None
    # A warning of torch about DeepSpeed's own calls, in every process: the user cannot act on it.
    warnings.filterwarnings("ignore", message="`torch.distributed.[a-z_]+` is deprecated", category=FutureWarning)
    if "log_level" not in plan.sections:
        deepspeed.utils.logger.setLevel(max(logging.WARNING, _log.getEffectiveLevel()))
    backend = torch.distributed.get_backend() if device.type == "cpu" else accelerator.communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(inner, dtype) for name, inner in value.items()}
    return type(value)(_cast(inner, dtype) for inner in value) if type(value) in (list, tuple) else value
