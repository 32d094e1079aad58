"""A real pipeline whose processes are killed (kill -9), each once a step is committed; all is seen from outside."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.command import command_words

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Kill:
    """How a pipeline recovered: survivors of the kills, commands until it ended, digest of the weights."""

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


def kill_in_turn(pipeline: Pipeline, moments: Mapping[str, int]) -> Kill:
    """Kill -9 several processes of one run, each after its step; then run the same command until it succeeds.

    Args:
        moments: victim -> step after which it is killed, in order; "flow" can only be the last.
    """
    process = pipeline.start()
    family: set[psutil.Process] = set()
    for victim, step in moments.items():
        family |= set(_wait_for_step(process, pipeline, step))
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
    return Kill(len(alive), commands, pipeline.model_digest())


def _wait_for_step(process: psutil.Popen, pipeline: Pipeline, step: int) -> list[psutil.Process]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if pipeline.newest_step() >= step and _workers(process):
            break
        time.sleep(0.02)
    return _descendants(process)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _matching(process: psutil.Process, *needles: str) -> list[psutil.Process]:
    words = {child: " ".join(command_words(child)) for child in _descendants(process)}
    return [child for child in words if any(needle in words[child] for needle in needles)]


def _workers(process: psutil.Process) -> list[psutil.Process]:
    launchers = set(_matching(process, "torch.distributed.run", "guard.py"))
    return [p for p in _matching(process, "trainer_lib.worker train") if p not in launchers]


def _pick(process: psutil.Popen, victim: str) -> psutil.Process | None:
    if victim == "flow":
        return process
    candidates = _workers(process) if victim == "worker" else _matching(process, "torch.distributed.run", "guard.py")
    return random.choice(candidates) if candidates else None
