"""The loop behind `evaluate` and `predict`.

Every rank computes its share. Predictions go to rank 0 batch by batch and are spooled there in dataset order, so memory
stays flat in their number and in the number of ranks, and no padded duplicate is counted. `compute_metrics` runs on
rank 0, and its result is broadcast. The loss is the mean over all target items of the dataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_lib.base.outputs import EvalLoopOutput, EvalPrediction
from trainer_lib.data.loading.foreign import count_samples_of
from trainer_lib.data.loading.items import MAPPINGS, count_samples
from trainer_lib.data.loading.iterable import IterableLoader
from trainer_lib.data.loading.loader import EvalLoader, Micro, has_length
from trainer_lib.distributed.communicator import Communicator, leads
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.metrics import BatchMetrics, compute_on_rank_zero, is_metric_object, parse_metrics
from trainer_lib.evaluation.prediction_spool import ObjectSpool, PredictionSpool

if TYPE_CHECKING:
    from trainer_lib.trainer.evaluator import Evaluator
    from trainer_lib.trainer.trainer import Trainer


def iterate_rounds(loader: Any, comm: Communicator) -> Iterator[Micro]:
    """This rank's batches of any loader, equally many on every rank; a surplus one is None or a dummy, and not real."""
    if isinstance(loader, EvalLoader):
        batches = loader.own_batches()
        sizes = [stop - start for start, stop in loader.slices]
        every = itertools.zip_longest((next(batches, None) for _ in range(loader.rounds)), sizes, fillvalue=0)
        return (Micro(batch, batch is not None, size) for batch, size in every)
    if isinstance(loader, IterableLoader):
        return loader.rounds()
    return _deal_batches(loader, comm)


def _deal_batches(loader: Any, comm: Communicator) -> Iterator[Micro]:
    """Every rank reads the whole loader and keeps one batch of every round."""
    batches, share = iter(loader), comm.data_parallel
    while turn := list(itertools.islice(batches, share.size)):
        real = share.rank < len(turn)
        # Any batch of this round can serve as the dummy.
        batch = turn[share.rank if real else 0]
        yield Micro(batch, real, count_samples_of(loader, batch))


class EvaluationLoop:
    """One pass over a loader."""

    def __init__(
        self, hooks: Evaluator, *, loss_only: bool, ignore_keys: list[str] | None, keeps_predictions: bool = False
    ) -> None:
        self._hooks = hooks
        self._comm = hooks.internals.comm
        self._loss_only = loss_only
        self._ignore_keys = ignore_keys
        self._include = set(hooks.trainer.args.include_for_metrics)
        self._objects = hooks.trainer.args.eval_use_gather_object
        self._spool = (ObjectSpool if self._objects else PredictionSpool)(hooks.spool_folder())
        self._held: list[Any] = []
        self._loss: torch.Tensor | None = None
        self._items = 0
        self._samples = 0
        metric = None if loss_only else hooks.trainer.compute_metrics
        is_streamed = is_metric_object(metric) or (metric is not None and hooks.trainer.args.batch_eval_metrics)
        self._batch_metrics = BatchMetrics(metric, alone=hooks.internals.comm.world_size == 1) if is_streamed else None
        self._spools = not loss_only and (keeps_predictions or self._batch_metrics is None)

    def run(self, loader: Any, prefix: str) -> EvalLoopOutput:
        """Predict every batch and compute the metrics, whose names start with `prefix`. Collective.

        Predictions and labels, trees of arrays ``[samples, …]``, are returned on rank 0 where they are kept, metrics
        and the number of samples on every rank. A user's loader of length 0 gives neither predictions nor metrics:
        subclasses measure in another way then. Raises DataError for data without samples.
        """
        hooks, internals = self._hooks, self._hooks.internals
        if not isinstance(loader, EvalLoader | IterableLoader) and has_length(loader) and len(loader) == 0:
            return EvalLoopOutput(None, None, {}, 0)
        model = hooks.evaluation_model()
        try:
            # One round is read ahead: a stream shows its end only when the next read fails.
            end: list[Any] = [None]
            for micro, following in itertools.pairwise(itertools.chain(iterate_rounds(loader, self._comm), end)):
                if not micro.real and hooks.steps_together:
                    # The collectives of the other ranks' steps: forwards of sharded models, gathers of overrides.
                    dummy = loader.dummy_batch() if isinstance(loader, EvalLoader) else micro.batch
                    internals.accelerator.in_dummy_batch = True  # `gather_for_metrics` takes nothing of it
                    try:
                        hooks.trainer.prediction_step(model, dummy, self._loss_only, ignore_keys=self._ignore_keys)
                    finally:
                        internals.accelerator.in_dummy_batch = False
                # No variable holds the outputs: it would keep them alive while the next batch is computed.
                self._gather(
                    self._predict(model, micro.batch, micro.samples) if micro.real else None, last=following is None
                )
                internals.events.fire("on_prediction_step")
                if internals.stop is not None:  # in training, which all ranks may have agreed to stop
                    internals.stop.check_in_evaluation()
            return self._finish(prefix)
        finally:
            self._spool.close()

    def _predict(self, model: torch.nn.Module, batch: Any, given: int | None) -> Any:
        """The outputs of one batch as a tree of tensors ``[batch, …]``; adds its loss to the sum."""
        hooks = self._hooks
        items, samples = hooks.internals.forward.target_items(batch, given), count_samples(batch, given) or 0
        inputs = None
        if "inputs" in self._include and isinstance(batch, MAPPINGS):
            name = getattr(model, "main_input_name", "input_ids")
            inputs = nested.detach(batch.get(name, next(iter(batch.values()), None)))
        loss, logits, labels = hooks.trainer.prediction_step(
            model, batch, self._loss_only, ignore_keys=self._ignore_keys
        )
        self._samples += samples
        if loss is not None:
            # In double precision: float32 loses digits when thousands of batches are added. MPS has no float64.
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            weighted = loss.detach().to(wide).mean() * items
            self._loss = weighted if self._loss is None else self._loss + weighted
            self._items += items
        if self._loss_only:
            return {}
        if logits is not None and hooks.trainer.preprocess_logits_for_metrics is not None:
            logits = hooks.trainer.preprocess_logits_for_metrics(logits, labels)
        # One loss per sample: a batch's mean stands for all of its samples.
        losses = None
        if "loss" in self._include and loss is not None:
            losses = loss.detach().reshape(-1).expand(samples) if loss.numel() == 1 else loss.detach()
        return {"logits": logits, "labels": labels, "inputs": inputs, "losses": losses}

    def _gather(self, tree: Any, *, last: bool) -> None:
        """Keep outputs on the device for `eval_accumulation_steps` rounds, then send them to rank 0."""
        if self._loss_only:
            return
        self._held.append(tree)
        if len(self._held) < (self._hooks.trainer.args.eval_accumulation_steps or 1) and not last:
            return
        rounds, self._held = self._held, []
        if not leads(self._comm):
            rounds = []
        if self._comm.data_parallel.size > 1:
            packed = nested.pack_tree(rounds if self._objects else nested.to_numpy(rounds)) if rounds else b""
            ranks = [nested.unpack_tree(data) for data in self._comm.gather_bytes(packed) or () if data]
            # Round by round, and rank by rank within a round: that is the order of the dataset.
            rounds = [tree for turn in zip(*ranks, strict=True) for tree in turn if tree is not None]
        for number, tree in enumerate(rounds):
            if self._batch_metrics is not None:
                # From other ranks they come as arrays.
                tensors = tree if self._objects else nested.to_tensors(tree)
                self._batch_metrics.add(tensors, last=last and number == len(rounds) - 1)
            if not self._spools:
                continue
            joins = self._hooks.trainer.args.eval_do_concat_batches
            # Lists, such as a detector's labels, may be shorter in the last batch.
            if not joins and not self._spool.num_batches and _has_lists(tree):
                self._spool.close()
                self._spool = ObjectSpool(self._hooks.spool_folder())
            self._spool.append(tree)

    def _finish(self, prefix: str) -> EvalLoopOutput:
        comm, trainer = self._comm, self._hooks.trainer
        # The only wait for the device: the sum stayed there during the whole pass.
        total = 0.0 if self._loss is None else float(self._loss)
        # Summed on rank 0 and broadcast, so that every rank has the same digits.
        counted = comm.gather_json([total, self._items, self._samples] if leads(comm) else [0, 0, 0]) or []
        loss_sum, items, samples = comm.broadcast_json([sum(column) for column in zip(*counted, strict=True)])
        if samples == 0:
            remedy = "Give data that is not empty."
            raise DataError("There is nothing to evaluate.", field="eval_dataset", remedy=remedy)
        predictions = labels = None
        compute: Callable[[], dict[str, Any]] = dict if self._batch_metrics is None else self._batch_metrics.finish
        if self._spools and comm.rank == 0:
            joins, spool = trainer.args.eval_do_concat_batches, self._spool
            tree = spool.tree() if joins else _collect_columns(spool.by_batch())
            predictions, labels = tree["logits"], tree["labels"]
            measure = trainer.compute_metrics if self._batch_metrics is None else None
            if measure is not None and predictions is not None and labels is not None:
                given = EvalPrediction(predictions, labels, inputs=tree["inputs"], losses=tree["losses"])
                compute = partial(measure, given)
        metrics = {} if self._loss_only else compute_on_rank_zero(comm, compute)
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        if items:
            # A loss that compute_metrics returned wins.
            named.setdefault(f"{prefix}_loss", loss_sum / items)
        return EvalLoopOutput(predictions, labels, parse_metrics(named), int(samples))


def _has_lists(tree: Any) -> bool:
    parts = tree.values() if isinstance(tree, MAPPINGS) else tree if isinstance(tree, tuple) else ()
    return isinstance(tree, list) or any(_has_lists(part) for part in parts)


def _collect_columns(batches: list[Any]) -> dict[str, Any]:
    columns = {name: [batch[name] for batch in batches] for name in ("logits", "labels", "inputs", "losses")}
    return {name: None if column and column[0] is None else column for name, column in columns.items()}


def stream_predictions(
    trainer: Trainer, dataset: Any, *, start: int, stop: int
) -> Iterator[tuple[npt.NDArray[np.int64], Any]]:
    """Predict rows [start, stop) of `dataset` on this process alone, whatever the world size. Raises ConfigError.

    Yields row positions ``[batch]`` (int64) and predictions, a tree of arrays ``[batch, …]``, in row order. Nothing is
    communicated, so ranks may stream ranges of unequal length. Memory holds one batch.
    """
    if not has_length(dataset):
        what = "A dataset without a length cannot be predicted by ranges."
        raise ConfigError(what, field="dataset", value=type(dataset).__name__, remedy="Give map-style data.")
    # Alone: the ranks have different numbers of rows, so they must not wait for each other.
    evaluator = trainer._trainflow.evaluator
    model = evaluator.evaluation_model(alone=True)
    loader = trainer._trainflow.loaders.range_loader(dataset, start, min(stop, len(dataset)))
    for (first, end), batch in zip(loader.slices, loader, strict=True):
        _, logits, labels = evaluator.trainer.prediction_step(model, batch, False, ignore_keys=None)
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        yield np.arange(first, end, dtype=np.int64), nested.to_numpy(logits)
