"""What every part of the Trainer shares: construction, attributes, callbacks, ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib import distributed
from trainer_lib.arguments import TrainingArguments, launched
from trainer_lib.arguments.accelerator_config import BatchSettings
from trainer_lib.callbacks.base import CallbackHandler, TrainerCallback
from trainer_lib.callbacks.flow import DefaultFlowCallback
from trainer_lib.callbacks.progress_bar import PrinterCallback, ProgressCallback
from trainer_lib.data.collators import DataCollatorWithPadding, default_data_collator
from trainer_lib.errors import ConfigError
from trainer_lib.hub.publisher import Publisher
from trainer_lib.memory import MemoryTracker
from trainer_lib.precision import apply_tf32
from trainer_lib.search.trials import TrialRunner
from trainer_lib.state import ExportableState, TrainerControl, TrainerState
from trainer_lib.strategies.base import Strategy
from trainer_lib.trackers.vendors import reporters
from trainer_lib.trainer import checks, models
from trainer_lib.trainer.facade import AcceleratorFacade
from trainer_lib.trainer.inspecting import ForwardInfo, takes, takes_positionals, takes_trial
from trainer_lib.trainer.losses import LabelSmoother
from trainer_lib.trainer.micro_batch_search import MicroBatchSearch
from trainer_lib.trainer.nodes import NodeView
from trainer_lib.trainer.overrides import refuse_uncalled
from trainer_lib.trainer.seeding import enable_full_determinism, set_seed

if TYPE_CHECKING:
    from trainer_lib.checkpoint.background import BackgroundSaver
    from trainer_lib.trainer.run import TrainingRun
    from trainer_lib.trainer.stop import StopRequest

_log = logging.getLogger(__name__)


def create_strategy(args: TrainingArguments, device: torch.device, comm: distributed.Communicator) -> Strategy:
    """The strategy for these arguments and this world; its own file is imported only when it is the one."""
    if args.deepspeed is not None:
        from trainer_lib.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(device, comm, args)
    if args.fsdp:
        from trainer_lib.strategies.fsdp.fsdp_strategy import FsdpStrategy

        return FsdpStrategy(device, comm, args)
    if comm.world_size > 1:
        from trainer_lib.strategies.ddp import DdpStrategy

        return DdpStrategy(device, comm, args)
    from trainer_lib.strategies.single import SingleStrategy

    return SingleStrategy(device, comm)


def settle_arguments(args: TrainingArguments) -> None:
    """Bring what a strategy's own configuration decides into `args`; refuse what this machine cannot serve of it."""
    if args.deepspeed is not None:
        from trainer_lib.strategies.deepspeed.zero_config import resolve_config

        resolve_config(args)


def _group_formed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class TrainerBase:
    """Construction and common ground; `Trainer` is the public class."""

    _arguments_class: type[TrainingArguments] = TrainingArguments
    _serves_seq2seq = False

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        refuse_uncalled(type(self))
        self._set_up_process(self._arguments_class(output_dir="tmp_trainer") if args is None else args)
        distributed.mention_idle_gpus(self.device, self.comm.world_size)
        self.model_init = model_init
        self.processing_class = checks.processing_class(processing_class, tokenizer)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = self._given_optimizers = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator or self._default_collator()
        self._set_up_state()
        with self._memory_tracker.stage("init"):
            self.model = self._given_model(model)
            self.model_wrapped = self.model
            self._look_at_model()
            checks.trainer(self)
            self._trainflow_publisher.prepare_target()
            self._create_callbacks(callbacks or ())

    def _set_up_process(self, args: TrainingArguments) -> None:
        """Everything that follows from the arguments alone: ranks, device, seeds, strategy, precision."""
        launched.adopt(args)
        checks.refuse_unserved(args, serves_seq2seq=self._serves_seq2seq)
        settle_arguments(args)
        self.args = args
        # A new search for each set of arguments: a trial's micro-batch says nothing about the next one's.
        self._trainflow_micro_batches: MicroBatchSearch = MicroBatchSearch(self)  # type: ignore[arg-type]
        self._batching = BatchSettings.of(args.accelerator_config)
        self._batching.check_state(world_size=distributed.ranks_from_environment().world_size, formed=_group_formed())
        self.comm: distributed.Communicator = distributed.init(args)
        # The ranks that share output_dir, as a world of their own.
        self._disk: distributed.Communicator = NodeView(self.comm) if args.save_on_each_node else self.comm
        self.device: torch.device = distributed.choose_device(use_cpu=args.use_cpu)
        logging.getLogger("trainer_lib").setLevel(args.get_process_log_level())
        # Before model_init is called: initial weights are part of what the seed fixes.
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        apply_tf32(args)
        self.strategy = create_strategy(args, self.device, self.comm)
        self.precision = self.strategy.precision(args)
        self.accelerator = AcceleratorFacade(self)
        self.label_smoother = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor > 0 else None
        self._eval_loaders: dict[str, Any] = {}
        self._memory_tracker: MemoryTracker = MemoryTracker(enabled=not args.skip_memory_metrics, device=self.device)

    def _set_up_state(self) -> None:
        self.is_in_train = False
        self.is_model_parallel = False
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.current_flos = 0.0
        self.hp_name: Callable[[Any], str] | None = None
        self.hp_space: Callable[[Any], Any] | None = None
        self.compute_objective: Callable[[dict[str, float]], Any] | None = None
        self.hp_search_backend: str | None = None
        self.objective: list[float] | None = None
        self._trial: Any = None
        self._items_used = False
        self._past: Any = None
        self._run: TrainingRun | None = None
        self._stop: StopRequest | None = None
        self._saver: BackgroundSaver | None = None
        self._held = contextlib.ExitStack()
        self._frozen: tuple[nn.Module, str | None] | None = None
        self._caches: list[tuple[Any, Any]] = []
        self._own_checkpoints: set[str] = set()
        self._trainflow_publisher: Publisher = Publisher(self)  # type: ignore[arg-type]
        self._trainflow_trials: TrialRunner = TrialRunner(self, takes_trial=takes_trial)  # type: ignore[arg-type]
        self._trained_before = False
        self._inspect_overrides()

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        if callable(getattr(self.processing_class, "pad", None)):
            return DataCollatorWithPadding(self.processing_class)
        return default_data_collator

    def _given_model(self, model: nn.Module | None) -> nn.Module:
        if model is None and self.model_init is None:
            raise ConfigError("Neither was given.", field="model or model_init", remedy="Give one of them.")
        if model is not None and self.model_init is not None:
            raise ConfigError("Both were given.", field="model and model_init", remedy="Give one of them.")
        if model is None:
            model = self.call_model_init()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "is not a torch.nn.Module.", field="model", value=type(model).__name__, remedy="Give a module."
            )
        models.refuse_untrainable(model)
        self.is_model_parallel = models.is_spread(model, self.device)
        stays = self.is_model_parallel or models.is_placed(model) or self.strategy.places_model
        self.place_model_on_device = self.args.place_model_on_device and not stays
        if self.place_model_on_device:
            self._move_model_to_device(model, self.device)
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from `model_init`, which takes nothing or the trial of a search."""
        if self.model_init is None:
            raise ConfigError("is needed here.", field="model_init", remedy="Give it to the Trainer.")
        init = self.model_init
        model = self.strategy.build(lambda: init(trial) if takes_trial(init) else init())
        if not isinstance(model, nn.Module):
            raise ConfigError("gave no model.", field="model_init", value=model, remedy="Return a torch.nn.Module.")
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        model.to(device)

    def _look_at_model(self) -> None:
        self._forward = ForwardInfo.of(self.model, self.args.label_names)
        self.label_names = list(self._forward.labels)
        self.can_return_loss = self._forward.returns_loss
        self._main_input = getattr(self.model, "main_input_name", "input_ids")
        self._flos_per_item = 6 * models.non_embedding_parameters(self.model, self.strategy.numel)
        self._counts_flos = getattr(self.model, "floating_point_ops", None)
        models.check_settings(self.model, self.args)
        self.strategy.check_model(self.model)
        config = getattr(self.model, "config", None)
        self._ignored_outputs = list(getattr(config, "keys_to_ignore_at_inference", None) or ())
        problem = getattr(config, "problem_type", None)
        if self.label_smoother is not None and problem == "multi_label_classification":
            _log.warning("label_smoothing_factor has no effect: labels that exclude one another it needs.")
            self.label_smoother = None

    def _inspect_overrides(self) -> None:
        # Five ages of subclasses: what an override takes is found once, not at every step.
        self._compute_loss_takes_items = takes(self.compute_loss, "num_items_in_batch")  # type: ignore[attr-defined]
        self._compute_loss_takes_outputs = takes(self.compute_loss, "return_outputs")  # type: ignore[attr-defined]
        self._training_step_takes_items = takes_positionals(self.training_step, 3)  # type: ignore[attr-defined]
        self._log_takes_start = takes_positionals(self.log, 2)  # type: ignore[attr-defined]
        func = self.compute_loss_func
        self._loss_func_takes_items = func is not None and takes(func, "num_items_in_batch")

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def _create_callbacks(self, given: Sequence[TrainerCallback | type[TrainerCallback]]) -> None:
        own: list[TrainerCallback | type[TrainerCallback]] = [DefaultFlowCallback]
        reporting = reporters(self.args.report_to or ())  # on every rank: what cannot be served is refused by all
        own += reporting if self.comm.rank == 0 else []
        shown = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        self.callback_handler = CallbackHandler(
            [*own, *given, shown], self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._stateful_callbacks(),
        )
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def _stateful_callbacks(self) -> list[ExportableState]:
        return [each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)]

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback (an instance, or a class to instantiate) after the present ones."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback, or the first of a class; None when there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    # -- batch sizes --------------------------------------------------------------------------------------------------

    @property
    def _train_batch_size(self) -> int:
        """Samples that this process trains on at a time: as the arguments say, or fewer where memory was short."""
        given, shares = self.args.train_batch_size, self.comm.data_parallel.size
        size = self._batching.share(given, shares, field="per_device_train_batch_size")
        return self._trainflow_micro_batches.limit(size)

    @property
    def _eval_batch_size(self) -> int:
        """Samples that this process evaluates at a time."""
        given, shares = self.args.eval_batch_size, self.comm.data_parallel.size
        return self._batching.share(given, shares, field="per_device_eval_batch_size")

    # -- ranks --------------------------------------------------------------------------------------------------------

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.comm.local_rank == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of the whole job."""
        return self.comm.rank == 0

    @property
    def _sorts_by_length(self) -> bool:
        return self.args.train_sampling_strategy == "group_by_length"

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP shards the model; what overridden methods ask before they gather parameters."""
        return self.strategy.name == "fsdp"

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed trains the model."""
        return self.strategy.name == "deepspeed"

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine; None before training, and without it."""
        return getattr(self.strategy, "engine", None)

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class`."""
        return self.processing_class
