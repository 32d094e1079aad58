"""A real Ray cluster of several raylets on this machine, in a process of its own; each raylet is a machine.

``python tests/support/ray_cluster.py FOLDER CPUS…`` prints the address and obeys lines: ``add CPUS [GPUS]``,
``kill N``, ``drain N SECONDS``, and the end of its input.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import police
from tests.support.repository import ROOT

TOKEN = "0" * 64
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A cluster of machines with so many CPUs each, beside a head that has none.

    Its folder lies right below /tmp: the paths of sockets have 107 characters at most.
    """

    def __init__(self, *cpus: int, variables: Mapping[str, str] = VARIABLES) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        (folder / "tmp" / "ray").mkdir(parents=True)
        # Ray keeps idle workers, which are not what a test left behind.
        kept = {name: value for name, value in os.environ.items() if name != police.TOKEN}
        with (folder / "cluster.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ray_cluster", str(folder), *map(str, cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**kept, **variables, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
                start_new_session=True,
            )
        self.address = str(self._answer()["address"])

    def tell(self, *words: object) -> dict[str, Any]:
        """Have the cluster change, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        code = self.process.wait()
        raise AssertionError(f"the cluster has ended with {code}: {(self._folder / 'cluster.log').read_text()}")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        shutil.rmtree(self._folder)


def _main(folder: str, *cpus: str) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder})
    machines = [cluster.add_node(num_cpus=int(number)) for number in cpus]
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "add":
            machines.append(cluster.add_node(num_cpus=int(rest[0]), num_gpus=int(rest[1]) if rest[1:] else 0))
        elif word == "kill":
            cluster.remove_node(machines[int(rest[0])], allow_graceful=False)
        elif word == "drain":
            _drain(cluster, machines[int(rest[0])], float(rest[1]))
        print(json.dumps({"done": word}), flush=True)
    cluster.shutdown()


def _drain(cluster: Any, machine: Any, seconds: float) -> None:
    """Announce that a machine goes, as a cloud's notice of preemption does through Ray."""
    client = importlib.import_module("ray._raylet").GcsClient(address=cluster.address)
    reasons = importlib.import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
    reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + seconds) * 1000)
    accepted, message = client.drain_node(machine.node_id, reason, "the test takes it", deadline)
    assert accepted, message


if __name__ == "__main__":
    _main(*sys.argv[1:])
