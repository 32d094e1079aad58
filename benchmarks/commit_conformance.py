"""The commit protocol on every kind of store: each write of a save goes wrong in turn, or its process ends there.

    python -m benchmarks.commit_conformance --size full --save

After each fault: the checkpoint before it is loaded and compared bit for bit, no file of the broken one counts, the
same save works again and leaves nothing of the failed one. The first thing that does not hold ends the run.

Reported per store and fault: the writes of one save, and after how many of the faults the new checkpoint was committed
(nothing failed in the end, or the fault came after its commit). A writer dies before each system call that changes the
disk and each write to a file.
"""

from __future__ import annotations

import tempfile
from typing import Any

import fsspec
import torch

from benchmarks._result import arguments, publish
from benchmarks.s3_transfer import server_environment
from tests.support import faulty as faults
from tests.support.conformance import check_after_fault, fault_each_write, faulty, save, state
from tests.support.s3 import PART, S3Server, start, stop
from trainer_lib.errors import TrainflowError
from trainer_lib.storage import Store, s3
from trainer_lib.storage.commit import withdraw_folder

SIZES = {"smallest": 15, "full": 1}  # on S3, of so many writes one is hit
WRITE_FAULTS: tuple[faults.Kind, ...] = ("error", "full", "short", "silent", "after", "slow", "die")
REQUEST_FAULTS = ("refuse", "full", "denied", "lost", "slow")


def on_disk() -> dict[str, Any]:
    """Run on a local folder."""
    found: dict[str, Any] = {}
    for kind in WRITE_FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            plain = Store.open(folder)
            found[kind] = fault_each_write(faulty(plain), plain, kind)
    return found


def in_memory() -> dict[str, Any]:
    """Run on fsspec's memory store behind the plan of faults; a dead writer does nothing there any more."""
    found: dict[str, Any] = {}
    for kind in WRITE_FAULTS:
        faults.register()
        root = Store.open("faulty://bucket/conformance")
        found[kind] = fault_each_write(root, root, kind)
    faults.forget()
    return found


def fault_each_request(root: Store, server: S3Server, kind: str, every: int) -> tuple[int, int]:
    """Let one request of a save to S3 go wrong, each in turn; return as `fault_each_write` does."""
    before, attempted = state(1), state(2)
    save(root, before)
    server.plan()
    save(root, attempted)
    writes, committed = len(server.seen()["writes"]), 0
    withdraw_folder(root.child("checkpoint-2"))
    for at in range(1, writes + 1, every):
        server.plan(at, kind)
        returned = False
        try:
            save(root, attempted)
            returned = True
        except TrainflowError:
            assert kind not in ("lost", "slow"), f"write {at}"
        server.plan()
        committed += check_after_fault(root, before, attempted, returned=returned)
    return writes, committed


def on_s3(server: S3Server, every: int) -> dict[str, Any]:
    """Run on a real server on loopback, which spoils requests."""
    fsspec.filesystem("s3", endpoint_url=server.endpoint, use_listings_cache=False).mkdir("conformance")
    found: dict[str, Any] = {}
    for kind in REQUEST_FAULTS:
        root = Store.open(f"s3://conformance/{kind}")
        found[kind] = fault_each_request(root, server, kind, every)
    return found


def main() -> None:
    """Run all, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    every = SIZES[chosen.size]
    torch.set_num_threads(1)
    s3.PART = PART
    process, server = start()
    try:
        with server_environment(server):
            results = {"disk": on_disk(), "memory": in_memory(), "s3": on_s3(server, every)}
    finally:
        stop(process)
    publish("commit_conformance", chosen.size, {"every": every, "results": results}, chosen.save)


if __name__ == "__main__":
    main()
