"""What MLflow shows of where a run comes from: its user and the commit of its project."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
from pathlib import Path


def source_tags(name: str, project: Path | None) -> dict[str, str]:
    """The tags of a run of the pipeline `name`; `project` is the folder whose git commit is noted."""
    tags = {"mlflow.source.name": f"trainflow run {name}", "mlflow.source.type": "PROJECT", "trainflow.pipeline": name}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = shutil.which("git")
    if git is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [git, "-C", str(project or Path.cwd()), "rev-parse", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            tags["mlflow.source.git.commit"] = done.stdout.strip()
    return tags
