"""Processes at one place of a storage at once: writers that live and that are killed, readers, creators, publishers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.checkpoints import no_damage, save, save_untrained
from tests.support.publishing import digits_content
from tests.support.repository import ROOT
from tests.support.searching import rate, search_trainer
from trainer_lib.checkpoint.catalogue import find_newest_intact, rotate_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.commit import read_commit, verify_files, write_commit
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import LeaseLostError, StorageError
from trainer_lib.guard import start_time
from trainer_lib.hub.folder import FolderHub
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def start(code: str, *words: str) -> subprocess.Popen[str]:
    """A process of its own that the test talks to."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---------------------------------------------------------------------------------------------------------- checkpoints
def test_a_folder_that_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    with start("input()") as sleeper:
        claim = replace(Holder.this_process(), pid=sleeper.pid, started=start_time(sleeper.pid) or "")
        root.child("checkpoint-2").create(WRITING, claim.to_bytes())
        root.write_bytes("checkpoint-2/model.safetensors", b"theirs")
        with pytest.raises(StorageError, match=f"being written by process {sleeper.pid} on"):
            save(root, 2)
        assert root.read_bytes("checkpoint-2/model.safetensors") == b"theirs"
        sleeper.kill()
    save(root, 2)


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
    pause, newest = random.Random(7), 0
    with start(ZYGOTE, root.url) as zygote:
        assert zygote.stdin is not None
        for _ in range(4):
            zygote.stdin.write("\n")
            victim = int(answer(zygote))
            while not (tmp_path / "root" / f"checkpoint-{newest + 2}").exists():  # one is whole, the next under way
                time.sleep(0.001)
            time.sleep(pause.random() * 0.03)
            os.kill(victim, signal.SIGKILL)
            assert int(answer(zygote)) == -signal.SIGKILL
            info = find_newest_intact(root, on_damage=no_damage)
            assert info is not None
            assert info.step > newest
            newest = info.step
            load_checkpoint(root, info.name, SingleProcess()).read_optimizer()
        zygote.stdin.close()


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
    with start(READER, str(tmp_path / "checkpoint-1")) as reader:
        assert answer(reader) == "reading"
        assert rotate_checkpoints(root, keep=1, protect=()) == []
        reader.kill()
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    assert root.children() == ["checkpoint-2"]


# ------------------------------------------------------------------------------------------------ commits and creations
def _race(args: tuple[str, int]) -> tuple[list[int], list[int]]:
    """The rounds in which this process committed, and the files that it created."""
    folder, number = args
    committed = []
    for turn in range(20):
        with contextlib.suppress(LeaseLostError):
            write_commit(Store.open(folder).child(str(turn)), "stage", [], {"by": number})
            committed.append(turn)
    store = Store.open(folder).child("files")
    return committed, [turn for turn in range(50) if store.create(f"{turn}.json", b"%d" % number)]


def test_of_processes_that_commit_or_create_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        won = pool.map(_race, [(str(tmp_path), number) for number in range(3)], chunksize=1)
        pool.close()
        pool.join()
    assert sorted(chain.from_iterable(committed for committed, _ in won)) == list(range(20))
    assert sorted(chain.from_iterable(created for _, created in won)) == list(range(50))
    assert len(list((tmp_path / "files").iterdir())) == 50  # no drafts left
    for number, (committed, _) in enumerate(won):
        for turn in committed:
            commit = read_commit(Store.open(tmp_path / str(turn)))
            assert commit is not None
            assert commit.meta == {"by": number}


# ----------------------------------------------------------------------------------------------- publications, searches
PUBLISHER = """
import os, signal, sys
from pathlib import Path
from trainer_lib.storage import Store
from tests.support.publishing import digits_content
from trainer_lib.hub.transport import publish

content = digits_content(Path(sys.argv[2]))
write, create = Store.open_write, Store.create
for left in range(12):
    child = os.fork()
    if child == 0:
        def killing(method):
            def call(self, *args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(self, *args, **kwargs)
            return call

        Store.open_write, Store.create = killing(write), killing(create)
        publish(sys.argv[1], content, message="first")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
"""


def test_a_killed_publisher_leaves_nothing_visible_and_its_leftovers_are_removed(tmp_path: Path) -> None:
    """Killed at every write in turn: readers see whole revisions only, and the same call then completes."""
    target, content = str(tmp_path / "hub"), digits_content(tmp_path / "model")
    seen: list[int] = []
    with start(PUBLISHER, target, str(tmp_path / "model")) as publisher:
        assert publisher.stdin is not None
        while code := int(answer(publisher)):
            assert code == -signal.SIGKILL
            seen.append(len(FolderHub(target).revisions()))
            assert all(not verify_files(revision.store, revision.commit) for revision in FolderHub(target).revisions())
            publisher.stdin.write("\n")
        publisher.kill()
    assert seen == sorted(seen)  # killed after the commit, when the lease is given back: it stays
    assert seen[:3] == [0, 0, 0]
    assert [path.name for path in (Path(target) / "revisions").iterdir()] == [f"00001-{content.digest[:16]}"]
    assert FolderHub(target).newest() is not None


KILLED_TRIAL = """
import os, socket, sys
import optuna
study = optuna.create_study(storage=sys.argv[1], study_name="s")
trial = study.ask()
trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
trial.set_user_attr("trainflow:process", f"{socket.gethostname()}:{os.getpid()}")
trial.set_user_attr("trainflow:folder", "run-0")
os.kill(os.getpid(), 9)
"""


def test_a_trial_whose_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/s.db"
    with start(KILLED_TRIAL, storage) as killed:
        assert killed.wait(60) == -signal.SIGKILL
    again = {"storage": storage, "study_name": "s", "load_if_exists": True}
    best = search_trainer(tmp_path).hyperparameter_search(rate, n_trials=1, **again)
    assert [trial["state"] for trial in best.run_summary] == ["fail", "complete"]
    assert best.run_summary[0]["hyperparameters"] == best.hyperparameters
