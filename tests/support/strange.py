"""Files of a stranger that leave a mark where they are executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.command import Running, running


class Strange:
    """Modules and settings of a stranger among the temporary files, and in every folder that is named."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.mark, self._program = folder / "temporary", folder / "mark", folder / "bin" / "started.py"
        for path in (self.temporary, self._program.parent):
            path.mkdir(parents=True)
        # As the installed script: its own folder is on the path.
        self._program.write_text("from trainflow.flows.cli.main import main\nmain()\n")
        self.plant(self.temporary)

    def plant(self, folder: Path) -> None:
        for name in ("mlflow", "torch", "sitecustomize", "usercustomize", "uvicorn", "psutil", "json"):
            mark = f"{self.mark}/{folder.name}-{name}"
            (folder / f"{name}.py").write_text(f"import os\nos.makedirs({mark!r})\n")
        called = {"version": 1, "handlers": {"x": {"()": "os.makedirs", "name": f"{self.mark}/{folder.name}-settings"}}}
        (folder / "called.yml").write_text(json.dumps({**called, "root": {"handlers": ["x"]}}))
        (folder / "prefect.toml").write_text('[logging]\nconfig_path = "called.yml"\n')
        (folder / ".env").write_text("PREFECT_LOGGING_SETTINGS_PATH=called.yml\n")

    def running(self, *words: str, cwd: Path) -> AbstractContextManager[Running]:
        log, env = self._program.with_name(words[0]), {"TMPDIR": str(self.temporary)}
        return running(*words, log=log, cwd=cwd, env=env, program=self._program)


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[Strange]:
    strange = Strange(tmp_path / "strange")
    yield strange
    assert not strange.mark.exists(), list(strange.mark.iterdir())
