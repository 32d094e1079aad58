"""`needs("xla")`: the interpreter that has torch_xla, and running `xla_cases` there.

torch_xla needs a torch of its own version, so that its environment is another one than that of the tests.
CONTRIBUTING.md has the commands.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

#: Environment variable that names the interpreter of an environment with torch_xla.
VARIABLE = "TRAINFLOW_XLA_PYTHON"


def is_installed() -> bool:
    named = os.environ.get(VARIABLE)
    return named is not None and Path(named).is_file()


def run_cases(output: Path, *names: str, **variables: str) -> dict[str, Any]:
    """Run `CASES` in that interpreter, on torch_xla's CPU client; what each returned, by name."""
    kept = ("HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    env = {**{name: os.environ[name] for name in kept if name in os.environ}, "PYTHONPATH": str(ROOT)}
    command = [os.environ[VARIABLE], "-m", "tests.support.xla_cases", str(output), *names]
    settings = {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run(command, cwd=output, env={**env, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads((output / "answer.json").read_text(encoding="utf-8"))
    return answer
