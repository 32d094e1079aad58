"""Three houses and their floors; packages as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import repository
from tests.support.repository import ROOT


def test_import_linter_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_package_is_listed() -> None:
    assert set(repository.pyproject()["tool"]["setuptools"]["packages"]) == repository.packages()
