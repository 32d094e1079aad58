"""kill -9 at random moments of a training that saves every 2 steps: does it resume unaided, and end the same?

    make chaos                          500 kills, at most 15 minutes
    make chaos COUNT=50 SECONDS=120
    python -m benchmarks.chaos --count 50 --seconds 120 --seed 3 --save

A run is started, killed after a random time, started again with ``resume_from_checkpoint="auto"``, killed again, up to
five times, until it reaches its end; then the next run starts. Each process is forked from one that has imported torch
already, so a life costs tenths of a second; the signal and the files are real. The model is small and easy to resume
wrongly: dropout, accumulation, an uneven last batch, evaluations, a cosine schedule, two checkpoints kept.

With `--job conversations` it is adapters on weights in 4 bits (QLoRA), trained on packed conversations; ours alone.

The Trainer of transformers runs in the same harness, resuming from its newest folder as its documentation says. Where
its resume crashes, that folder is removed by hand, which is counted, and the run goes on.

Reported per library: kills by phase; starts that crashed; steps that had to be trained again, at most; runs that
reached their end, and of these the ones equal, bit for bit, to the uninterrupted run: in weights, optimizer and
schedule, and in random states and the whole log, too. Exit code 1 when a run of trainflow is not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer's first step would import it: once here, not in every life
from torch import nn

from benchmarks._forked import Board, End, Facts, Moment, fork
from benchmarks._result import RESULTS, publish
from trainer_lib import TrainingArguments
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.trainer import Trainer

SIZES = {"smallest": (10, 120.0), "full": (500, 900.0)}  # kills, seconds
SAVE_STEPS = 2
STEPS = 24
KILLS_PER_RUN = 5
PHASES = ("start-up", "step", "save", "evaluate", "end")
START, STEP, SAVE, EVALUATE, END = range(5)
Life = Callable[[Path, Board], None]


class Classifier(nn.Module):
    """A classifier 12 -> 64 -> 3 with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits [batch, classes]."""
        logits = self.head(self.dropout(torch.relu(self.norm(self.body(x)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int) -> list[dict[str, Any]]:
    """Rows {"x", "labels"} of three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 12, generator=generator)
    return [{"x": x[index], "labels": int(x[index, :3].argmax())} for index in range(count)]


def settings(folder: Path) -> dict[str, Any]:
    """Arguments that both libraries know: 24 steps in 3 epochs of 62 samples."""
    return {
        "output_dir": str(folder),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


@dataclass(frozen=True)
class Job:
    """What is trained: a function that builds the model, 62 rows, and what else the Trainer is made of."""

    model: Callable[[], Any]
    rows: Sequence[Any]
    base: type[Trainer] = Trainer
    collate: Any = None


def conversations(place: Path) -> Job:
    """Adapters on weights in 4 bits, by rows that conversations share."""
    import bitsandbytes  # noqa: F401 - imported once, before any fork
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from trainer_lib.protocol.recipe_names import recipe_file
    from trainer_lib.recipes import load

    # In a process that may start threads, as tokenizers do.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as other:
        data, made = other.submit(_prepare_conversations, place).result()
    recipe = load(recipe_file("supervised-fine-tuning"), place)
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.1}
    chosen = {"folder": str(place / "base"), "load_in": "4bit", "adapter": adapter}
    build = functools.partial(recipe.build_model, chosen, data)
    return Job(build, made, recipe.trainer_class(Trainer), recipe.collate_with(data))


def _prepare_conversations(place: Path) -> tuple[Any, list[Any]]:
    from benchmarks.conversations import prepare

    place.mkdir(parents=True)
    recipe, data, made = prepare(place, 400, ["train"], length=256)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    built: Any = recipe.build_model({"config": sizes}, data)
    built.save_pretrained(place / "base")
    return data, made[:62]


# -- lives -------------------------------------------------------------------------------------------------------------


def our_life(folder: Path, board: Board, *, job: Job | None = None) -> None:
    """Train from the newest checkpoint of the folder to the end."""
    chosen = job or Job(Classifier, rows(62))
    trainer = _built(chosen.base, TrainerCallback, TrainingArguments, folder, board, chosen)
    trainer.train(resume_from_checkpoint="auto")
    _tell_end(trainer, board)


def peer_life(folder: Path, board: Board) -> None:
    """Train with the Trainer of transformers, likewise from the newest checkpoint."""
    import transformers
    from transformers import trainer_utils

    trainer = _built(
        transformers.Trainer,
        transformers.TrainerCallback,
        transformers.TrainingArguments,
        folder,
        board,
        Job(Classifier, rows(62)),
    )
    find: Any = trainer_utils.get_last_checkpoint
    newest = find(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    _tell_end(trainer, board)


def _built(library: Any, callback: Any, arguments: Any, folder: Path, board: Board, job: Job) -> Any:
    class Told(library):  # type: ignore[misc]
        def _save_checkpoint(self, *given: Any, **named: Any) -> None:
            board.write(phase=SAVE)
            super()._save_checkpoint(*given, **named)
            board.write(phase=STEP)

        def evaluate(self, *given: Any, **named: Any) -> Any:
            board.write(phase=EVALUATE)
            metrics = super().evaluate(*given, **named)
            board.write(phase=STEP)
            return metrics

    class Teller(callback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            board.write(phase=STEP, step=state.global_step, resumed=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            board.write(step=state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            board.write(phase=END)

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return Told(
        model=job.model(),
        args=arguments(**settings(folder), remove_unused_columns=job.collate is None),
        data_collator=job.collate,
        train_dataset=job.rows,
        eval_dataset=job.rows[:9],
        callbacks=[Teller()],
    )


def _tell_end(trainer: Any, board: Board) -> None:
    parts = [trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()]
    log = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    numpy_state: Any = np.random.get_state()
    generators = [torch.get_rng_state(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]
    board.write(state=digest(parts), everything=digest([parts, generators, log]))


def digest(value: Any) -> str:
    """Return the SHA-256 of nested plain values and tensors, bit for bit."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(str((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            if name != "lr_lambdas":  # functions
                found.update(str(name).encode())
                _feed(found, value[name])
    elif isinstance(value, list | tuple):
        found.update(str(len(value)).encode())
        for each in value:
            _feed(found, each)
    else:
        found.update(repr(value).encode())


# -- killing -----------------------------------------------------------------------------------------------------------


class Harness:
    """Runs of one library, killed until enough kills are counted or the time is over."""

    def __init__(self, life: Life, place: Path, draw: random.Random) -> None:
        self._life = life
        self._place = place
        self._draw = draw
        self.kills: collections.Counter[str] = collections.Counter()
        self.crashes: collections.Counter[str] = collections.Counter()
        self.lost: list[int] = []
        self.runs = self.equal = self.identical = 0
        self._span = 0.0
        self.expected = self._start(place / "whole", None)
        if self.expected.code != 0:
            raise RuntimeError(f"The uninterrupted run failed: {self.expected.facts.error}")

    def _start(self, folder: Path, moment: Moment | None) -> End:
        end = fork(lambda board: self._life(folder, board), kill_when=moment)
        if end.code == 0:  # how long a life lasts, as the machine is now
            self._span = end.seconds if not self._span else 0.7 * self._span + 0.3 * end.seconds
        return end

    def _moment(self) -> Moment:
        """Choose when to kill: half of the time anywhere in a life (mostly in a save), else in a phase at some step."""
        after = self._draw.uniform(0, self._span)
        if self._draw.random() < 0.5:
            return lambda facts, seconds: seconds >= after
        phase, step = self._draw.choice((START, STEP, SAVE, EVALUATE)), self._draw.randrange(STEPS)
        entered: list[float] = []
        pause = self._draw.uniform(0, 0.15 if phase == START else 0.005)

        def come(facts: Facts, seconds: float) -> bool:
            if facts.phase == phase and (phase == START or facts.step >= step):
                entered.append(seconds)
            return bool(entered) and seconds >= entered[0] + pause

        return come

    def run_until(self, count: int, deadline: float) -> None:
        """Start run after run."""
        while sum(self.kills.values()) < count and time.monotonic() < deadline:
            self._one_run(self._place / f"run-{self.runs}", count)

    def _one_run(self, folder: Path, count: int) -> None:
        reached = killed = 0
        while True:
            more = killed < KILLS_PER_RUN and sum(self.kills.values()) < count
            end = self._start(folder, self._moment() if more else None)
            self._note_start(end, reached, folder)
            if end.killed:
                self.kills[PHASES[end.facts.phase]] += 1
                killed += 1
                reached = max(reached, end.facts.step)
            elif end.code == 0:
                break
        self.runs += 1
        self.equal += end.facts.state == self.expected.facts.state
        self.identical += end.facts.everything == self.expected.facts.everything
        shutil.rmtree(folder)

    def _note_start(self, end: End, reached: int, folder: Path) -> None:
        """Count the outcome of a start after a kill."""
        if end.facts.resumed >= 0:
            self.lost.append(max(0, reached - end.facts.resumed))
        if not end.killed and end.code != 0:
            self.crashes[end.facts.error.partition(":")[0] or f"exit code {end.code}"] += 1
            newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=None)
            if newest is None or sum(self.crashes.values()) > 10_000:
                raise RuntimeError(f"It fails without a checkpoint, too: {end.facts.error}")
            shutil.rmtree(newest)

    def result(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "kills": sum(self.kills.values()),
            "kills_by_phase": {phase: self.kills[phase] for phase in PHASES},
            "starts_that_crashed": sum(self.crashes.values()),
            "crashes_by_error": dict(self.crashes),
            "steps_trained_again_at_most": max(self.lost, default=0),
            "runs_finished": self.runs,
            "runs_equal": self.equal,
            "runs_equal_in_everything": self.identical,
            "uninterrupted_seconds": round(self.expected.seconds, 3),
        }


def measure(count: int, peer_count: int, seconds: float, seed: int, job: str) -> dict[str, Any]:
    """Run ours, then the peer's, for the requested number of kills."""
    found = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainflow-chaos-") as place:
        ours: Life = our_life
        if job == "conversations":
            ours = functools.partial(our_life, job=conversations(Path(place) / "prepared"))
        lives: dict[str, tuple[Life, int]] = {"ours": (ours, count), "peer": (peer_life, peer_count)}
        for number, (name, (life, kills)) in enumerate(lives.items()):
            if kills == 0:
                continue
            if name == "peer":
                with contextlib.redirect_stderr(None):
                    import transformers.trainer  # noqa: F401 - imported once, before any fork
            deadline = started + seconds * (1.0 if number or not peer_count else 0.8)
            harness = Harness(life, Path(place) / name, random.Random(seed))
            harness.run_until(kills, deadline)
            found[name] = harness.result()
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the result as a Markdown table."""
    names = {"ours": "trainflow", "peer": "transformers"}
    rows: list[list[str]] = [["", *(names[each] for each in found)]]
    for phase in PHASES:
        rows.append([f"killed during {phase}", *(str(each["kills_by_phase"][phase]) for each in found.values())])
    for label, key in (
        ("kills", "kills"),
        ("starts that crashed", "starts_that_crashed"),
        ("steps trained again, at most", "steps_trained_again_at_most"),
        ("runs that came to their end", "runs_finished"),
        ("of these equal in weights, optimizer, schedule", "runs_equal"),
        ("of these equal in random states and log, too", "runs_equal_in_everything"),
    ):
        rows.append([label, *(str(each[key]) for each in found.values())])
    return "\n".join(
        f"| {' | '.join(row)} |" + ("\n|" + "---|" * len(row) if not at else "") for at, row in enumerate(rows)
    )


def main() -> int:
    """Kill, print, and save on request. Returns 1 when one of our runs did not resume or ended differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="smallest")
    parser.add_argument("--count", type=int, help="kills of our Trainer")
    parser.add_argument("--peer-count", type=int, help="kills of the peer; a fifth of trainflow's when not given")
    parser.add_argument("--seconds", type=float, help="time after which no further run is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=("classifier", "conversations"), default="classifier")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, default=None, metavar="FOLDER")
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy and torch made threads when they were imported; forks must not
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_NUM_THREADS": "1"})
    count = SIZES[chosen.size][0] if chosen.count is None else chosen.count
    seconds = SIZES[chosen.size][1] if chosen.seconds is None else chosen.seconds
    peer_count = count // 5 if chosen.peer_count is None else chosen.peer_count
    peer_count = 0 if chosen.job == "conversations" else peer_count
    started = time.monotonic()
    found = measure(count, peer_count, seconds, chosen.seed, chosen.job)
    taken = {"asked_kills": count, "seed": chosen.seed, "seconds": round(time.monotonic() - started, 1), **found}
    name = "chaos" if chosen.job == "classifier" else f"chaos_{chosen.job}"
    publish(name, chosen.size if chosen.count is None else f"{count}-kills", taken, chosen.save)
    print(table(found))
    ours = found["ours"]
    resumed = not ours["starts_that_crashed"] and ours["steps_trained_again_at_most"] <= SAVE_STEPS
    return 0 if resumed and ours["runs_equal_in_everything"] == ours["runs_finished"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
