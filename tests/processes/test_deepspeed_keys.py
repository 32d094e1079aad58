"""Every key of the installed DeepSpeed is mapped, passed on or refused."""

from __future__ import annotations

import subprocess
import sys

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
