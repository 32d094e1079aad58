"""The verb *probe*: a few real steps, an evaluation of a few rows and a save, with the clock running."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from trainer_lib.base.memory import read_peak_bytes
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.protocol.footprint import Probe
from trainer_lib.protocol.requests import ProbeRequest
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import Store
from trainer_lib.worker.process.assembly import arguments, build_model, build_trainer, leave_together
from trainer_lib.worker.process.session import Work

WARM_UP = 3  # steps that are not measured: allocators fill, kernels are chosen, libraries are imported


class _Clock(TrainerCallback):
    """When each thing ended, in seconds of a clock that only goes forward."""

    def __init__(self) -> None:
        self.began = 0.0
        self.steps: list[float] = []
        self.evaluated: float | None = None
        self.saved: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(time.monotonic())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()


def run(work: Work[ProbeRequest]) -> Probe | None:
    """Train a few steps in the request's folder, which its owner removes. The result is complete on rank 0."""
    request = work.request
    output = Store.open(request.output, field="storage")
    args = arguments(work, "train", output.url)
    rows: Any = None
    if request.eval_split:
        split: Any = ArrowSplit(work.prepared, request.eval_split)
        rows = torch.utils.data.Subset(split, range(min(len(split), request.rows)))
    model, clock = build_model(work, args, DataInfo(work.prepared)), _Clock()
    train_set = ArrowSplit(work.prepared, request.train_split)
    trainer = build_trainer(work, args, model, [clock], train_dataset=train_set, eval_dataset=rows)
    trainer.train()
    peaks = trainer._trainflow.comm.gather_json(read_peak_bytes(trainer._trainflow.world.device))
    result = _result(clock, 0 if rows is None else len(rows), max(peaks), output, args) if work.rank == 0 else None
    leave_together(trainer)
    return result


def _result(clock: _Clock, rows: int, peak: int, output: Store, args: Any) -> Probe:
    times = [later - earlier for earlier, later in zip([clock.began, *clock.steps], clock.steps, strict=False)]
    measured = times[WARM_UP:] or times
    step_s = statistics.median(measured)
    ended = clock.steps[-1]
    evaluated = None if clock.evaluated is None else clock.evaluated - ended
    checkpoints = list_checkpoints(output)
    saved = None if clock.saved is None or not checkpoints else clock.saved - (clock.evaluated or ended)
    return Probe(
        steps=len(measured),
        step_s=step_s,
        warm_up_s=max(0.0, sum(times[:WARM_UP]) - WARM_UP * step_s),
        evaluation_row_s=None if evaluated is None or not rows else evaluated / rows,
        save_s=saved,
        checkpoint_bytes=sum(entry.size for entry in checkpoints[0].commit.files) if checkpoints else None,
        peak_bytes=peak,
        device=args.device.type,
        overhead_s=0.0,
    )
