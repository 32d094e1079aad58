"""The verb *estimate*: what training would take, from the model's shapes alone.

The model is built on torch's "meta" device, which holds no values, and a step is run on fake tensors, which have a
shape and a device and no memory. torch's own tracker counts what they would take.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import accumulation_steps, rows_at_a_time
from trainer_lib.arguments.configs.parallelism_config import data_size, read_layout, settings_of
from trainer_lib.base.memory import read_resident_bytes
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.distributed.communicator import choose_device
from trainer_lib.errors import TrainflowError, first_line
from trainer_lib.protocol.footprint import Estimate, ModelSize
from trainer_lib.protocol.requests import EstimateRequest
from trainer_lib.recipes import DataInfo
from trainer_lib.strategies.fsdp import find_units
from trainer_lib.trainer.model.models import numbers_in
from trainer_lib.trainer.model.source_losses import take_sources
from trainer_lib.worker.process.assembly import arguments, build_model, build_trainer
from trainer_lib.worker.process.session import Work

_ALONE = {  # what a process alone does without, and what an estimate must not do
    "fsdp": "",
    "fsdp_config": None,
    "deepspeed": None,
    "parallelism": None,
    "parallelism_config": None,
    "torch_compile": False,
    "push_to_hub": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "eval_on_start": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "report_to": "none",
    "global_batch_size": None,
    "gradient_accumulation_steps": 1,
    "accelerator_config": None,
}
_LOOKED_AT = 4  # batches whose tokens are counted


def run(work: Work[EstimateRequest]) -> Estimate | None:
    """Estimate on rank 0, which is the only one."""
    if work.rank != 0:
        return None
    train_set = ArrowSplit(work.prepared, work.request.train_split)
    eval_set = ArrowSplit(work.prepared, work.request.eval_split) if work.request.eval_split else None
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        given = arguments(work, "train", folder)
        shares = data_size(given, work.request.processes)
        micro_batch = rows_at_a_time(given, data_parallel_size=shares)
        args = arguments(_alone(work, micro_batch), "train", folder)
        train_set[0]  # as a process that is about to build its model has read
        process_bytes = read_resident_bytes()
        device = choose_device(use_cpu=args.use_cpu)
        notes: list[str] = []
        model = _build_without_values(work, args, DataInfo(work.prepared), notes)
        gathered, divided = _gathered_bytes(model, given), _divided_bytes(model, given)
        sizes = _Sizes(work, args, _on_fake_device(model, device), train_set, eval_set, notes)
        micro_batches = accumulation_steps(given, data_parallel_size=shares)
        size = replace(sizes.measure(micro_batches, gathered), micro_batch=micro_batch, divided_bytes=divided)
    return Estimate(size, process_bytes, sizes.tokens_per_sample, device.type, tuple(notes))


def _alone(work: Work[EstimateRequest], micro_batch: int) -> Work[EstimateRequest]:
    """The work with the arguments of one process that trains on the micro-batch of a rank."""
    own = {**_ALONE, "per_device_train_batch_size": micro_batch}
    kept = {name: value for name, value in work.request.args.items() if name not in own}
    return replace(work, request=replace(work.request, args={**kept, **own}))


def _build_without_values(
    work: Work[EstimateRequest], args: TrainingArguments, data: DataInfo, notes: list[str]
) -> nn.Module:
    """The recipe's model on the meta device, or with values where its code needs them."""
    try:
        with torch.device("meta"):
            return build_model(work, args, data)
    except (TrainflowError, RuntimeError, NotImplementedError):
        model = build_model(work, args, data)
    notes.append("The model was built with its weights: its code does not work without values.")
    return model


def _gathered_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """The parameters that FSDP has whole at one time: the largest unit, and those that are in no unit."""
    settings = settings_of(args)
    if settings is not None:
        units = find_units(model, settings)
    else:  # what people choose as units: the layers that a model repeats
        units = [layer for parent in model.modules() if isinstance(parent, nn.ModuleList) for layer in parent]
    layout = read_layout(args)
    expert = 1 if layout is None else layout.expert
    sent = set[int]()
    if expert > 1:
        from trainer_lib.strategies.tensor.tensor_strategy import expert_parameters, plan_experts

        for name in plan_experts(model, expert):
            sent |= set(map(id, expert_parameters(model.get_submodule(name)).values()))

    def gathered(params: Iterable[nn.Parameter]) -> int:
        # Experts that are sent tokens are gathered among those that hold rows of the same ones.
        return sum(_bytes(param) // (expert if id(param) in sent else 1) for param in params)

    within = {id(param) for unit in units for param in unit.parameters()}
    rest = gathered(param for param in model.parameters() if id(param) not in within)
    return rest + max((gathered(unit.parameters()) for unit in units), default=0)


def _divided_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """The parameters in layers that the layout divides. Raises ConfigError where they cannot be divided."""
    layout = read_layout(args)
    if layout is None or layout.tensor == 1:  # experts that are sent tokens are held as shards are
        return 0
    from trainer_lib.strategies.tensor.layers import plan_layers

    styles = plan_layers(model, layout.plan, layout.tensor)
    layers = [model.get_submodule(name) for name, style in styles.items() if not style.startswith("replicated")]
    return sum({id(param): _bytes(param) for layer in layers for param in layer.parameters()}.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_fake_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with fake parameters and buffers on `device`; tied ones stay tied."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    with _mode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(fake(parameter.data), parameter.requires_grad)
                    module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = made.setdefault(id(buffer), fake(buffer))
    # It is where it should be, and torch cannot exchange the data of fake tensors.
    model.to = lambda *_, **__: model  # type: ignore[method-assign]
    return model


@cache
def _mode() -> Any:
    """The one mode for all: fake tensors of two modes do not mix."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


class _Sizes:
    """Runs a step, and a batch of evaluation, on fake tensors."""

    def __init__(
        self,
        work: Work[EstimateRequest],
        args: TrainingArguments,
        model: nn.Module,
        train_set: ArrowSplit,
        eval_set: ArrowSplit | None,
        notes: list[str],
    ) -> None:
        self._model, self._notes = model, notes
        self._eval_set = eval_set
        self._trainer = build_trainer(work, args, model, [], train_dataset=train_set, eval_dataset=eval_set)
        batches = islice(self._trainer.get_train_dataloader(), _LOOKED_AT)
        self._batches = [take_sources(batch)[0] for batch in batches]

    @property
    def tokens_per_sample(self) -> float | None:
        """Whole numbers of the main input for each sample; None where that holds no tokens."""
        name = self._trainer._trainflow.facts.main_input
        found = [batch.get(name) for batch in self._batches if hasattr(batch, "get")]
        tokens = [ids for ids in found if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()]
        samples = sum(len(ids) for ids in tokens)
        return sum(ids.numel() for ids in tokens) / samples if samples else None

    def measure(self, micro_batches: int, gathered: int) -> ModelSize:
        """Run two steps of at most two micro-batches each, as the second of both has everything in memory."""
        parameters = list(self._model.parameters())
        trained = [param for param in parameters if param.requires_grad]
        buffers = sum(_bytes(buffer) for buffer in self._model.buffers())
        weights, gradients = sum(map(_bytes, parameters)), sum(map(_bytes, trained))
        optimizer_bytes, peak = None, None
        with self._noted("The memory of a step"):
            optimizer_bytes, peak = self._train(min(micro_batches, 2))
        fixed = weights + buffers + gradients + (optimizer_bytes or 0)
        evaluation = None
        if self._eval_set is not None:
            with self._noted("The memory of evaluation"):
                evaluation = max(0, self._evaluate() - weights - buffers)
        persistent = {id(tensor): _bytes(tensor) for tensor in self._model.state_dict(keep_vars=True).values()}
        return ModelSize(
            parameters=sum(map(numbers_in, parameters)),
            trainable=sum(param.numel() for param in trained),
            parameter_bytes=weights + buffers,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=None if peak is None else max(0, peak - fixed),
            evaluation_bytes=evaluation,
            gathered_bytes=gathered,
            stored_bytes=sum(persistent.values()),
        )

    def _train(self, micro_batches: int) -> tuple[int, int]:
        """(bytes of the optimizer's state, bytes at the peak of everything)."""
        trainer = self._trainer
        trainer._trainflow.model.prepare()
        batches = [self._faked(self._batches[index % len(self._batches)]) for index in range(micro_batches)]
        with _mode():
            optimizer = trainer.create_optimizer()

            def steps(tracker: Any) -> None:
                for _ in range(2):
                    for batch in batches:
                        tracker.reset_mod_stats()  # it knows one call of each module
                        trainer.training_step(self._model, batch)
                    optimizer.step()
                    optimizer.zero_grad()

            peak = self._tracked(steps, batches, optimizer)
        state = [
            tensor for values in optimizer.state.values() for tensor in values.values() if isinstance(tensor, Tensor)
        ]
        return sum(map(_bytes, state)), peak

    def _evaluate(self) -> int:
        trainer = self._trainer
        batch = self._faked(next(iter(trainer.get_eval_dataloader(self._eval_set))))
        self._model.eval()

        def predict(_: Any) -> None:
            _, logits, labels = trainer.prediction_step(self._model, batch, prediction_loss_only=False)
            if trainer.preprocess_logits_for_metrics is not None:
                trainer.preprocess_logits_for_metrics(logits, labels)

        with _mode(), torch.no_grad():
            return self._tracked(predict, [batch], None)

    def _tracked(self, work: Callable[[Any], None], batches: list[Any], optimizer: Any) -> int:
        """The peak of what is in memory while `work` runs, in bytes, with the model and what is given."""
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        given = [leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor)]
        tracker.track_external(self._model, *([] if optimizer is None else [optimizer]), *given)
        with tracker:
            work(tracker)
        return sum(int(device_bytes["Total"]) for device_bytes in tracker.get_tracker_snapshot("peak").values())

    def _faked(self, batch: Any) -> Any:
        device = self._trainer._trainflow.world.device
        with _mode():
            return tree_map_only(
                Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device), batch
            )

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Say what is missing where the user's code, or torch, cannot work on fake tensors."""
        try:
            yield
        except Exception as error:  # whatever a model's code raises without values: the rest of the estimate stands
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._notes.append(f"{what} could not be worked out without values ({reason}); --probe measures it.")
