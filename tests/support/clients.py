"""The environment of the client libraries, and their cases run in it: `needs("clients")` asks for it.

A client is a library or script that subclasses the Trainer of transformers. Its packages lie in a folder beside those
of the running interpreter, so that nothing else of the product ever sees them; `make clients` fills the folder and runs
tests/clients.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

PINS = ROOT / "tests" / "clients-constraints.txt"
#: Environment variable that names another folder, for several checkouts with one set of clients.
VARIABLE = "TRAINFLOW_TEST_CLIENTS"
_STAMP = "installed.sha256"


def folder() -> Path:
    return Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "clients")


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in PINS.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if line)


def _digest() -> str:
    return hashlib.sha256(PINS.read_bytes()).hexdigest()


def are_installed() -> bool:
    """Whether the folder holds the clients at their pinned versions."""
    stamp = folder() / _STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest()


def distributions() -> Iterable[importlib.metadata.Distribution]:
    return importlib.metadata.distributions(path=[str(folder())])


def install() -> int:
    """Install the clients unless they are there. Returns pip's exit code; an unreachable index gives up in seconds."""
    if are_installed():
        return 0
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--timeout", "10", "--retries", "1"]
    target = ["install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder()), "--requirement", str(PINS)]
    code = subprocess.run([*pip, *target], check=False).returncode
    if code == 0:
        (folder() / _STAMP).write_text(_digest(), encoding="utf-8")
    return code


@dataclass(frozen=True)
class Runs:
    """The outcomes of a client's cases on both Trainers, by name, as `client_cases.run` returns them."""

    ours: dict[str, dict[str, Any]]
    transformers: dict[str, dict[str, Any]]


#: Name of a client, as the documentation has it -> the module with its `CASES`.
CLIENTS = {"TRL": "tests.support.trl_cases", "sentence-transformers": "tests.support.sentence_cases"}


def run_cases(name: str, output: Path) -> Runs:
    """Run a client's cases on both Trainers, each side in one process, below an empty folder."""
    return Runs(*(run_side(name, side, output / side) for side in ("ours", "transformers")))


def run_side(name: str, side: str, output: Path, *, only: str = "", processes: int = 1) -> dict[str, Any]:
    """Run the cases of a client, or the `only` one, on "ours" or "transformers"; several processes by torchrun."""
    answer = output / "answer.json"
    output.mkdir()
    given = [CLIENTS[name], side, str(output), str(answer), only]
    done = run_module("tests.support.client_cases", *given, output=output, processes=processes)
    (output / "stderr").write_text(done.stderr, encoding="utf-8")
    assert answer.exists(), f"{name} on {side} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}"
    written: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return written


def run_module(module: str, *arguments: str, output: Path, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a module in `output` where the clients can be imported, without a network; several processes by torchrun."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder()))), "HF_HUB_OFFLINE": "1"}
    env["TMPDIR"] = str(output)  # torchrun leaves a folder there
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else ()), "-m", module, *arguments]
    return subprocess.run(command, cwd=output, env=env, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    if install():
        sys.stderr.write("The client libraries could not be installed: their tests are skipped.\n")
