"""kill -9 a real pipeline at random moments, run the same command again, and compare the weights bit by bit.

    python -m tests.support.chaos examples/digits/pipeline.yaml --kills 20 --seed 7 train.args.num_train_epochs=3 \
        train.args.save_steps=4 evaluate.enabled=false predict.enabled=false publish.enabled=false

The victim is one worker, the launcher (torchrun or the guard that supervises it), or the flow itself. A moment is "once
step k is committed, plus a random pause", so kills land before, between and inside saves, whatever the machine's speed.
Everything is seen from outside: processes through psutil, progress through the files on storage.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.command import command_words

VICTIMS = ("worker", "launcher", "flow")
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Kill:
    """What was killed, after which committed step, and how the pipeline recovered."""

    victim: str
    after_step: int
    alive_after_kill: int
    commands: int
    digest: str


class Pipeline:
    """`trainflow run SPEC overrides…` on one storage folder, as a process that may be killed."""

    def __init__(self, spec: str, storage: Path, overrides: Sequence[str], log: Path) -> None:
        self.storage = storage
        self.log = log
        trainflow = Path(sys.executable).with_name("trainflow")
        self._command = [str(trainflow), "run", spec, f"storage={storage}", *overrides]

    def start(self) -> psutil.Popen:
        """Start it in a session of its own, so that a kill meant for it cannot reach us."""
        with self.log.open("ab") as log:
            return psutil.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def take_prepared_data(self, other: Pipeline) -> None:
        """Start from the data that `other` prepared, so that only training can be killed."""
        shutil.copytree(other.storage / "stages" / "prepare-data", self.storage / "stages" / "prepare-data")

    def finish(self) -> int:
        """Run to the end and return the exit code."""
        return int(self.start().wait(timeout=DEADLINE_S))

    def newest_step(self) -> int:
        """Return the newest committed step; 0 before the first."""
        commits = self.storage.glob("stages/train/*/checkpoints/checkpoint-*/COMMIT.json")
        return max((int(commit.parent.name.removeprefix("checkpoint-")) for commit in commits), default=0)

    def model_digest(self) -> str:
        """Return the SHA-256 of the exported weights; exactly one train stage must be committed."""
        [model] = self.storage.glob("stages/train/*/model/model.safetensors")
        if not (model.parent.parent / "COMMIT.json").exists():
            raise AssertionError(f"{model}: the train stage is not committed")
        return hashlib.sha256(model.read_bytes()).hexdigest()


def kill_once(pipeline: Pipeline, victim: str, after_step: int, pause_s: float) -> Kill:
    """Start, wait for the moment, kill -9, see what survives, then run the same command until it succeeds."""
    process = pipeline.start()
    family = _wait_for_moment(process, pipeline, after_step, pause_s)
    target = _pick(process, victim)
    if target is not None:
        target.kill()
    process.wait(timeout=DEADLINE_S)  # a flow that lost a worker or its launcher retries by itself
    _, alive = psutil.wait_procs(family, timeout=45)
    commands = 1
    code = process.returncode
    while code != 0 and commands < 4:
        code = pipeline.finish()
        commands += 1
    if code != 0:
        raise AssertionError(f"{victim}: still failing after {commands} commands; see {pipeline.log}")
    return Kill(victim, after_step, len(alive), commands, pipeline.model_digest())


def kill_in_turn(pipeline: Pipeline, moments: Mapping[str, int]) -> Kill:
    """Kill -9 several processes of one run, each after its step; then run the same command until it succeeds.

    Args:
        moments: victim -> step after which it is killed, in order; "flow" can only be the last.
    """
    process = pipeline.start()
    family: set[psutil.Process] = set()
    for victim, step in moments.items():
        family |= set(_wait_for_moment(process, pipeline, step, pause_s=0.0))
        target = _pick(process, victim)
        if target is None:
            raise AssertionError(f"there was no {victim} at step {pipeline.newest_step()}; see {pipeline.log}")
        target.kill()
        psutil.wait_procs([target], timeout=45)
    code, commands = process.wait(timeout=DEADLINE_S), 1
    _, alive = psutil.wait_procs(family, timeout=45)
    while code != 0 and commands < 4:
        code = pipeline.finish()
        commands += 1
    if code != 0:
        raise AssertionError(f"still failing after {commands} commands; see {pipeline.log}")
    return Kill(", ".join(moments), max(moments.values()), len(alive), commands, pipeline.model_digest())


def _wait_for_moment(process: psutil.Popen, pipeline: Pipeline, step: int, pause_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if pipeline.newest_step() >= step and _workers(process):
            time.sleep(pause_s)
            break
        time.sleep(0.02)
    return _descendants(process)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _matching(process: psutil.Process, *needles: str) -> list[psutil.Process]:
    found = []
    for child in _descendants(process):
        words = " ".join(command_words(child))
        if any(needle in words for needle in needles):
            found.append(child)
    return found


def _workers(process: psutil.Process) -> list[psutil.Process]:
    launchers = set(_matching(process, "torch.distributed.run", "guard.py"))
    return [p for p in _matching(process, "trainer_lib.worker train") if p not in launchers]


def _pick(process: psutil.Popen, victim: str) -> psutil.Process | None:
    if victim == "flow":
        return process
    candidates = _workers(process) if victim == "worker" else _matching(process, "torch.distributed.run", "guard.py")
    return random.choice(candidates) if candidates else None


def main(argv: Sequence[str] | None = None) -> int:
    """Reference run, then `--kills` killed runs, each on an empty storage; one line each; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=1.0, help="longest pause after the commit, seconds")
    options = parser.parse_intermixed_args(argv)
    random.seed(options.seed)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="trainflow-chaos-") as folder:
        root = Path(folder)
        os.environ.setdefault("PREFECT_HOME", str(root / "prefect"))
        reference = Pipeline(options.spec, root / "reference", options.overrides, root / "reference.log")
        if reference.finish() != 0:
            print((root / "reference.log").read_text())
            return 1
        last, expected = reference.newest_step(), reference.model_digest()
        print(f"uninterrupted: {last} steps, model {expected[:16]}", flush=True)
        for n in range(options.kills):
            pipeline = Pipeline(options.spec, root / f"kill-{n}", options.overrides, root / f"kill-{n}.log")
            pipeline.take_prepared_data(reference)
            kill = kill_once(
                pipeline, VICTIMS[n % 3], random.randrange(0, max(1, last)), random.random() * options.pause
            )
            equal = kill.digest == expected
            failures += not equal or kill.alive_after_kill > 0
            print(
                f"{n:3d} kill -9 {kill.victim:8s} after step {kill.after_step:4d}: {kill.commands} commands, "
                f"{kill.alive_after_kill} survivors, {'equal' if equal else 'DIFFERENT: ' + kill.digest[:16]}",
                flush=True,
            )
    print(f"{options.kills - failures} of {options.kills} equal", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
