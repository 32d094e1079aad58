"""SIGTERM from outside, in any phase: one step on all ranks, committed, and the run goes on from it bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from torch._dynamo.backends import registry

from tests.support.distributed import run_distributed
from tests.support.toys import Augmented, Classifier, classification_rows
from tests.support.training import LOGGED, accuracy, assert_equal, final_state, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import find_newest_intact
from trainer_lib.errors import Preempted
from trainer_lib.storage import Store

LIMIT_S = 30.0


class Phase:
    """One moment, in a folder that the test watches. Only the process of `rank` stops there, and only once."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self.was_reached = False

    def reached(self, *_: Any) -> None:
        """Report that the phase is reached and wait for the signal."""
        if self.was_reached or os.environ.get("RANK", "0") != str(self._rank):
            return
        self.was_reached = True
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / "pid.tmp"
        draft.write_text(str(os.getpid()))
        draft.rename(self._folder / "pid")
        deadline = time.monotonic() + LIMIT_S
        while not (self._folder / "sent").exists():
            assert time.monotonic() < deadline, "nobody sent a signal"
            time.sleep(0.005)


class Signaller:
    """Sends a signal, once per folder below `root`, to the process that reports its phase."""

    def __init__(self, root: Path, number: signal.Signals = signal.SIGTERM) -> None:
        self._root = root
        self._number = number
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signaller")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            for pid in self._root.glob("*/pid"):
                sent = pid.with_name("sent")
                if not sent.exists():
                    os.kill(int(pid.read_text()), self._number)
                    sent.touch()


ROWS = classification_rows(22)
GIVEN: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
GIVEN |= {"global_batch_size": 8, **LOGGED}  # three steps an epoch, the last of six samples
GIVEN |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
EVENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end"),
    *("on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end"),
)
ON_RANK_0 = ("compute_metrics", "writing", "committing")  # elsewhere the last rank is told
INSIDE = ("data", "forward", "evaluating", "compile", *ON_RANK_0)  # between events: test_exact_resume.py has those
PHASES = (*EVENTS, *INSIDE)


class Model(Classifier):
    """Comes to a phase in its forward."""

    phase: Phase | None = None
    in_training = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.phase is not None and self.training is self.in_training:
            self.phase.reached()
        return super().forward(x, labels)


class Data(Augmented):
    """Comes to a phase while an item is read."""

    phase: Phase | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.phase is not None and len(self.read) > 8:
            self.phase.reached()
        return super().__getitem__(index)


@contextlib.contextmanager
def in_the_writer(name: str, phase: Phase) -> Iterator[None]:
    """The phase is reached when a function of the writer is called: in training's thread, or beside it."""
    function = getattr(writer, name)

    def held(*args: Any) -> Any:
        phase.reached()
        return function(*args)

    setattr(writer, name, held)
    try:
        yield
    finally:
        setattr(writer, name, function)


def with_event(event: str, phase: Phase) -> TrainerCallback:
    callback = TrainerCallback()
    from_step = 0 if event in ("on_train_begin", "on_epoch_begin") else 2

    def reached(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= from_step:
            phase.reached()

    setattr(callback, event, reached)
    return callback


def measuring(phase: Phase) -> Callable[[Any], dict[str, float]]:
    def measure(p: Any) -> dict[str, float]:
        phase.reached()
        return accuracy(p)

    return measure


def fresh(folder: Path, kind: str | None, phase: Phase | None, *, save_async: bool) -> Trainer:
    """A Trainer that comes to `phase`."""
    torch.manual_seed(0)
    model, data = Model(), Data(ROWS)
    callbacks: list[TrainerCallback] = []
    metrics: Callable[[Any], dict[str, float]] = accuracy
    more: dict[str, Any] = {}
    if kind == "compile":
        more = {"torch_compile": True, "torch_compile_backend": "holding"}
    if phase is not None:
        if kind in EVENTS:
            callbacks.append(with_event(kind, phase))
        elif kind in ("forward", "evaluating"):
            model.phase, model.in_training = phase, kind == "forward"
        elif kind == "data":
            data.phase = phase
        elif kind == "compute_metrics":
            metrics = measuring(phase)
    return trainer(
        folder, data, model=model, eval_dataset=ROWS[:7], callbacks=callbacks, compute_metrics=metrics, **GIVEN, **more,
        save_async=save_async,
    )  # fmt: skip


def compiling(phase: Phase | None) -> None:
    """Register a compiler that compiles nothing, slowly."""

    def compile_slowly(graph: Any, inputs: Any) -> Any:
        if phase is not None:
            phase.reached()
        return graph.forward

    torch._dynamo.reset()
    registry._BACKENDS.pop("holding", None)
    registry._COMPILER_FNS.pop("holding", None)
    registry.register_backend(compile_slowly, name="holding")


def stopped_and_resumed(folder: str, kind: str, *, save_async: bool) -> tuple[int, dict[str, Any]]:
    """Train into a stop at that phase and go on: (the step that was saved, what it ended with)."""
    rank = 0 if kind in ON_RANK_0 else int(os.environ["WORLD_SIZE"]) - 1
    phase, out = Phase(Path(folder) / kind, rank), Path(folder) / f"out-{kind}"
    hold = {"writing": "_write_shared", "committing": "_commit"}.get(kind)
    compiling(phase if kind == "compile" else None)
    with in_the_writer(hold, phase) if hold else contextlib.nullcontext():
        one = fresh(out, kind, phase, save_async=save_async)
        try:
            one.train()
            raise AssertionError(f"{kind}: was not stopped")
        except Preempted as stop:
            step = int(stop.step or 0)
        except BaseException as error:
            error.add_note(f"in phase {kind}")
            raise
    found = find_newest_intact(Store.open(out), on_damage=pytest.fail)
    assert found is not None and found.step == step, kind
    one._trainflow.comm.barrier()
    compiling(None)
    resumed = fresh(out, kind, None, save_async=save_async)
    resumed.train("auto")
    return step, final_state(resumed)


def through(folder: str, kinds: tuple[str, ...], save_async: bool) -> dict[str, Any]:
    """Every phase in turn; the run that nobody stops beside them."""
    compiling(None)
    result: dict[str, Any] = {}
    for kind in ("compile", None) if "compile" in kinds else (None,):
        whole = fresh(Path(folder) / f"whole-{kind}", kind, None, save_async=False)
        whole.train()
        result[f"whole-{kind}"] = final_state(whole)
    for kind in kinds:
        result[kind] = stopped_and_resumed(folder, kind, save_async=save_async)
    return result


@pytest.mark.parametrize(("world", "save_async", "kinds"), [(1, False, INSIDE), (2, True, PHASES)])
def test_stopped_in_any_phase(world: int, save_async: bool, kinds: tuple[str, ...], tmp_path: Path) -> None:
    with Signaller(tmp_path):
        ranks = run_distributed(through, world, str(tmp_path), kinds, save_async, timeout_s=180)
    for kind in kinds:
        steps = {one[kind][0] for one in ranks}
        assert len(steps) == 1, f"{kind}: the ranks stopped at {steps}"
        for one in ranks:
            assert_equal(one["whole-compile" if kind == "compile" else "whole-None"], one[kind][1])
