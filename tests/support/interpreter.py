"""Code in an interpreter of its own, for what must not depend on what this one has imported."""

from __future__ import annotations

import subprocess
import sys

from tests.support.repository import ROOT


def run_python(code: str) -> str:
    """Run code in a new interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
