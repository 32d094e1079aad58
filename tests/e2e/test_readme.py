"""README.md: the whole snippet runs as it is, and the pictures are small files that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_runs_as_it_is(tmp_path: Path) -> None:
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "Trainer(Line()" in block]
    for _ in range(2):  # the second time it goes on from the last checkpoint
        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.splitlines()[-1]) < 1e-6


def test_the_pictures_are_small() -> None:
    pictures = [ROOT / name for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)]
    assert len(pictures) >= 2
    assert [picture.name for picture in pictures if not 1_000 < picture.stat().st_size < 150_000] == []
