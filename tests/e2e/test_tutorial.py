"""docs/tutorial.md, done literally: every command and every Python block, from an empty folder, with its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pages import blocks

MARK = "@@ command "


@dataclass
class Step:
    """One command, and what the page shows of its output; nothing shown: anything."""

    command: str
    shown: list[str]

    def matches(self, output: str) -> bool:
        """Whether the output is what is shown; `…` is any text in a line, or any lines."""
        lines = [re.escape(line).replace("…", ".*") + r" *\n" if line != "…" else r"(.*\n)*?" for line in self.shown]
        return not self.shown or re.fullmatch("".join(lines), output.lstrip("\n")) is not None


def _steps() -> list[Step]:
    steps = []
    for block in blocks("tutorial.md"):
        if block.language == "python":
            steps.append(Step(f"python - <<'END'\n{block.text}END", []))
        elif block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(line[2:], []))
                else:
                    steps[-1].shown.append(line)
    return steps


def test_only_the_installation_is_left_out() -> None:
    assert [block.text for block in blocks("tutorial.md") if block.language not in ("console", "python")] == [
        'python3 -m venv .venv && source .venv/bin/activate\npip install -c constraints.txt ".[torch]"\n'
    ]
    assert len(_steps()) > 10


@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_does_what_the_page_shows(tmp_path: Path) -> None:
    steps = _steps()
    script = "".join(f"echo '{MARK}{number}'\n{step.command}\n" for number, step in enumerate(steps))
    # Not so narrow that tables lose columns; a terminal of the reader's is as wide.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    folder, log = tmp_path / "empty", tmp_path / "log"
    folder.mkdir()
    with log.open("wb") as output:
        bash = subprocess.Popen(
            ["bash", "-e", "-c", script], cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = bash.wait(840)
        except subprocess.TimeoutExpired:
            os.killpg(bash.pid, signal.SIGKILL)
            code = bash.wait()
    text = log.read_text(encoding="utf-8")
    assert code == 0, text
    outputs = re.split(rf"^{MARK}\d+\n", text, flags=re.MULTILINE)[1:]
    # What bash says of the command that the page kills.
    outputs = [re.sub(r"^bash: line \d+: .* Killed .*\n", "", output, flags=re.MULTILINE) for output in outputs]
    wrong = [
        f"$ {step.command}\n{output}" for step, output in zip(steps, outputs, strict=True) if not step.matches(output)
    ]
    assert wrong == []
