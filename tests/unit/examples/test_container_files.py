"""The files for containers: every placeholder has a variable, and the schemas of Kubernetes and Kubeflow fit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from tests.support.repository import ROOT
from trainer_lib.errors import TrainflowError
from trainflow.flows.spec.spec import load_spec

FOLDER = ROOT / "deployments"
POOL = json.loads((FOLDER / "kubernetes-pool.json").read_text())
# What the worker puts in at the start of a run.
STARTED = {
    "name": "toy",
    "namespace": "default",
    "service_account_name": "default",
    "image": "registry.example/toy:1",
    "cpu_request": "1",
    "cpu_limit": "4",
    "memory_request": "1Gi",
    "memory_limit": "8Gi",
    "labels": {"app": "trainflow"},
    "env": [{"name": "A", "value": "1"}],
    "command": ["prefect", "flow-run", "execute"],
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
    """By Kubernetes' own schemas."""
    kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_job_of_the_pool_and_the_example_of_two_pods_are_of_kubernetes() -> None:
    placeholders = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(POOL["job_configuration"])))
    assert placeholders == set(POOL["variables"]["properties"])
    job = rendered(POOL["job_configuration"]["job_manifest"])
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    documents = _read("kubernetes.yaml")
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in (job, *documents):
        validate(document)


def _read(name: str) -> list[Any]:
    return list(YAML(typ="safe").load_all((FOLDER / name).read_text()))


def _find(value: Any, name: str) -> Iterator[Any]:
    """Every value under this name, wherever it is."""
    if isinstance(value, dict):
        yield from ([value[name]] if name in value else [])
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _find(inner, name)


def _codes(cls: type[TrainflowError]) -> Iterator[tuple[int, bool]]:
    yield cls.exit_code, cls.retryable
    for each in cls.__subclasses__():
        if each.__module__ == cls.__module__:
            yield from _codes(each)


def _again_and_never() -> tuple[set[int], set[int]]:
    """Exit codes that another try can help, and those that it cannot."""
    codes = set(_codes(TrainflowError))
    again = {code for code, retryable in codes if retryable}
    # 1 does not come from a typed error, and a container gets no Ctrl-C.
    return again, {code for code, _ in codes} - again - {1, 130}


def test_the_failure_rules_are_those_of_the_errors() -> None:
    again, never = _again_and_never()
    for name, count in (("kubernetes.yaml", 1), ("jobset.yaml", 1), ("trainjob.yaml", 1)):
        documents = _read(name)
        policies = list(_find(documents, "podFailurePolicy"))
        assert len(policies) == count
        [template] = [each["spec"] for each in _find(documents, "template") if "containers" in each.get("spec", {})]
        first, second = policies[0]["rules"]
        assert (first["action"], first["onExitCodes"]["operator"]) == ("FailJob", "In")
        assert set(first["onExitCodes"]["values"]) == never
        assert first["onExitCodes"]["containerName"] == template["containers"][0]["name"]
        assert (second["action"], second["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        # Kubernetes takes a failure policy for pods that it does not start again by itself only.
        assert template["restartPolicy"] == "Never"
    [task] = _read("skypilot.yaml")
    assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == again
    assert shlex.split(task["run"])[:2] == ["trainflow", "run"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("jobset.yaml", ["JobsetV1alpha2JobSet"]),
        ("trainjob.yaml", ["TrainerV1alpha1TrainingRuntime", "TrainerV1alpha1TrainJob"]),
    ],
)
def test_the_files_of_kubeflow_have_the_fields_of_its_api(name: str, kinds: list[str]) -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")
    documents = _read(name)
    assert [document["kind"] for document in documents] == [re.sub(r"^\w+?V1alpha[12]", "", kind) for kind in kinds]
    for document, kind in zip(documents, kinds, strict=True):
        read = getattr(models, kind).from_dict(document)
        # What it does not know is left out when it is written again.
        assert read.to_dict() == document
    for spec in _find(documents, "replicatedJobs"):
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec[0]["template"]["spec"]}
        )


# Of RayJobSpec and RayClusterSpec (KubeRay 1.5), for which there is no package of schemas.
RAY_JOB = {"submissionMode", "entrypoint", "backoffLimit", "submitterConfig"}
RAY_JOB |= {"shutdownAfterJobFinishes", "rayClusterSpec"}
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
RAY_HEAD = {"rayStartParams", "template"}
RAY_WORKERS = {*RAY_HEAD, "groupName", "replicas", "minReplicas", "maxReplicas"}


def test_the_ray_job_has_the_fields_of_kuberay(monkeypatch: pytest.MonkeyPatch) -> None:
    script, job = _read("rayjob.yaml")
    validate(script)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for found, known in ((spec, RAY_JOB), (cluster, RAY_CLUSTER), (head, RAY_HEAD), (workers, RAY_WORKERS)):
        assert set(found) == known
    for group in (head, workers):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]})
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    [volume], [container] = (head["template"]["spec"][name] for name in ("volumes", "containers"))
    assert volume["configMap"]["name"] == script["metadata"]["name"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["sh", f"{container['volumeMounts'][0]['mountPath']}/run.sh", "$RAY_JOB_SUBMISSION_ID"]
    assert words[3:5] == ["trainflow", "run"]
    # What the launch asks for is what there is.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Ray need not be installed
    launch = load_spec(ROOT / "examples" / "digits" / "pipeline.yaml", words[6:]).train.launch
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (launch.engine, launch.nodes, launch.processes) == ("ray", workers["replicas"], limits["nvidia.com/gpu"])
    assert launch.engine_options == {"gpus": limits["nvidia.com/gpu"]}
    assert limits["cpu"] >= launch.processes and head["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("can_stop", [True, False])
def test_a_ray_job_that_would_fail_alike_stops_itself(tmp_path: Path, can_stop: bool) -> None:
    """KubeRay tries again what has failed, not what was stopped."""
    again, never = _again_and_never()
    (tmp_path / "run.sh").write_text(_read("rayjob.yaml")[0]["data"]["run.sh"])
    programs = {
        "trainflow": 'echo "$@"; exit $CODE',
        "ray": f'echo "ray $@" >> calls; exit {0 if can_stop else 1}',
        "sleep": 'echo "sleep $@" >> calls',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for code in (0, 1, *sorted(again | never)):
        (tmp_path / "calls").write_text("")
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
        command = ["sh", "run.sh", "job-1", "trainflow", "run", "a b"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.splitlines()[0]) == (code, "run a b")
        calls = (tmp_path / "calls").read_text().splitlines()
        stop = "ray job stop --no-wait --address http://127.0.0.1:8265 job-1"
        assert calls == ([stop, "sleep 60"] if can_stop else [stop]) * (code in never)


def test_the_dockerfile_copies_what_the_package_needs_and_installs_it() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    steps = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    copied = {word for line in steps if line.startswith("COPY ") and "--" not in line for word in line.split()[1:-1]}
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= copied
    assert {"trainflow", "flows", "tasks", "trainer_lib"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    [install] = [line.removeprefix("RUN ") for line in steps if line.startswith("RUN pip")]
    assert shlex.split(install)[-2:] == ["constraints.txt", ".[torch,s3]"]
    # A run ends as Kubernetes asks only if the signal reaches it, and writes nothing as root.
    assert 'ENTRYPOINT ["tini", "-g", "--"]' in steps
    assert "USER 1000" in steps
    if linter := shutil.which("hadolint"):
        done = subprocess.run([linter, str(Path(FOLDER / "Dockerfile"))], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
