"""The test harness itself: what it refuses is refused, seen from outside by a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT


def _pytest(folder: Path, source: str, **env: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text("import os, warnings\nimport pytest\n" + source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    done = subprocess.run(
        [*command, str(folder / "test_it.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_skip_that_nobody_agreed_to_fails_the_run(tmp_path: Path) -> None:
    code, output = _pytest(tmp_path, "def test_later():\n    pytest.skip('some day')\n")
    assert code == 1
    assert "SKIP NOT ALLOWED" in output and "some day" in output


def test_a_need_that_is_absent_skips_and_an_unknown_one_fails(tmp_path: Path) -> None:
    source = (
        "@pytest.mark.needs('browser')\ndef test_page(): raise AssertionError\n"
        "@pytest.mark.needs('luck')\ndef test_luck(): pass\n"
    )
    code, output = _pytest(tmp_path, source, PATH=str(tmp_path))
    assert code == 1
    assert "1 skipped, 1 error" in output
    assert "needs(browser)" in output and "needs('luck')" in output
    assert "SKIP NOT ALLOWED" not in output


def test_warnings_leaks_and_the_machines_settings_do_not_pass(tmp_path: Path) -> None:
    source = (
        "def test_warns(): warnings.warn('careless')\n"
        "def test_leaks(): os.environ['LEFT'] = '1'\n"
        "def test_litters(): open('litter', 'w').close()\n"
        "def test_home(): assert os.environ['HOME'] != '/somebody' and 'AWS_SECRET_ACCESS_KEY' not in os.environ\n"
    )
    code, output = _pytest(tmp_path, source, HOME="/somebody", AWS_SECRET_ACCESS_KEY="x")
    assert code == 1
    assert "1 failed, 3 passed, 2 errors" in output
    assert "environment variable LEFT" in output and "litter" in output
