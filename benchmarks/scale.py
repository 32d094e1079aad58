"""Growth far beyond one machine: parts, commits, checkpoints, ranks, machines, events, points.

    python -m benchmarks.scale --size full --save

Simulated are the parts, workers, ranks and machines. What handles them is the product's own: claims and records over
the real `Store` (behind it a store in memory that counts), commits, the catalogue of checkpoints, the index of shards,
the machines' meeting over a real TCP store, the launch's events, the spool for MLflow.

Counted are requests, names that listings return, operations and bytes; peak memory is measured in a process of its
own. Seconds depend on the machine and on nothing being stored for real.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._counting_store import Counts, counting_store
from benchmarks._memory import Peak, anonymous_bytes, apart
from benchmarks._result import arguments, publish
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints, rotate_checkpoints
from trainer_lib.checkpoint.layout import KIND, OPTIMIZER, checkpoint_name, shard_file
from trainer_lib.checkpoint.sharded import ShardedTensors, build_index
from trainer_lib.data.rows.parts import NumberedParts
from trainer_lib.data.rows.source_parts import SourceParts, SplitOfParts
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.machines.rendezvous import Pulses, Rendezvous, gather, open_store
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import read_commit, verify_files, write_commit
from trainer_lib.trackers.spool import Session

SIZES: dict[str, dict[str, Any]] = {
    "smallest": {
        "parts": [(500, 1), (1_500, 1), (500, 4)],
        "records": [500, 1_500],
        "resumed": [500, 1_500],
        "files": [1_000, 10_000],
        "checkpoints": [10, 100],
        "ranks": [8, 64],
        "machines": [10, 100],
        "lines": [1_000, 10_000],
    },
    "full": {
        "parts": [(10_000, 1), (100_000, 1), (1_000_000, 1), (10_000, 16)],
        "records": [10_000, 100_000, 1_000_000],
        "resumed": [10_000, 100_000],
        "files": [10_000, 100_000, 300_000],
        "checkpoints": [10, 100, 1_000, 10_000],
        "ranks": [100, 1_000, 10_000],
        "machines": [100, 1_000, 10_000],
        "lines": [10_000, 100_000, 1_000_000],
    },
}
TENSORS = 30  # of a sharded checkpoint: its index grows with them as well
SHA = "0" * 64


class _Measured:
    """Requests, names, seconds and peak memory of a block, as numbers for a table."""

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts()

    def __enter__(self) -> _Measured:
        self._began, self._memory = time.perf_counter(), anonymous_bytes()
        self._requests, self._names, self._counts.longest = self._counts.requests, self._counts.names, 0
        self._peak = Peak().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._peak.__exit__(*error)
        self.seconds = time.perf_counter() - self._began
        self.megabytes = (self._peak.bytes - self._memory) / 1e6
        self.requests = self._counts.requests - self._requests
        self.names = self._counts.names - self._names
        self.longest = self._counts.longest

    def of(self, count: int) -> dict[str, float]:
        """For each of so many parts, and altogether."""
        return {
            "requests_each": round(self.requests / count, 2),
            "names_each": round(self.names / count, 2),
            "longest_listing": self.longest,
            "megabytes": round(self.megabytes, 1),
            "seconds": round(self.seconds, 2),
        }


# -- parts that workers share ------------------------------------------------------------------------------------------


def _parts(store: Store) -> NumberedParts:
    return NumberedParts(store, "predictions", "part-{:05d}.jsonl", lambda part: {"key": SHA, "part": part})


def share_parts(total: int, workers: int) -> dict[str, Any]:
    """Workers pull parts through claims until all are finished; then a second run finds them finished."""
    store, counts = counting_store()
    parts, done = _parts(store), [0] * workers

    def work(number: int) -> None:
        with SharedParts(store, parts, total=total, poll_s=0.05) as shared:
            for part in shared:
                time.sleep(0)  # the others have their turn
                if shared.is_ours(part):
                    parts.write(part, b"{}\n", {"rows": 1})
                    done[number] += 1

    def run() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with _Measured(counts) as first:
        run()
    with _Measured(counts) as again:
        run()
    with _Measured(counts) as collected:
        found = sum(1 for _ in parts.collect())
    assert (sum(done), found) == (total, total), "each part once"
    return {
        "parts": total,
        "workers": workers,
        "work": first.of(total),
        "finished_already": again.of(total),
        "collect": collected.of(total),
    }


def prepare_records(total: int) -> dict[str, Any]:
    """The records of so many sources become one split."""
    store, counts = counting_store()
    parts = SourceParts(store, lambda part: {"source": f"s3://bucket/source-{part}.jsonl"})
    statistics = {"label": {"rows": 10, "counts": {"0": 5, "1": 5}}, "x": {"rows": 10, "sum": 1.0}}
    for part in range(total):
        files = [FileEntry(f"data/train/{part:06d}-00000.arrow", 100, SHA)]
        columns = {"x": "float64", "label": "int64"}
        one = {"rows": 10, "lengths": [10], "columns": columns, "own_ids": False}
        parts.write(part, files, {"train": {**one, "statistics": statistics}})
    split = SplitOfParts()
    with _Measured(counts) as read:
        for _, found in parts.read_all():
            assert found is not None
            split.add(found.notes["splits"]["train"], found.files)
    assert split.rows == 10 * total
    return {"sources": total, **read.of(total)}


def resume_preparation(total: int) -> dict[str, Any]:
    """A command finds so many sources finished, with a file each: what it looks at first, and before the commit."""
    store, counts = counting_store()

    def parts(command: str) -> SourceParts:
        return SourceParts(store, lambda part: {"source": f"s3://bucket/source-{part}.jsonl"}, command)

    for part in range(total):
        entry = store.write_bytes(f"data/train/{part:06d}-00000.arrow", bytes(100))
        parts("first").write(part, [entry], {"train": {"rows": 10}})
    with _Measured(counts) as looked:
        parts("second").forget_damaged(digests=False)
    with _Measured(counts) as verified:
        assert sum(record is not None for _, record in parts("second").read_all(verify=True)) == total
    return {"sources": total, "look": looked.of(total), "verify": verified.of(total)}


# -- commits and checkpoints -------------------------------------------------------------------------------------------


def commit_files(total: int) -> dict[str, Any]:
    """Commit so many files, read the commit, and compare it with a listing."""
    store, counts = counting_store()
    entries = [store.write_bytes(f"data/train/{number:06d}-00000.arrow", b"x") for number in range(total)]
    with _Measured(counts) as write:
        write_commit(store, "stage", entries, {})
    size = store.size("COMMIT.json")
    with _Measured(counts) as read:
        commit = read_commit(store)
    assert commit is not None
    with _Measured(counts) as verify:
        assert not verify_files(store, commit, digests=False)
    return {
        "files": total,
        "bytes_each": round(size / total, 1),
        "write": write.of(total),
        "read": read.of(total),
        "compare_sizes": verify.of(total),
    }


def keep_checkpoints(total: int) -> dict[str, Any]:
    """A folder with so many checkpoints: requests of what a start and a save ask of it."""
    store, counts = counting_store()
    for step in range(total):
        child = store.child(checkpoint_name(step))
        write_commit(child, KIND, [child.write_bytes(OPTIMIZER, b"{}")], {"step": step})

    def requests(call: Callable[[], Any]) -> int:
        before = counts.requests
        call()
        return counts.requests - before

    find = lambda: find_newest_intact(store, on_damage=print, digests=False)  # noqa: E731
    return {
        "checkpoints": total,
        "find_newest": requests(find),
        "rotate_without_a_limit": requests(lambda: rotate_checkpoints(store, keep=None, protect=())),
        "rotate_one_too_many": requests(lambda: rotate_checkpoints(store, keep=total - 1, protect=())),
        "list": requests(lambda: list_checkpoints(store)),
    }


def index_shards(ranks: int) -> dict[str, Any]:
    """The index of a sharded checkpoint, and what one rank reads of it."""
    rows = 4 * ranks
    names = [f"model/layers.{number}.weight" for number in range(TENSORS)]
    files = {shard_file(rank): FileEntry(shard_file(rank), TENSORS * 4 * 16, SHA) for rank in range(ranks)}

    def shard(rank: int) -> dict[str, Any]:
        blocks = {name: [[shard_file(rank), [4 * rank, 0], [4, 4], 64 * n, SHA]] for n, name in enumerate(names)}
        specs = {name: ["F32", [rows, 4]] for name in names} if rank == 0 else {}
        return {"blocks": blocks, "specs": specs, "tied": {}, "place": ""}

    store, _ = counting_store()
    with _Measured() as build:
        text = json.dumps(build_index([shard(rank) for rank in range(ranks)]))
    with _Measured() as read:
        tensors = ShardedTensors(store, "model", json.loads(text), files)
    assert len(tensors) == TENSORS
    return {
        "ranks": ranks,
        "index_bytes_for_each_rank_and_tensor": round(len(text) / ranks / TENSORS, 1),
        "build_s": round(build.seconds, 2),
        "read_s": round(read.seconds, 2),
        "read_megabytes": round(read.megabytes, 1),
    }


# -- machines, events, points ------------------------------------------------------------------------------------------


class _Counted(Rendezvous):
    """A machine's view of the store that counts its operations."""

    operations = 0

    def _try(self, operation: Callable[[], Any]) -> Any:
        self.operations += 1
        return super()._try(operation)


def meet(machines: int) -> dict[str, Any]:
    """Fake followers have written what followers write; the real leader gathers them, and looks at them."""
    store = open_store("127.0.0.1", 0)
    followers, leader = Rendezvous(store), _Counted(store)
    for number in range(1, machines + 1):
        followers.add("arrivals")
        followers.set(f"alive/{number}", 1)
        followers.set(f"node/{number}", {"host": f"h{number}", "node_rank": number, "number": number, "problem": None})
    began = time.perf_counter()
    seated = gather(leader, machines + 1, machines + 1, patience_s=60, last_call_s=0, endpoint="")
    gathered, first = time.perf_counter() - began, leader.operations
    assert len(seated) == machines
    pulses = Pulses(leader, range(1, machines + 1))
    pulses.look()
    before, began = leader.operations, time.perf_counter()
    pulses.look()
    return {
        "machines": machines,
        "operations_to_meet_each": round(first / machines, 2),
        "operations_of_a_look": leader.operations - before,
        "meet_s": round(gathered, 2),
        "look_s": round(time.perf_counter() - began, 3),
    }


def read_lines(total: int) -> dict[str, Any]:
    """Events of a launch and points for MLflow: what a look reads when one more was written behind so many."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_dir = RunDir(folder)
        line = json.dumps({"event": "progress", "step": 1, "max_steps": total, "rows": 1})
        (folder / "events.jsonl").write_text(f"{line}\n" * total, encoding="ascii")
        run_dir.read_new_events()
        with (folder / "events.jsonl").open("a", encoding="ascii") as file:
            file.write(f"{line}\n")
        events = len(run_dir.read_new_events())
        session = Session.create(folder / "spool", {"run_id": "r"})
        for step in range(total):
            session.write({"t": 1_700_000_000_000, "s": step, "m": {"loss": 0.1}})
        size = (session.path / "points.jsonl").stat().st_size
        session.write({"t": 1_700_000_000_000, "s": total, "m": {"loss": 0.1}})
        points = sum(1 for _ in session.read(size, limit=size * 2))
        session.close()
    log = [
        {"loss": 0.1234, "grad_norm": 0.5678, "learning_rate": 1e-05, "epoch": 0.5, "step": step} for step in range(100)
    ]
    return {
        "written": total,
        "events_read_by_a_look": events,
        "points_read_by_a_look": points,
        "bytes_of_a_point": round(size / total, 1),
        "log_history_bytes_each": round(len(json.dumps(log, indent=1)) / 100, 1),
    }


def _each(function: Callable[..., dict[str, Any]], cases: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    return [function(*case) for case in cases]


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    size = SIZES[chosen.size]
    result = {
        "shared_parts": apart(_each, share_parts, size["parts"]),
        "prepare_records": apart(_each, prepare_records, [(count,) for count in size["records"]]),
        "resumed_preparation": apart(_each, resume_preparation, [(count,) for count in size["resumed"]]),
        "commits": apart(_each, commit_files, [(count,) for count in size["files"]]),
        "checkpoints": _each(keep_checkpoints, [(count,) for count in size["checkpoints"]]),
        "shard_index": apart(_each, index_shards, [(count,) for count in size["ranks"]]),
        "meeting": _each(meet, [(count,) for count in size["machines"]]),
        "lines": _each(read_lines, [(count,) for count in size["lines"]]),
    }
    publish("scale", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
