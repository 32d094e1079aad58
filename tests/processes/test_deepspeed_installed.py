"""DeepSpeed in processes of its own: every key of the installed version, and what a machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_lib.arguments.deepspeed import deepspeed_keys as keys


@pytest.mark.needs("deepspeed")
def test_every_key_of_the_installed_version_is_decided_on() -> None:
    """A key that DeepSpeed gains has to be mapped, passed or refused here."""
    code = (
        "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as model\n"
        "print('KEYS', *(field.alias or name for name, field in model.model_fields.items()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known = set(next(line for line in ran.stdout.splitlines() if line.startswith("KEYS")).split()[1:])
    decided = {*keys.ZERO_MAPPED, *keys.OFFLOADS, *keys.ZERO_AUTO, *keys.ZERO_ALWAYS_ON, *keys.ZERO_PASSED}
    assert known - decided - keys.ZERO_REFUSED.keys() == set()


def test_a_missing_compiler_and_a_missing_package_are_told_beforehand(tmp_path: Path) -> None:
    """In a process whose PATH has no compiler, and in one that cannot import the package."""
    code = """
import sys
{before}
from trainer_lib.arguments import TrainingArguments
from trainer_lib.strategies.deepspeed import zero_config
config = {{"zero_optimization": {{"stage": 2, "cpu_offload": True}},
           "optimizer": {{"type": "AdamW", "params": {{"torch_adam": False}}}}}}
zero_config.resolve_config(TrainingArguments(output_dir="x", deepspeed=config))
"""
    hide = (
        "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: find(n) if n != 'deepspeed' else None"
    )
    for before, expected in (("", "the program g++ is not installed"), (hide, 'pip install "trainflow[deepspeed]"')):
        ran = subprocess.run(
            [sys.executable, "-c", code.format(before=before)],
            env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode != 0
        assert expected in ran.stderr
