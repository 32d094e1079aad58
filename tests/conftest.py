"""A sandbox for the whole session, the leak police around every test, and `needs(...)`.

Nothing a test does may depend on, or change, the machine's own home, caches, credentials or running servers. The
sandbox is set up before any test module is imported, because Prefect and MLflow read the environment at import.
"""

from __future__ import annotations

import fnmatch
import functools
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import clients, memory_group, police, script_runs, slurm_cluster
from tests.support.once import shared_folder

pytest_plugins = (
    "tests.support.hub_server",
    "tests.support.prefect_home",
    "tests.support.s3",
    "tests.support.stores",
    "tests.support.tiny_runs",
)

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SANDBOX = pytest.StashKey[Path]()
SKIPS_ALLOWED = Path(__file__).with_name("skips_allowed.txt")


def _listed(name: str) -> list[str]:
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    return [text for line in lines if (text := line.split("#")[0].strip())]


_LISTED = _listed("slow.txt")
_QUICK = {line.removeprefix("not ") for line in _LISTED if line.startswith("not ")}
_SLOW = {line for line in _LISTED if not line.startswith("not ")}
_NIGHTLY = _listed("nightly.txt")

# Settings of the developer's machine that would reach into a test.
_FOREIGN = (
    *("AWS_", "GOOGLE_", "HF_", "HUGGING", "MLFLOW_", "PREFECT_", "FSSPEC_", "WANDB_", "TORCHELASTIC_"),
    "ACCELERATE_",
)
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CI", "COLUMNS"}

settings.register_profile(
    "trainflow", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trainflow")


def pytest_configure(config: pytest.Config) -> None:
    """Move home, caches and servers' homes into a private folder, before any test module is imported."""
    _hear_signals()
    sandbox = Path(tempfile.mkdtemp(prefix="trainflow-tests-")).resolve()
    config.stash[SANDBOX] = sandbox
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name in _FOREIGN_NAMES:
            del os.environ[name]
    home = sandbox / "home"
    for folder in ("home", "tmp", "cwd"):
        (sandbox / folder).mkdir(mode=0o700)
    os.environ.update(
        {
            police.TOKEN: uuid.uuid4().hex,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "MPLCONFIGDIR": str(home / ".cache" / "matplotlib"),
            "HF_HOME": str(home / ".cache" / "huggingface"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "KERAS_HOME": str(home / ".cache" / "keras"),
            "TORCHINDUCTOR_CACHE_DIR": str(home / ".cache" / "torchinductor"),  # made at an optimizer's first step
            "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),  # tables of Unicode, slow to make; no examples
            "PREFECT_HOME": str(home / ".prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "TRAINFLOW_PREFECT_LINGER_S": "0",  # no process may outlive its test
            "DO_NOT_TRACK": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
            "NO_COLOR": "1",
        }
    )


def _hear_signals() -> None:
    """Undo what `nohup ... &` did: an ignored signal stays ignored in every process of a test, also in commands."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, lambda *_: None),  # the suite outlives its terminal, and what it starts has the default
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which a run has no test: each of its processes would import them."""
    is_test = collection_path.name.startswith("test_") and collection_path.is_relative_to(TESTS)
    chosen = _RUNS.get(config.option.markexpr) if is_test else None
    return True if chosen is not None and not chosen(collection_path.relative_to(TESTS).as_posix()) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test` leaves to `make slow`, and what that leaves to `make nightly`."""
    if not item.path.is_relative_to(TESTS):
        return  # tests of these rules are collected from elsewhere
    file = item.path.relative_to(TESTS).as_posix()
    if is_nightly(f"{file}::{item.name}"):
        item.add_marker(pytest.mark.nightly)
    elif is_slow(file):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test modules are imported: what they bring stays, and to walk it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)  # what tests import is walked again and again otherwise
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what is slow first: no worker is left alone with a long file at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def is_nightly(test: str) -> bool:
    """Whether a pattern of tests/nightly.txt fits a test (`processes/test_killed_commands.py::test_…`)."""
    return any(fnmatch.fnmatchcase(test, pattern) for pattern in _NIGHTLY)


def is_slow(file: str) -> bool:
    """Whether tests/slow.txt names a file below tests/, or its room."""
    return file in _SLOW or (file.partition("/")[0] in _SLOW and file not in _QUICK)


#: The runs of the Makefile: whether one has tests of a file.
_RUNS: dict[str, Callable[[str], bool]] = {
    "not slow and not nightly": lambda file: not is_slow(file),
    "slow": is_slow,
    "not nightly": lambda file: True,
    "nightly": lambda file: any(pattern.partition("::")[0] == file for pattern in _NIGHTLY),
}


@pytest.fixture(scope="module", autouse=True)
def _set_aside() -> None:
    """Set what imports and earlier files left aside from the garbage collector: it would walk millions of objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the sandbox."""
    shutil.rmtree(config.stash[SANDBOX], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _private_tmp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files go to the sandbox, so that those left behind are seen; `tmp_path` stays where pytest puts it."""
    tmp_path_factory.getbasetemp()
    cache = request.config.stash[SANDBOX] / "home" / ".cache"
    cache.mkdir(exist_ok=True)  # importing a test module may have made it
    # What is slow to make and the same for all: the tables of new databases.
    (cache / "trainflow").symlink_to(shared_folder(tmp_path_factory, "user-cache"))
    with pytest.MonkeyPatch.context() as patch:
        tmp = request.config.stash[SANDBOX] / "tmp"
        patch.setenv("TMPDIR", str(tmp))
        patch.setattr(tempfile, "tempdir", str(tmp))
        yield


@pytest.fixture(autouse=True)
def _leak_police(request: pytest.FixtureRequest, _private_tmp: None) -> Iterator[None]:
    """Run the test in an empty folder and on one thread; fail it for what it leaves behind."""
    sandbox = request.config.stash[SANDBOX]
    cwd = sandbox / "cwd"
    watched = (sandbox / "home", sandbox / "tmp", cwd)
    for name in (".cache", ".config", ".local", ".prefect"):
        (sandbox / "home" / name).mkdir(exist_ok=True)
    os.chdir(cwd)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    before = police.Scene.look(watched)
    yield
    found = police.leaks(before, watched)
    if os.getcwd() != before.cwd:  # noqa: PTH109 - Path.cwd() would resolve a folder that is gone
        found.append(f"the working directory is {os.getcwd()}")  # noqa: PTH109
    os.chdir(ROOT)
    for path in cwd.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


# ------------------------------------------------------------------------------------------------- needs(...)
def _has_registry() -> bool:
    """Whether pip reaches a package registry; a dry run that gives up in seconds."""
    asked = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--timeout", "10", "--retries", "1"]
    return subprocess.run([sys.executable, "-m", "pip", *asked, "packaging"], capture_output=True).returncode == 0


def _has_namespaces() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode == 0


def _is_importable(package: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(package) is not None


_NEEDS: dict[str, Callable[[], bool]] = {
    **{
        name: _is_importable(name)
        for name in ("bitsandbytes", "deepspeed", "keras", "openpyxl", "ray", "tensorflow", "torchao", "wandb")
    },
    "clients": clients.are_installed,
    "dask": _is_importable("prefect_dask"),
    "cgroup": memory_group.available,
    "examples": lambda: script_runs.official_folder() is not None,
    "namespaces": _has_namespaces,
    "registry": functools.cache(_has_registry),
    "slurm": slurm_cluster.is_installed,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs are absent here; an unknown need is a mistake in the test."""
    for mark in item.iter_markers("needs"):
        for need in mark.args:
            if need not in _NEEDS:
                pytest.fail(f"needs({need!r}): one of {', '.join(sorted(_NEEDS))}", pytrace=False)
            if not _NEEDS[need]():
                pytest.skip(f"needs({need})")


def _skips(config: pytest.Config) -> list[tuple[str, str]]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    reports = reporter.stats.get("skipped", [])
    return [(report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")) for report in reports]


def _unlisted(config: pytest.Config) -> list[tuple[str, str]]:
    lines = (line.split("#")[0].strip() for line in SKIPS_ALLOWED.read_text(encoding="utf-8").splitlines())
    allowed = {line for line in lines if line}
    return [(nodeid, reason) for nodeid, reason in _skips(config) if nodeid not in allowed and reason not in allowed]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip that nobody has agreed to fails the run."""
    if _unlisted(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the skips that failed the run; pytest's own `-ra` lists all of them."""
    for nodeid, reason in _unlisted(config):
        terminalreporter.write_line(f"SKIP NOT ALLOWED (tests/skips_allowed.txt) {nodeid}: {reason}", red=True)
