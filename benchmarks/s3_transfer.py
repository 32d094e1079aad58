"""A training state to and from S3, beside the store's own clients.

    python -m benchmarks.s3_transfer --size full --save

A state of float32 tensors is saved to, and loaded from, an S3 server on loopback (moto's, in a process of its own), by
ours (safetensors streamed through `Store`, SHA-256 computed and checked on the way), by s3fs (`put_file`, `get_file`
with their own concurrency and block size) and by boto3 (`upload_file`, `download_file`), alternating. The clients are
given the finished file, and leave one: serialising before and loading after are not in their numbers, but ours.

Reported per client: MB/s, CPU seconds of this process per GB, the most requests in flight (counted by the server), and,
in processes of their own, the highest anonymous memory beyond the state. Ratios are to s3fs, run by run. The server is
Python: where its own CPU seconds fill the time, speed says little and the client's CPU says it all
(`server_busy`: its CPU seconds per second).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks._memory import Peak, anonymous_bytes, apart
from benchmarks._result import arguments, publish, spread
from tests.support.s3 import S3Server, start, stop
from trainer_lib.checkpoint.tensors import read_safetensors, write_safetensors
from trainer_lib.storage import Store

MIB = 2**20
SIZES = {"smallest": (8, 1), "medium": (256, 5), "full": (1024, 7)}  # MiB, runs
NAME = "model.safetensors"
Work = Callable[[], object]


def make_state(mib: int) -> dict[str, Tensor]:
    """`mib` MiB of random numbers in matrices of 8 MiB, and some small vectors."""
    torch.manual_seed(0)
    matrices = {f"layer{number}.weight": torch.randn(1024, 2048) for number in range(mib // 8)}
    return {**matrices, **{f"layer{number}.bias": torch.randn(2048) for number in range(mib // 8)}}


class Clients:
    """Uploads to the bucket and downloads from it, per client."""

    def __init__(self, server: S3Server, folder: Path, state: dict[str, Tensor]) -> None:
        import boto3

        self.state = state
        self.local, self.back = folder / NAME, folder / "back"
        self.store = Store.open("s3://benchmark/ours")
        self.s3fs = fsspec.filesystem("s3", endpoint_url=server.endpoint, use_listings_cache=False)
        self.boto3 = boto3.client("s3")
        self.s3fs.mkdir("benchmark", exist_ok=True)

    def saving(self) -> dict[str, Work]:
        """Return the function that uploads the state, per client."""
        return {
            "ours": self.save,
            "s3fs": lambda: self.s3fs.put_file(str(self.local), f"benchmark/s3fs/{NAME}"),
            "boto3": lambda: self.boto3.upload_file(str(self.local), "benchmark", f"boto3/{NAME}"),
        }

    def loading(self) -> dict[str, Work]:
        """Return the function that downloads it, per client."""
        return {
            "ours": lambda: read_safetensors(self.store, NAME),
            "s3fs": lambda: self.s3fs.get_file(f"benchmark/s3fs/{NAME}", str(self.back)),
            "boto3": lambda: self.boto3.download_file("benchmark", f"boto3/{NAME}", str(self.back)),
        }

    def save(self) -> None:
        """Upload with our writer, from the tensors and without a file."""
        with self.store.open_write(NAME) as writer:
            write_safetensors(writer, self.state)


@contextlib.contextmanager
def bucket(mib: int) -> Iterator[tuple[Clients, S3Server, psutil.Process]]:
    """Set up a server, the clients, and the state as a local file."""
    process, server = start()
    try:
        with tempfile.TemporaryDirectory() as folder, server_environment(server):
            clients = Clients(server, Path(folder), make_state(mib))
            save_file(clients.state, clients.local)
            yield clients, server, psutil.Process(process.pid)
    finally:
        stop(process)


@contextlib.contextmanager
def server_environment(server: S3Server) -> Iterator[None]:
    """Set credentials and endpoint for all three clients."""
    before = dict(os.environ)
    os.environ.update(server.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def once(work: Work, size: int, server: S3Server, process: psutil.Process) -> dict[str, float]:
    """Time one transfer."""
    server.plan()
    cpu = process.cpu_times()
    wall, own = time.perf_counter(), time.process_time()
    work()
    wall, own = time.perf_counter() - wall, time.process_time() - own
    after = process.cpu_times()
    return {
        "mb_per_s": size / 1e6 / wall,
        "cpu_s_per_gb": own / (size / 1e9),
        "server_busy": (after.user + after.system - cpu.user - cpu.system) / wall,
        "most_in_flight": server.seen()["most_in_flight"],
    }


def memory(mib: int, name: str, way: str) -> float:
    """Return a client's peak anonymous memory in MB, without what it had before and without the state that it loads."""
    with bucket(mib) as (clients, _, _):
        size = clients.local.stat().st_size
        clients.saving()[name]() if way == "load" else None
        with_state = size if way == "load" and name == "ours" else 0
        if way == "load":
            clients.state.clear()
        work = (clients.saving() if way == "save" else clients.loading())[name]
        clients.s3fs.exists("benchmark/absent")  # the client's own set-up
        before = anonymous_bytes()
        with Peak() as peak:
            kept = work()
        del kept
        return max(0, peak.bytes - before - with_state) / 1e6


def measure(mib: int, runs: int) -> dict[str, Any]:
    """Alternating transfers, and the memory of each apart."""
    taken: dict[str, dict[str, list[dict[str, float]]]] = {"save": {}, "load": {}}
    with bucket(mib) as (clients, server, process):
        size = clients.local.stat().st_size
        for work in (*clients.saving().values(), *clients.loading().values()):
            work()  # connections, imports and memory that every later run finds ready
        for _ in range(runs):
            for way, works in (("save", clients.saving()), ("load", clients.loading())):
                for name, work in works.items():
                    taken[way].setdefault(name, []).append(once(work, size, server, process))
    result: dict[str, Any] = {}
    for way, clients_taken in taken.items():
        peer = clients_taken["s3fs"]
        result[way] = {
            name: {
                **{key: spread([each[key] for each in values]) for key in ("mb_per_s", "cpu_s_per_gb", "server_busy")},
                "speed_to_s3fs": _ratio(values, peer, "mb_per_s"),
                "cpu_to_s3fs": _ratio(values, peer, "cpu_s_per_gb"),
                "most_in_flight": max(each["most_in_flight"] for each in values),
                "peak_mb_beyond_state": apart(memory, mib, name, way),
            }
            for name, values in clients_taken.items()
        }
    return result


def _ratio(ours: list[dict[str, float]], peer: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] / other[key] for one, other in zip(ours, peer, strict=True))


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    mib, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    publish("s3_transfer", chosen.size, {"mib": mib, "runs": runs, "results": measure(mib, runs)}, chosen.save)


if __name__ == "__main__":
    main()
