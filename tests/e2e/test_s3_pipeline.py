"""The whole chain on an object store: run, found again, killed, resumed elsewhere; no credential is left anywhere."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import toy
from tests.support.command import Done, engine, running, trainflow
from tests.support.prefect_home import make_home
from trainer_lib.storage import Store

KEY_ID, SECRET = "AKIDNOWHERETOBEFOUND", "secret/nowhere+to+be+found"
# The steps of the run that is killed are slow: there is time to do it.
PAUSE = "import os, time; time.sleep(float(os.environ.get('STEP_S', '0'))); "
RECIPE = toy.RECIPE.replace("y = self.linear(", f"{PAUSE}y = self.linear(")
WHOLE = ("train.args.max_steps=16", "tracking.enabled=true")
TRAINING = (*WHOLE, "evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")
STAGES = ["prepare-data", "train", "evaluate", "predict", "push-to-hub"]


@pytest.fixture
def env(s3_url: str, tmp_path: Path, prefect_database: Path) -> Iterator[dict[str, str]]:
    """The environment of the commands: credentials that are easy to look for, everything kept below tmp_path."""
    homes = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("DATA", "STATE", "CACHE")}
    credentials = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    with engine(make_home(tmp_path / "prefect", prefect_database)) as prefect:
        yield {**prefect, **homes, **credentials}


def told(done: Done) -> dict[str, dict[str, Any]]:
    """The stages of a run that succeeded (told with --json), by name."""
    assert done.code == 0, done.out + done.err
    return {stage["stage"]: stage for stage in json.loads(done.out)["stages"]}


def statuses(stages: dict[str, dict[str, Any]]) -> list[str]:
    return [stages[name]["status"] for name in STAGES]


def committed_steps(storage: str) -> list[int]:
    """Steps of the checkpoints that are committed."""
    commits = [info.path for info in Store.open(storage).list("stages") if info.path.endswith("COMMIT.json")]
    return [int(path.split("/")[-2].removeprefix("checkpoint-")) for path in commits if "/checkpoint-" in path]


@pytest.mark.timeout(300)
def test_the_chain_on_s3_runs_is_cached_and_resumes_elsewhere_after_kill_9(
    s3_url: str, env: dict[str, str], tmp_path: Path
) -> None:
    spec = toy.project(tmp_path / "project", recipe=RECIPE)
    killed, quiet = f"{s3_url}/killed", f"{s3_url}/undisturbed"
    slowly = {**env, "STEP_S": "0.5"}

    with running("run", spec, f"storage={killed}", *TRAINING, log=tmp_path / "log", env=slowly) as command:
        command.wait_for("train         starts")
        deadline = time.monotonic() + 90
        while not committed_steps(killed):
            assert time.monotonic() < deadline, command.output
            time.sleep(0.1)
        family = psutil.Process(command.process.pid).children(recursive=True)
        assert command.stop(signal.SIGKILL) == -signal.SIGKILL, "it was still running"
        assert psutil.wait_procs(family, timeout=60)[1] == [], "the workers end by themselves"

    # Another machine: the project is not there, only the storage.
    spec.parent.rename(tmp_path / "left behind")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    continued = told(trainflow("resume", "--storage", killed, "--json", cwd=elsewhere, env=env))
    (tmp_path / "left behind").rename(spec.parent)
    assert statuses(continued) == ["cached", "ran", "skipped", "skipped", "skipped"]
    assert continued["train"]["manifest"]["meta"]["resumed_from"] in committed_steps(killed)

    first = told(trainflow("run", spec, f"storage={quiet}", *WHOLE, "--json", env=env))
    assert statuses(first) == ["ran"] * 5
    assert first["train"]["manifest"]["content_digest"] == continued["train"]["manifest"]["content_digest"]

    assert statuses(told(trainflow("run", spec, f"storage={quiet}", *WHOLE, "--json", env=env))) == ["cached"] * 5
    assert found_credentials(s3_url, tmp_path) == []


def found_credentials(storage: str, folder: Path) -> list[str]:
    """Where a credential is written: any object of the store; logs, MLflow's and Prefect's databases, caches."""
    store = Store.open(storage)
    contents = [(info.path, store.read_bytes(info.path)) for info in store.list()]
    local = [path for path in folder.rglob("*") if path.is_file()]
    assert {"mlflow.db", "server.log", "log"} <= {path.name for path in local}
    contents += [(str(path), path.read_bytes()) for path in local]
    secrets = [text.encode() for text in (KEY_ID, SECRET, "test-secret")]
    return [name for name, content in contents if any(secret in content for secret in secrets)]
