"""`pip install trainflow` as it will be: wheel and sdist, in an environment of their own, outside of the repository."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import HOUSES, ROOT

pytestmark = [pytest.mark.needs("registry"), pytest.mark.timeout(1500)]

# What is not there in a clone, or does not belong into a distribution.
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".trainflow", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
)


def _environment() -> dict[str, str]:
    """The sandbox's variables with the user's own home: pip's cache and settings are there."""
    return {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir, "XDG_CACHE_HOME": "", "PYTHONPATH": ""}


def _run(*command: str | Path, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from it."""
    source, folder = tmp_path_factory.mktemp("source") / "trainflow", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    done = _run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def light(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    assert _run(sys.executable, "-m", "venv", folder, cwd=folder).returncode == 0
    _install(folder / "bin", str(_wheel(distributions)))
    yield folder / "bin"
    shutil.rmtree(folder)  # two gigabytes


def _wheel(distributions: Path) -> Path:
    (wheel,) = distributions.glob("*.whl")
    return wheel


def _install(binaries: Path, requirement: str) -> None:
    # Not compiled: most of it is never imported here.
    pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    done = _run(*pip, "--constraint", ROOT / "constraints.txt", requirement, cwd=binaries, timeout=900)
    assert done.returncode == 0, done.stderr
    assert _run(binaries / "python", "-m", "pip", "check", cwd=binaries).returncode == 0


def test_wheel_and_sdist_hold_the_packages_and_nothing_else(distributions: Path) -> None:
    for check in (("twine", "check", "--strict"), ("check_wheel_contents", "--config", ROOT / "pyproject.toml")):
        files = distributions.glob("*" if check[0] == "twine" else "*.whl")
        done = _run(sys.executable, "-m", *check, *files, cwd=distributions)
        assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(_wheel(distributions)) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"trainflow", "trainer_lib"}
    here = {
        # The houses flows and tasks are packages of trainflow, through its links.
        f"{'trainflow/' * (house in ('flows', 'tasks'))}{path.relative_to(ROOT).as_posix()}"
        for house in HOUSES
        for path in (ROOT / house).rglob("*")
        if path.is_file()
    }
    assert {name for name in here if "__pycache__" not in name} <= set(names)
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        below = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= below
    assert not any(name.startswith(("tests", "benchmarks", "docs", "shared")) for name in below)


def test_the_light_installation_looks_at_runs_and_says_what_training_needs(light: Path, tmp_path: Path) -> None:
    missing = (
        "import importlib.util as i; print([n for n in ('torch', 'accelerate', 'transformers') if i.find_spec(n)])"
    )
    assert _run(light / "python", "-c", missing, cwd=tmp_path).stdout == "[]\n"
    for words in ("--version", "init wine", "why wine/pipeline.yaml", "runs wine/pipeline.yaml"):
        done = _run(light / "trainflow", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    refused = _run(light / "trainflow", "run", "wine/pipeline.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert 'pip install "trainflow[torch]"' in refused.stderr
    assert not (tmp_path / "wine" / ".trainflow" / "runs").exists()


def test_a_project_runs_outside_of_the_repository(light: Path, distributions: Path, tmp_path: Path) -> None:
    _install(light, f"trainflow[torch] @ {_wheel(distributions).as_uri()}")
    assert _run(light / "trainflow", "init", "wine", cwd=tmp_path).returncode == 0
    for status in ("ran", "cached"):
        done = _run(light / "trainflow", "run", "wine/pipeline.yaml", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert {stage["status"] for stage in json.loads(done.stdout)["stages"]} == {status}
    shutil.copytree(ROOT / "examples" / "digits", tmp_path / "digits")
    quick = ("storage=store", "train.args.num_train_epochs=1", "train.launch.processes=2", "--json")
    demo = _run(light / "trainflow", "run", "digits/pipeline.yaml", *quick, cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert {stage["status"] for stage in json.loads(demo.stdout)["stages"]} == {"ran"}


def test_the_steps_of_the_dockerfile_make_an_environment_that_runs_its_project(tmp_path: Path) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "deployments" / "Dockerfile").read_text())
    image = tmp_path / "app" / "trainflow"
    image.mkdir(parents=True)
    for line in re.findall(r"^COPY ([^-\n].*) (\S+)$", text, re.MULTILINE):
        for name in line[0].split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, image / line[1], symlinks=True, ignore=LEFT_OUT)
            else:
                shutil.copy(ROOT / name, image / line[1])
    assert _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path).returncode == 0
    binaries = tmp_path / "venv" / "bin"
    [install] = re.findall(r"^RUN pip (install .*)", text, re.MULTILINE)
    done = _run(binaries / "python", "-m", "pip", *shlex.split(install), cwd=image, timeout=900)
    assert done.returncode == 0, done.stderr
    [project] = re.findall(r"^ARG PROJECT=(.*)", text, re.MULTILINE)
    shutil.copytree(ROOT / project, tmp_path / "app" / "project", ignore=LEFT_OUT)
    [command] = re.findall(r"^CMD (.*)", text, re.MULTILINE)
    program, *words = json.loads(command)
    shutil.rmtree(image)  # what runs is what was installed
    assert _run(binaries / program, *words, cwd=tmp_path / "app" / "project").returncode == 0
    quick = ("storage=store", "train.args.num_train_epochs=1", "train.launch.processes=1", "--json")
    ran = _run(binaries / program, "run", "pipeline.yaml", *quick, cwd=tmp_path / "app" / "project")
    assert ran.returncode == 0, ran.stderr
    assert {stage["status"] for stage in json.loads(ran.stdout)["stages"]} == {"ran"}
    shutil.rmtree(tmp_path / "venv")  # two gigabytes
