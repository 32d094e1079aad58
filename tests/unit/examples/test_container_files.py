"""The files for containers: every placeholder has a variable, and where the schema tools are installed they agree."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.support.repository import ROOT

FOLDER = ROOT / "deployments"
POOL = json.loads((FOLDER / "kubernetes-pool.json").read_text())
# What the worker puts in at the start of a run.
STARTED = {
    "name": "toy",
    "namespace": "default",
    "labels": {"app": "trainflow"},
    "env": [{"name": "A", "value": "1"}],
    "command": ["prefect", "flow-run", "execute"],
    "service_account_name": "default",
    "image": "registry.example/toy:1",
    "cpu_request": "1",
    "cpu_limit": "4",
    "memory_request": "1Gi",
    "memory_limit": "8Gi",
    "finished_job_ttl": 60,
}


def rendered(value: Any) -> Any:
    """The job as the worker renders it."""
    defaults = {name: each["default"] for name, each in POOL["variables"]["properties"].items() if "default" in each}
    values = {**defaults, **STARTED}
    if isinstance(value, dict):
        return {name: rendered(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rendered(inner) for inner in value]
    if isinstance(value, str) and (whole := re.fullmatch(r"\{\{ (\w+) \}\}", value)):
        return values[whole[1]]
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: str(values[found[1]]), value) if isinstance(value, str) else value


def validate(document: Any) -> None:
    """By Kubernetes' own schemas (pip install kubernetes-validate), where they are installed."""
    if importlib.util.find_spec("kubernetes_validate") is not None:
        tool = importlib.import_module("kubernetes_validate")
        tool.validate(document, "1.30", strict=True)


def test_the_job_of_the_pool_is_one_of_kubernetes() -> None:
    placeholders = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(POOL["job_configuration"])))
    assert placeholders == set(POOL["variables"]["properties"])
    job = rendered(POOL["job_configuration"]["job_manifest"])
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    validate(job)


def test_the_example_of_two_pods_is_one_of_kubernetes() -> None:
    documents = list(YAML(typ="safe").load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        validate(document)


def test_the_dockerfile_copies_what_the_package_needs_and_installs_it() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    steps = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    copied = {word for line in steps if line.startswith("COPY ") and "--" not in line for word in line.split()[1:-1]}
    assert {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "trainflow",
        "flows",
        "tasks",
        "trainer_lib",
    } <= copied
    assert all((ROOT / name).exists() for name in copied)
    [install] = [line.removeprefix("RUN ") for line in steps if line.startswith("RUN pip")]
    assert shlex.split(install)[-2:] == ["constraints.txt", ".[s3]"]
    # A run ends as Kubernetes asks only if the signal reaches it, and writes nothing as root.
    assert 'ENTRYPOINT ["tini", "-g", "--"]' in steps
    assert "USER 1000" in steps
    if linter := shutil.which("hadolint"):
        done = subprocess.run([linter, str(Path(FOLDER / "Dockerfile"))], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
