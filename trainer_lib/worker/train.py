"""The verb *train*: from the newest good checkpoint, or the start, to an exported model."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.arguments.numeric import numeric_fields
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.memory import read_peak_bytes
from trainer_lib.base.outputs import utilization
from trainer_lib.base.suggestions import number_words
from trainer_lib.callbacks.base import EarlyStoppingCallback, TrainerCallback
from trainer_lib.callbacks.stragglers import StragglerCallback
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.data.loading.mixture_order import MixtureOrder
from trainer_lib.data.rows.mixture import INFO
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError, Preempted, PreemptedByNotice, StorageError
from trainer_lib.protocol.requests import MIXTURE_CHANGE, Preemption, TrainRequest, TrainResult
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import FileEntry, Store
from trainer_lib.trainer.model.models import describe_base, innermost, is_adapted, is_transformers, numbers_in
from trainer_lib.worker.process.assembly import (
    BASE,
    add_metrics,
    arguments,
    build_model,
    build_trainer,
    events_callback,
    leave_together,
)
from trainer_lib.worker.process.session import Work

if TYPE_CHECKING:
    from trainer_lib.state import TrainerControl, TrainerState
    from trainer_lib.trainer import Trainer

_ANSWER_BYTES = 1 << 16
_DELIVER_S = 0.2  # between two tries to deliver a notice
_log = logging.getLogger(__name__)


class ProofCallback(TrainerCallback):
    """Sends this process the signal that ends it, as a scheduler or the kernel would; saves where training ends.

    Every rank has one, so all are hit at the same step. It reads no tensor and draws no random number.
    """

    def __init__(self, stop_at: int | None, *, kill: bool) -> None:
        self._stop_at = stop_at
        self._signal = signal.SIGKILL if kill else signal.SIGTERM

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Send the signal at its step; save the last step, whatever the interval."""
        if state.global_step == self._stop_at:
            self._stop_at = None
            os.kill(os.getpid(), self._signal)
        # A proof compares final checkpoints, and the interval of saves may miss the last step.
        if state.global_step >= state.max_steps or control.should_training_stop:
            control.should_save = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save where an evaluation ends the training (early stopping)."""
        if control.should_training_stop:
            control.should_save = True


# -- notice that this machine is about to be taken away ---------------------------------------------------------------
# Clouds give such notice 30 s to two minutes ahead, through their metadata servers; batch systems run a command or make
# a file. A thread asks every few seconds, so the work itself never waits for an answer.


def find_notice(asked: Preemption) -> str | None:
    """Look once; what gave the notice, as a clause, or None. Raises OSError, HTTPException and ValueError."""
    if asked.file is not None and Path(asked.file).exists():
        return f"the file {asked.file} is there"
    if asked.command and _succeeds(asked.command, asked.timeout_s):
        return f"{asked.command[0]} exited with 0"
    if asked.url is not None and _answers(asked, asked.url):
        return f"{asked.url} answered"
    return None


def _succeeds(command: tuple[str, ...], timeout_s: float) -> bool:
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    except OSError:
        return False
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        # Its whole group: a shell's child would stay.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def _answers(asked: Preemption, url: str) -> bool:
    import urllib.request

    class Refuse(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *given: Any, **more: Any) -> None:
            """Answer None: a redirect is not an answer."""

    # Metadata servers are on the machine itself: never through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Refuse)
    request = urllib.request.Request(url, headers={"Connection": "close", **asked.headers})  # noqa: S310  # the user's
    try:
        with opener.open(request, timeout=asked.timeout_s) as answer:
            text = answer.read(_ANSWER_BYTES).decode(errors="replace")
            return answer.status == 200 and (asked.contains is None or asked.contains in text)
    except OSError:
        return False


class NoticeWatch(threading.Thread):
    """Looks for a notice until one is given, and calls `deliver`, again until it returns True.

    `notice`: what gave it; None so far.
    """

    def __init__(self, asked: Preemption, deliver: Callable[[], bool]) -> None:
        super().__init__(name="trainflow-preemption", daemon=True)
        self._asked = asked
        self._deliver = deliver
        self._done = threading.Event()
        self.notice: str | None = None

    @override
    def run(self) -> None:
        warned = False
        while True:
            try:
                self.notice = find_notice(self._asked)
            except Exception as error:
                # The next look may succeed; without the watch, the machine would go without a save.
                if not warned:
                    where = self._asked.file or self._asked.url or self._asked.command[0]
                    _log.warning("train.preemption: a look at %s failed, and is repeated: %r", where, error)
                    warned = True
            if self.notice is not None:
                break
            if self._done.wait(self._asked.every_s):
                return
        while not self._deliver() and not self._done.wait(_DELIVER_S):
            pass

    def close(self) -> None:
        """Stop looking."""
        self._done.set()


@contextlib.contextmanager
def stopped_by_notice(work: Work[TrainRequest], trainer: Any) -> Iterator[None]:
    """Inside, a notice stops the training, as a signal does; on rank 0 as PreemptedByNotice if its machine goes."""
    asked = work.request.preemption
    if asked is None or int(os.environ.get("LOCAL_RANK", "0")) != 0:
        yield
        return

    def deliver() -> bool:
        # None until training begins, and after it.
        stop = trainer._trainflow.stop
        if stop is not None:
            stop.requested = True
        return stop is not None

    watch = NoticeWatch(asked, deliver)
    watch.start()
    try:
        yield
    except Preempted as error:
        # Another machine that goes is one of several: the leading one starts the next attempt without it.
        if watch.notice is None or work.rank != 0:
            raise
        what = f"This machine is about to be taken away ({watch.notice}). {error.message}"
        remedy = "The same command continues, here or on another machine that reaches the storage."
        raise PreemptedByNotice(what, field="train.preemption", step=error.step, remedy=remedy) from error
    finally:
        watch.close()


class MixtureChanges(TrainerCallback):
    """Takes weights that were changed while training, as `trainflow mix` writes them, where a save is due.

    The save has the change, so a training that is killed continues with it, or makes it at its next save.
    """

    def __init__(self, work: Work[TrainRequest], trainer: Trainer) -> None:
        self._work = work
        self._trainer = trainer
        self._store = Store.open(work.request.output, field="storage")
        self._refused = ""
        self.made: list[dict[str, Any]] = []  # the changes, with `step` and `weights`; set when training ends
        if INFO in work.request.data.info:
            trainer.add_callback(self)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look for a change, if a save is due. Collective."""
        if control.should_save:
            self._look(state.global_step)

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the changes, those of earlier attempts included."""
        changes = [] if (order := self._order()) is None else order.changes
        self.made = [{"step": change["step"], "weights": change["weights"]} for change in changes]

    def _look(self, step: int) -> None:
        asked = self._trainer._trainflow.comm.broadcast_json(self._read() if self._work.rank == 0 else None)
        order = self._order()
        if order is None or asked is None:
            return
        if asked["id"] in {self._refused, *(change["id"] for change in order.changes)}:
            return
        try:
            merged = order.change(step, asked["weights"], name=asked["id"])
        except ConfigError as error:
            self._refused = asked["id"]
            self._work.events.emit("warning", message=f"The mixture stays as it is. {error.message} {error.remedy}")
            return
        shares = ", ".join(f"{name} {number_words(weight)}" for name, weight in merged.items())
        self._work.events.emit("line", message=f"mixture from step {step + 1:,} on: {shares}")

    def _read(self) -> Any:
        try:
            text = self._store.read_if_exists(MIXTURE_CHANGE, limit=_CHANGE_BYTES)
            change = {} if text is None else parse_json(text, dict)
            return {"id": str(change["id"]), "weights": {str(k): float(v) for k, v in change["weights"].items()}}
        except (StorageError, ValueError, KeyError, TypeError, AttributeError):  # the next save looks again
            return None

    def _order(self) -> MixtureOrder | None:
        run = self._trainer._trainflow.run
        order = getattr(run.source, "order", None) if run is not None else None
        return order if isinstance(order, MixtureOrder) else None


MODEL = "model"
_CHANGE_BYTES = 1 << 16
CHECKPOINTS = "checkpoints"
HISTORY = "history.json"
LOSSES = "losses.json"
_POINTS = 500


def run(work: Work[TrainRequest]) -> TrainResult | None:
    """Train and export. The result is complete on rank 0.

    Raises:
        Preempted: stopped by SIGTERM or a notice of preemption, at a step that is saved.
        TrainflowError: the Trainer or the recipe raised it.
    """
    request, output = work.request, Store.open(work.request.output, field="storage")
    args = arguments(work, "train", output.child(CHECKPOINTS).url)
    data, train_set = DataInfo(work.prepared), ArrowSplit(work.prepared, request.train_split)
    eval_set = ArrowSplit(work.prepared, request.eval_split) if request.eval_split else None
    events = events_callback(work, args)
    model = build_model(work, args, data)
    require_flavor(model, request.flavor)
    stops = stopping_callbacks(request)
    callbacks = [*stops, events, StragglerCallback(report=lambda text: work.events.emit("warning", message=text))]
    trainer = build_trainer(work, args, model, callbacks, train_dataset=train_set, eval_dataset=eval_set)
    add_metrics(trainer, request.metrics)
    events.follow(trainer)
    changes = MixtureChanges(work, trainer)
    with stopped_by_notice(work, trainer):
        trained = trainer.train(resume_from_checkpoint="auto")  # a first attempt and a retry are one command
    trainer.save_model(output.child(MODEL).url)
    peaks = trainer._trainflow.comm.gather_json(read_peak_bytes(trainer._trainflow.world.device))
    result: TrainResult | None = None
    if work.rank == 0:
        tell_of_stop(work, trainer, stops)
        for name, entries in ((HISTORY, trainer.state.log_history), (LOSSES, thin_losses(events.unlogged))):
            output.write_bytes(name, json.dumps(entries).encode())
        device, precision = _device(trainer)
        mfu = utilization(events.flops, events.trained_s, devices=work.world_size, device=device, precision=precision)
        result = TrainResult(
            files=tuple(_exported(work, output, args, model)),
            metrics={name: value for name, value in trained.metrics.items() if isinstance(value, int | float)},
            global_step=trainer.state.global_step,
            global_samples=trainer.state.num_samples_seen,
            world_size=work.world_size,
            resumed_from=events.resumed_from,
            checkpoints=tuple(info.name for info in list_checkpoints(output.child(CHECKPOINTS))),
            parameters=sum(map(numbers_in, model.parameters())),
            peak_bytes=max(peaks or ()),
            device=device,
            micro_batch=trainer.state.train_batch_size,
            mixture=tuple(changes.made),
            mfu=mfu,
        )
    leave_together(trainer)
    return result


def stopping_callbacks(request: TrainRequest) -> list[TrainerCallback]:
    """The callback that ends a training early; then that of a proof, which saves where the first stops."""
    early, proof = request.stop_early, request.proof
    stops: list[TrainerCallback] = [] if early is None else [EarlyStoppingCallback(early.patience, early.threshold)]
    return stops if proof is None else [*stops, ProofCallback(proof.stop_at, kill=proof.kill)]


def tell_of_stop(work: Work[TrainRequest], trainer: Trainer, stops: Sequence[TrainerCallback]) -> None:
    """Say where the training stopped, and which weights it gives, if it stopped early."""
    state, metric = trainer.state, trainer.args.metric_for_best_model
    early = [stop for stop in stops if isinstance(stop, EarlyStoppingCallback)]
    ran_out = any(stop.early_stopping_patience_counter >= stop.early_stopping_patience for stop in early)
    if not ran_out or state.best_metric is None:
        return
    ended = f"stopped early at step {state.global_step:,} of {state.max_steps:,}"
    best = f"step {state.best_global_step:,} with {metric} {number_words(state.best_metric)}"
    work.events.emit("line", message=f"{ended}; the model is that of {best}")


def require_flavor(model: nn.Module, flavor: str | None) -> None:
    """Raise ConfigError for a model that could not be registered in the end as the spec says."""
    if flavor is None or (is_transformers(innermost(model)) and not is_adapted(model)):
        return
    what = "an adapter" if is_adapted(model) else "not a model of transformers"
    message = f"build_model() returned a {type(model).__name__}, which is {what}: MLflow's flavor could not load it."
    remedy = "Remove register.flavor: mlflow.pyfunc.load_model loads a version of any model without it."
    raise ConfigError(message, field="register.flavor", value=flavor, remedy=remedy)


def thin_losses(losses: Sequence[tuple[int, float]], most: int = _POINTS) -> list[dict[str, float | int | str]]:
    """At most `most` entries of a log, each the mean loss of as many steps, at the last of them.

    Losses that are not finite are left out of a mean; where no other is in it, the entry says so in text.
    """
    size = math.ceil(len(losses) / most) or 1
    entries: list[dict[str, float | int | str]] = []
    for start in range(0, len(losses), size):
        block = losses[start : start + size]
        finite = [loss for _, loss in block if math.isfinite(loss)]
        entries.append({"step": block[-1][0], "loss": math.fsum(finite) / len(finite) if finite else "NaN"})
    return entries


def _device(trainer: Trainer) -> tuple[str, str]:
    """The device's name as its driver gives it, and the precision of matrix products on it."""
    args = trainer.args
    if args.device.type != "cuda":
        return args.device.type.upper(), "fp32"
    short = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    allowed = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return torch.cuda.get_device_name(args.device), short or allowed


def _exported(work: Work[TrainRequest], output: Store, args: TrainingArguments, model: nn.Module) -> list[FileEntry]:
    """The model's files, with a config.json unless the model wrote its own; adapters have the digests of their base.

    The arguments are cut to those that matter to the weights: the same training gives the same bytes everywhere.
    """
    store = output.child(MODEL)
    if not store.exists("config.json"):
        _write_json(store, "config.json", {"recipe": work.recipe.path.name, "build_model": work.request.model})
    if (base := describe_base(model)) is not None:
        _write_json(store, BASE, base)
    # For a reader of the folder: what decided the weights, without paths and speeds.
    _write_json(store, "training_args.json", numeric_fields(args, data_parallel_size=data_size(args, work.world_size)))
    return [FileEntry(f"{MODEL}/{file.path}", file.size, store.digest(file.path)) for file in store.list()]


def _write_json(store: Store, name: str, value: Any) -> None:
    store.write_bytes(name, json.dumps(value, indent=2, sort_keys=True).encode())
