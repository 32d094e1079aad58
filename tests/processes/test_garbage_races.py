"""Two processes of `trainflow gc` at once beside runs at work."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.recorded import nightly
from tests.support.repository import ROOT

_CLEANING = """
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


def _process(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


_RUNS = """
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
    with (
        _process(_RUNS, storage, "3") as working,
        _process(_CLEANING, storage) as one,
        _process(_CLEANING, storage) as two,
    ):
        for process in (working, one, two):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outs = [process.communicate(timeout=150)[0] for process in (working, one, two)]
        assert [process.returncode for process in (working, one, two)] == [0, 0, 0]
    rounds, made, lost = json.loads(outs[0])
    assert rounds > 5
    assert sum(int(out) for out in outs[1:]) > 3, "both sides were at it"
    assert lost == 0, f"{lost} of {rounds} runs lost what they referred to ({made} results were made again)"
