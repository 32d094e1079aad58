"""The release workflow: who may do what in it, and its scripts, run here on files as they are there."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.repository import ROOT, pyproject

FILE = ROOT / ".github" / "workflows" / "release.yml"
JOBS: dict[str, Any] = YAML(typ="safe").load(FILE.read_text("utf-8"))["jobs"]


def _run(job: str, step: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a step as GitHub does: by bash, which ends at the first error."""
    (script,) = [part["run"] for part in JOBS[job]["steps"] if part.get("name") == step]
    command = ["bash", "-eo", "pipefail", "-c", script]
    env = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_actions_are_pinned_and_only_the_publisher_is_trusted() -> None:
    used = re.findall(r"uses: (.*)", FILE.read_text("utf-8"))
    assert len(used) == 6
    assert all(re.match(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+(,|$)", text) for text in used)
    assert JOBS["build"]["permissions"] == {"contents": "read"}
    assert JOBS["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert JOBS["publish"]["environment"]["name"] == "pypi"
    assert "secrets." not in FILE.read_text("utf-8")
    if linter := shutil.which("zizmor"):
        done = subprocess.run([linter, "--offline", str(FILE)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("is_right", [True, False])
def test_a_tag_that_is_not_the_version_builds_nothing(is_right: bool, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tag = f"v{pyproject()['project']['version']}" if is_right else "v0.0.7"
    assert (_run("build", "Compare the tag with the version", tmp_path, TAG=tag).returncode == 0) is is_right


def test_a_file_that_changes_between_the_jobs_is_not_published(tmp_path: Path) -> None:
    wheel, output = tmp_path / "dist" / "trainflow.whl", tmp_path / "output"
    wheel.parent.mkdir()
    wheel.write_bytes(b"built")
    assert _run("build", "Hash what was built", tmp_path, GITHUB_OUTPUT=str(output)).returncode == 0
    hashes = output.read_text().removeprefix("hashes=").strip()
    assert base64.b64decode(hashes).decode().split()[1] == wheel.name
    (tmp_path / "SHA256SUMS").unlink()
    assert _run("publish", "Compare the files with their hashes", tmp_path, HASHES=hashes).returncode == 0
    wheel.write_bytes(b"changed")
    assert _run("publish", "Compare the files with their hashes", tmp_path, HASHES=hashes).returncode != 0
