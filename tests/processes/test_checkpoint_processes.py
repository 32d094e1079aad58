"""Several processes at one folder of checkpoints: writers that live, writers that are killed, readers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import no_damage, save, save_untrained
from tests.support.repository import ROOT
from trainer_lib.checkpoint.catalogue import find_newest_intact, rotate_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import StorageError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def test_a_folder_that_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    root = Store.open(tmp_path)
    try:
        claim = replace(Holder.this_process(), pid=sleeper.pid, started=_start(sleeper.pid))
        root.child("checkpoint-2").create(WRITING, claim.to_bytes())
        root.write_bytes("checkpoint-2/model.safetensors", b"theirs")
        with pytest.raises(StorageError, match=f"being written by process {sleeper.pid} on"):
            save(root, 2)
        assert root.read_bytes("checkpoint-2/model.safetensors") == b"theirs"
    finally:
        sleeper.communicate()
    save(root, 2)


def _start(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


ZYGOTE = """
import os, sys, torch
from tests.support.checkpoints import untrained
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed import SingleProcess
from trainer_lib.storage import Store

root = Store.open(sys.argv[1])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        while True:
            step = max((info.step for info in list_checkpoints(root)), default=0) + 1
            save_checkpoint(root, untrained(step), SingleProcess())
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_kill_9_while_saving_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    root = Store.open(tmp_path / "root")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ZYGOTE, root.url]
    zygote = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    pause = random.Random(7)
    newest = 0
    for _ in range(4):
        zygote.stdin.write("\n")
        victim = int(zygote.stdout.readline())
        while not (tmp_path / "root" / f"checkpoint-{newest + 2}").exists():  # one is whole, the next under way
            time.sleep(0.001)
        time.sleep(pause.random() * 0.03)
        os.kill(victim, signal.SIGKILL)
        assert int(zygote.stdout.readline()) == -signal.SIGKILL
        info = find_newest_intact(root, on_damage=no_damage)
        assert info is not None
        assert info.step > newest
        newest = info.step
        load_checkpoint(root, info.name, SingleProcess()).read_optimizer()
    zygote.communicate()


READER = """
import sys
from trainer_lib.locks.readers import protect_from_removal
from trainer_lib.storage import Store

with protect_from_removal(Store.open(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_another_process_counts_while_it_lives_and_not_when_it_was_killed(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save_untrained(root, step)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READER, str(tmp_path / "checkpoint-1")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        assert rotate_checkpoints(root, keep=1, protect=()) == []
        reader.send_signal(signal.SIGKILL)
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    assert root.children() == ["checkpoint-2"]
