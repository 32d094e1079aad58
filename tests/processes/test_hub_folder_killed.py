"""A publisher that is killed leaves nothing visible behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.publishing import digits_content
from tests.support.repository import ROOT
from trainer_lib.commit import verify_files
from trainer_lib.hub.folder import FolderHub


def test_a_killed_publisher_leaves_nothing_visible_and_its_leftovers_are_removed(tmp_path: Path) -> None:
    """Killed at every write in turn: readers see whole revisions only, and the same call then completes."""
    target = str(tmp_path / "hub")
    content = digits_content(tmp_path / "model")
    code = """if 1:
        import os, signal, sys
        from pathlib import Path
        from trainer_lib.storage import Store
        from tests.support.publishing import digits_content
        from trainer_lib.hub.transport import publish
        left = int(sys.argv[2])
        def killing(method):
            def write(self, *args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(self, *args, **kwargs)
            return write
        content = digits_content(Path(sys.argv[3]))
        Store.open_write, Store.create = killing(Store.open_write), killing(Store.create)
        publish(sys.argv[1], content, message="first")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seen: list[int] = []
    for writes in range(12):
        command = [sys.executable, "-c", code, target, str(writes), str(tmp_path / "model")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        seen.append(len(FolderHub(target).revisions()))
        assert all(not verify_files(one.store, one.commit) for one in FolderHub(target).revisions())
    else:
        pytest.fail("it never completed")
    assert seen == sorted(seen)  # killed after the commit, when the lease is given back: it stays
    assert seen[:3] == [0, 0, 0]
    assert [path.name for path in (Path(target) / "revisions").iterdir()] == [f"00001-{content.digest[:16]}"]
    assert FolderHub(target).newest() is not None
