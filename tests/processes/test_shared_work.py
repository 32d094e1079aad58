"""Work that several processes share, of which one is killed; and writers, readers and publishers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import textwrap
import threading
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.checkpoints import no_damage, save, save_untrained
from tests.support.command import answer, start_script
from tests.support.launched import request, wait_until
from tests.support.publishing import digits_content
from tests.support.recorded import nightly
from tests.support.searching import rate, search_trainer
from trainer_lib.checkpoint.catalogue import find_newest_intact, rotate_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import StorageError
from trainer_lib.guard import start_time
from trainer_lib.hub.folder import FolderHub
from trainer_lib.launch.pool import apart, launch_workers
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.protocol.requests import PreparedData
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit, verify_files

DROP: Any = {"env": {}, "on_line": lambda line: None, "on_event": lambda event: None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder = tmp_path_factory.mktemp("trained")
    data = tiny.prepared(folder)
    tiny.run(tiny.train_request(folder, data, str(folder / "train")), kind="in_process")
    return folder, data


def test_two_ranks_share_out_evaluation_and_prediction(tmp_path: Path, trained: tuple[Path, PreparedData]) -> None:
    folder, data = trained
    more = {"data": data, "model_url": f"{folder / 'train'}/model", "model": {}, "args": tiny.ARGS}
    results = []
    for world_size in (2, 1):
        base = {"output": str(tmp_path / str(world_size)), **more}
        evaluated = tiny.on_ranks(request(tmp_path, tiny.RECIPE, "evaluate", splits=["test"], **base), world_size)
        tiny.on_ranks(request(tmp_path, tiny.RECIPE, "predict", split="test", rows_per_file=10, **base), world_size)
        files = (tmp_path / str(world_size) / "predictions" / "test").glob("*.parquet")
        results.append((evaluated.metrics["test"]["accuracy"], {file.name: file.read_bytes() for file in files}))
    assert len(results[0][1]) == 3
    assert results[0] == results[1]


def kill_holder(claims: Path) -> None:
    """Wait for a claim, and kill the worker that holds it."""
    holders: list[Holder] = []

    def look() -> bool:
        for path in claims.glob("*/*/WRITING.json"):
            with contextlib.suppress(FileNotFoundError):
                if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                    holders.append(holder)
        return bool(holders)

    wait_until(look, 60)
    os.kill(holders[0].pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- the sources of a recipe
SOURCES = """
import time


def list_sources(options, out):
    return list(range(40))


def prepare_shard(source, options):
    time.sleep(options["seconds"])
    with open(options["log"], "a") as log:
        log.write(f"{source}\\n")
    return {"train": [{"x": [float(source), float(n)]} for n in range(20)], "test": [{"x": [0.0, float(source)]}]}


def build_model(options, data): ...
"""


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted((folder / "data").rglob("*.arrow"))}


def test_a_killed_workers_sources_are_taken_over_and_the_data_is_that_of_one_worker(tmp_path: Path) -> None:
    options = {"seconds": 0.0, "log": str(tmp_path / "whole.txt")}
    whole = request(tmp_path, SOURCES, output=str(tmp_path / "whole"), shard_rows=8, options=options)
    expected = tiny.run(whole, kind="in_process")
    options = {"seconds": 0.05, "log": str(tmp_path / "shared.txt")}
    shared = replace(whole, output=str(tmp_path / "shared"), options=options)
    tiny.run(replace(shared, step="list"), kind="in_process")

    def kill_one() -> None:
        wait_until(lambda: len(list((tmp_path / "shared").glob("records/parts/*/*"))) >= 2, 90)
        kill_holder(tmp_path / "shared" / "claims")

    killer = threading.Thread(target=kill_one)
    killer.start()
    two = apart(LaunchConfig(kind="torchrun", processes=2, threads=1), on_devices=False)
    done = launch_workers(replace(shared, step="parts"), two, **DROP)
    killer.join()
    assert len(done) == 1  # the other was lost
    assert tiny.run(replace(shared, step="finish"), kind="in_process") == expected
    assert _files(tmp_path / "shared") == _files(tmp_path / "whole")
    calls = (tmp_path / "shared.txt").read_text().split()
    assert len(calls) <= 41  # one source of the killed worker again, and no other
    assert set(calls) == {str(source) for source in range(40)}


# ---------------------------------------------------------------------------------- processes at one place of a storage
def begin(processes: list[subprocess.Popen[str]]) -> None:
    """Let processes go on together, once all of them are ready."""
    assert [answer(process) for process in processes] == ["ready"] * len(processes)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")


# ---------------------------------------------------------------------------------------------------------- checkpoints
def test_a_folder_that_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    with start_script("input()") as sleeper:
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
from trainer_lib.distributed.communicator import SingleProcess
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
    with start_script(ZYGOTE, root.url) as zygote:
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
from trainer_lib.locks.removal import protect_from_removal
from trainer_lib.storage import Store

with protect_from_removal(Store.open(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_another_process_counts_while_it_lives_and_not_when_it_was_killed(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save_untrained(root, step)
    with start_script(READER, str(tmp_path / "checkpoint-1")) as reader:
        assert answer(reader) == "reading"
        assert rotate_checkpoints(root, keep=1, protect=()) == []
        reader.kill()
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    assert root.children() == ["checkpoint-2"]


# ------------------------------------------------------------------------------------------------ commits and creations
RACER = """
import contextlib, json, sys
from trainer_lib.errors import LeaseLostError
from trainer_lib.storage import Store
from trainer_lib.storage.commit import write_commit

folder, number, committed = sys.argv[1], int(sys.argv[2]), []
print("ready", flush=True)
sys.stdin.readline()
for turn in range(20):
    with contextlib.suppress(LeaseLostError):
        write_commit(Store.open(folder).child(str(turn)), "stage", [], {"by": number})
        committed.append(turn)
store = Store.open(folder).child("files")
print(json.dumps([committed, [turn for turn in range(50) if store.create(f"{turn}.json", b"%d" % number)]]))
"""


def test_of_processes_that_commit_or_create_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(start_script(RACER, str(tmp_path), str(number))) for number in range(3)]
        begin(racers)
        won: list[tuple[list[int], list[int]]] = [json.loads(answer(racer)) for racer in racers]
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
from tests.support.publishing import digits_content, publish

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
    with start_script(PUBLISHER, target, str(tmp_path / "model")) as publisher:
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
    with start_script(KILLED_TRIAL, storage) as killed:
        assert killed.wait(60) == -signal.SIGKILL
    again = {"storage": storage, "study_name": "s", "load_if_exists": True}
    best = search_trainer(tmp_path).hyperparameter_search(rate, n_trials=1, **again)
    assert [trial["state"] for trial in best.run_summary] == ["fail", "complete"]
    assert best.run_summary[0]["hyperparameters"] == best.hyperparameters


# ---------------------------------------------------------------------------------- two processes of `trainflow gc`
CLEANING = """
    import sys, time
    from trainflow.flows.runs.garbage import find_garbage, remove_garbage
    storage = sys.argv[1]
    print("ready", flush=True)
    sys.stdin.readline()
    removed, end = [], time.monotonic() + 3
    while time.monotonic() < end:
        removed += remove_garbage(storage, find_garbage(storage, keep=2))
    print(len(removed), flush=True)
"""


RUNS = """
    # A pipeline that takes up what earlier runs left: as the flow does, it gives a sign of life, waits for a removal,
    # names the folder in its record, and only then looks for the result; without one it makes it again under the lease.
    import hashlib, json, sys, time
    from dataclasses import asdict
    from trainflow.tasks.stage.manifest import look_up
    from trainer_lib.locks.removal import leave_mark
    from tests.support.recorded import commit_stage, key_of
    from trainer_lib.locks.lease import Holder, acquire_lease
    from trainer_lib.storage import Store
    storage, seconds = sys.argv[1], float(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.readline()
    start, rounds, lost, made = time.monotonic(), 0, 0, 0
    while time.monotonic() - start < seconds:
        rounds += 1
        seed = f"toy {rounds % 12 + 1}"
        key = key_of("train", seed)
        folder = Store.open(storage).child("runs", hashlib.sha256(seed.encode()).hexdigest()[:16])
        about = {"holder": asdict(Holder.this_process()), "flow_run_id": None}
        leave_mark(folder, "alive/me.json", lambda: folder.replace("alive/me.json", json.dumps(about).encode()))
        record = {"name": "toy", "status": "RUNNING", "started": "2026-10-01", "worked_in": {"train": key.digest}}
        folder.replace("run.json", json.dumps(record).encode())
        stage = Store.open(storage).child("stages", "train", key.folder)
        def done():
            return look_up(storage, key)[0] is not None
        if not done():
            lease = acquire_lease(stage, wait=done)
            if lease is not None:
                with lease:
                    if not done():
                        commit_stage(storage, "train", seed)
                        made += 1
        # From here on the result must stay until the run has ended.
        for _ in range(5):
            if not (done() and stage.exists("result.bin")) or not folder.exists("run.json"):
                lost += 1
            time.sleep(0.002)
        record["status"] = "FINISHED"
        folder.replace("run.json", json.dumps(record).encode())
        folder.delete("alive/me.json")
    print(json.dumps([rounds, made, lost]), flush=True)
"""


def test_beside_runs_at_work_nothing_that_they_refer_to_goes(tmp_path: Path) -> None:
    storage = str(tmp_path)
    nightly(storage, 3)
    with contextlib.ExitStack() as stack:
        codes = (RUNS, CLEANING, CLEANING)
        started = [stack.enter_context(start_script(textwrap.dedent(code), storage, "3")) for code in codes]
        begin(started)
        outs = [process.communicate(timeout=150)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0, 0]
    rounds, made, lost = json.loads(outs[0])
    assert rounds > 5
    assert sum(int(out) for out in outs[1:]) > 3, "both sides were at it"
    assert lost == 0, f"{lost} of {rounds} runs lost what they referred to ({made} results were made again)"
