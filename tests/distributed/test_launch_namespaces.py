"""Two machines with addresses of their own, as two network namespaces: what loopback would hide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.launched import Owner
from tests.support.nodes import ADDRESSES, PORT, Follower, Network, two_machines
from tests.support.repository import ROOT
from trainer_lib.requests import PreparedData, Request

pytestmark = pytest.mark.needs("namespaces")
ENDPOINT = f"{ADDRESSES[0]}:{PORT}"


@pytest.fixture
def network() -> Iterator[Network]:
    with two_machines() as network:
        yield network


class Pair:
    """A leading and a following machine at work on one request."""

    def __init__(self, folder: Path, network: Network, asked: Request[Any], **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        usual = {"nodes": 2, "rendezvous": ENDPOINT, "processes": 1, "grace_s": 5.0, "join_timeout_s": 40.0}
        env = {"OMP_NUM_THREADS": "1", "STEP_S": "0.05"}
        options = (ENDPOINT, "--processes", "1", "--threads", "1", "--grace-s", "5", "--join-timeout-s", "40")
        self.follower = Follower(folder / "other", *options, prefix=network.inside(1, []))
        self.owner = Owner(folder, asked, prefix=network.inside(0, []), **{**usual, "env": env, **config})

    def wait(self) -> dict[str, Any]:
        """How the leading machine's launch ended."""
        self.owner.process.wait(timeout=120)
        return self.owner.outcome()

    def close(self) -> None:
        self.follower.close()
        self.owner.close()


def saves(output: str) -> int:
    return len(list(Path(output).glob("checkpoints/checkpoint-*/COMMIT.json")))


def test_a_machine_whose_wire_is_cut_is_lost_and_the_run_is_resumed_on_both(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, network: Network
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    first = Pair(tmp_path / "first", network, asked)
    try:
        while saves(asked.output) < 2:
            assert first.owner.process.is_running()
            time.sleep(0.05)
        network.cut()
        outcome = first.wait()
    finally:
        first.close()
    assert outcome["class"] == "InfrastructureError"
    assert re.fullmatch(
        r"The machine \S+ was lost at step \d+: there was no sign of life for \d+ s\.", outcome["message"]
    )
    assert (outcome["field"], outcome["retryable"]) == ("train.launch.nodes", True)

    with two_machines() as mended:
        second = Pair(tmp_path / "second", mended, asked)
        try:
            outcome = second.wait()
            assert second.follower.wait() == 0, second.follower.output()
        finally:
            second.close()
    result = outcome["result"]
    assert (result["world_size"], result["global_step"]) == (2, 36)
    assert result["resumed_from"] >= 12
    assert tiny.weights(asked.output) == uninterrupted_weights


SCRIPT = """
import os
from tests.support.toys import classification_rows
from tests.support.training import trainer

one = trainer("out", classification_rows(16), max_steps=2, save_strategy="no", disable_tqdm=True)
one.train()
comm = one._trainflow.comm
print("rank", comm.rank, "of", comm.world_size, "through", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""


def test_a_script_under_torchrun_on_two_machines(tmp_path: Path, network: Network) -> None:
    """torch's own dynamic rendezvous; nobody says through which interface, and no name of a host resolves here."""
    (tmp_path / "script.py").write_text(SCRIPT)
    root = ROOT
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", ENDPOINT, "--rdzv-id", "x", "--log-dir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            network.inside(
                node,
                [*command, "--local-addr", ADDRESSES[node], "--rdzv-conf", f"is_host={1 - node}", "script.py"],
            ),
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], said
    lines = sorted(line for text in said for line in text.splitlines() if line.startswith("rank"))
    interfaces = {line.split()[-1] for line in lines}
    assert [line.rpartition(" through")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]
    assert interfaces == {"wire0", "wire1"}
