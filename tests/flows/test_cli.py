"""The command line as its user meets it: refusals before anything is started, a run followed and told, clean ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from tests.support import toy
from tests.support.checkpoints import save
from tests.support.command import Cli, Done, Running, running, trainflow
from tests.support.imported import peer_run
from tests.support.repository import ROOT
from tests.support.runs import IN_PROCESS
from tests.support.sweeps import SLOW_RECIPE
from tests.support.tiny_models import llama, lm_rows
from tests.unit.flows.test_commands import NAMED, NO_JSON, NO_QUIET
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import ConfigError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.locks.removal import protect_from_removal
from trainer_lib.storage import Store
from trainflow.flows.cli.commands import checkpoints, execution

# The shortest chain that trains: two launches.
SHORT = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false", "tracking.enabled=false")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return toy.project(tmp_path)


def refused(done: Done) -> str:
    """The message of a command refused as bad input."""
    assert done.code == 2, done.out + done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    return done.err


# ------------------------------------------------------------------------------------------------------- bad input
def test_a_refusal_says_what_where_why_and_what_to_do(spec: Path, cli: Cli) -> None:
    assert refused(cli("run", spec, "train.lauch=2")).splitlines() == [
        "✗ bad input",
        "  where  train.lauch = 2",
        "  why    Unknown key (from the command line: train.lauch=…).",
        "  do     Did you mean 'launch'?",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run absent.yaml", "There is no such file."),
        ("run pipeline.yaml --only trian", "Did you mean 'train'?"),
        ("run pipeline.yaml prepare.launch.nodes=2", "prepare.launch.nodes"),
        ("run pipeline.yaml prepare.launch.kind=environment", "prepare.launch.kind"),
        ("serve pipeline.yaml --interval 60 --timezone Mars", "--timezone"),
        ("deploy pipeline.yaml --pool main", "trainflow serve"),
        ("ui pipeline.yaml", "No run has been recorded there yet."),
        ("ui pipeline.yaml --storage elsewhere", "not both"),
        ("checkpoints list .", "No committed checkpoint is there."),
        ("checkpoints import absent out --model recipe.py:build", "There is no checkpoint"),
        ("checkpoints import nope://x out --model recipe.py:build", "Unknown URL scheme"),
        ("checkpoints import s3://user:secret@bucket/x out --model recipe.py:build", "must not carry credentials"),
        ("checkpoints import . out --model train.py", "not of the form FILE.py:FUNCTION"),
        ("checkpoints import . out --model absent.py:build", "This file does not exist"),
        ("predict lst new.csv", "No run with this id, name or tag"),
        ("prove-resume pipeline.yaml --at 8", "--at = 8"),
        ("prove-resume pipeline.yaml --at 4 --steps 4", "Name a step from 1 to 3."),
        ("prove-resume pipeline.yaml train.args.save_only_model=true", "train.args.save_only_model = True"),
        ("prove-resume pipeline.yaml --keep .", "is not empty."),
    ],
)
def test_bad_input_is_refused_with_a_remedy(spec: Path, words: str, expected: str, cli: Cli) -> None:
    with temporary_settings({PREFECT_API_URL: None}):  # an earlier test's server is not this user's
        message = refused(cli(*words.split(), cwd=spec.parent))
    assert expected in message
    assert "\n  do " in message
    assert "secret" not in message
    assert not (spec.parent / "out").exists()


def test_a_failure_of_our_own_is_one_line_and_a_file(
    spec: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(execution, "load_spec", broken)
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = cli("run", spec, env=env)
    assert done.code == 1
    assert done.err.startswith("✗ unexpected failure: RuntimeError: the sky fell\n")
    assert "Traceback" not in done.err
    [details] = (tmp_path / "state").rglob("*.txt")
    assert str(details) in done.err
    assert "in broken" in details.read_text()
    assert details.stat().st_mode & 0o077 == 0
    assert "in broken" in cli("run", spec, "--debug", env=env).err


def test_join_says_that_no_machine_leads(cli: Cli) -> None:
    done = cli("join", "127.0.0.1:9", "--processes", "1", "--timeout", "1")
    assert done.code == 18, done.err
    assert "No machine leads there" in done.out + done.err


# ------------------------------------------------------------------------------------------------------- a whole run
@dataclass(frozen=True)
class Finished:
    """A pipeline that has run once, and what that showed."""

    spec: Path
    done: Done

    @property
    def folder(self) -> Path:
        return self.spec.parent


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    text = toy.SPEC.replace("kind: process", "kind: in_process")  # tests/e2e/test_digits.py has workers
    spec = toy.project(tmp_path_factory.mktemp("finished"), spec=text)
    done = trainflow("run", spec, "tracking.enabled=true", cwd=spec.parent).ok()
    return Finished(spec, done)


def test_a_run_is_followed_and_summed_up(followed: Finished) -> None:
    out = followed.done.out
    assert followed.done.err == "", "nothing of the engines' noise reaches the user"
    assert "toy: pipeline.yaml -> store" in out
    for stage in ("prepare-data", "train", "evaluate", "predict", "push-to-hub"):
        assert re.search(rf"^{stage} +starts: never run before$", out, re.MULTILINE), out
        assert re.search(rf"^  {stage} +ran ", out, re.MULTILINE), out
    assert re.search(r"^train +step \d+/8, loss ", out, re.MULTILINE), out
    for name in ("model", "predictions", "published", "report"):
        [place] = re.findall(rf"^  {name} +(\S+)$", out, re.MULTILINE)
        assert (followed.folder / place).exists(), out
    assert re.search(r"^  error +0\.", out, re.MULTILINE), out
    assert f"  browse it    trainflow ui {followed.spec} tracking.enabled=true" in out


def on_a_terminal(cli: Cli, *words: str | Path, **env: str) -> str:
    """Run a command on a terminal of 100 columns; return everything that it wrote there."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux says so when the other side is closed
            while data := os.read(ours, 65536):
                written.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as screen, redirect_stdout(screen), redirect_stderr(screen):  # noqa: PTH123 - a number
        done = cli(*words, env={"TERM": "xterm-256color", "COLUMNS": "100", **env})
    reader.join()
    os.close(ours)
    assert done.code == 0, written
    return b"".join(written).decode()


def test_colours_are_for_terminals_and_turn_off(followed: Finished, cli: Cli) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    why = ("why", followed.spec, "train.args.learning_rate=0.1")
    assert colour.search(on_a_terminal(cli, *why, NO_COLOR=""))
    assert not colour.search(on_a_terminal(cli, *why, NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(cli, *why, NO_COLOR="", TERM="dumb")
    assert "\x1b" not in cli(*why, env={"NO_COLOR": ""}).out
    assert not colour.search(on_a_terminal(cli, "run", "--help", NO_COLOR="1"))


def test_on_a_terminal_the_progress_is_drawn(spec: Path, cli: Cli) -> None:
    spec.with_name("recipe.py").write_text(SLOW_RECIPE)
    out = on_a_terminal(cli, "run", spec, *SHORT, *IN_PROCESS)
    assert re.search(r"step \d/8", out)  # how many of them is a matter of the machine's speed
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is shown again"
    summary = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out[out.rindex("why") :])
    assert re.search(r"train +ran ", summary)
    assert "report" in summary


def test_why_tells_what_would_run(followed: Finished, cli: Cli) -> None:
    told = cli("why", followed.spec, "train.args.learning_rate=0.1").out
    assert re.search(r"^  prepare-data +kept +committed ", told, re.MULTILINE), told
    assert re.search(r"^  train +runs .*learning_rate", told, re.MULTILINE), told
    assert told.count("learning_rate") == 1, told  # a single difference is said once


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


def test_the_ui_shows_the_run_until_it_is_interrupted(followed: Finished, tmp_path: Path, strange: Strange) -> None:
    store = tmp_path / "store"
    shutil.copytree(followed.folder / "store", store)
    strange.plant(store)
    with strange.running("ui", "--storage", ".", cwd=store) as command:
        address = command.wait_for("MLflow:  http://127.0.0.1:").split()[1]
        mlflow, _, shown = address.partition("/?token=")
        token, _, page_of_run = shown.partition("#")
        assert re.fullmatch(r"/experiments/1/runs/[0-9a-f]{32}\?workflowType=machine_learning", page_of_run)
        for path in ("/", "/health", "/?token=guessed", "/api/2.0/mlflow/experiments/get?experiment_id=1"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(mlflow + path, timeout=10)
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(address.partition("#")[0], timeout=10) as page:
            assert page.url == f"{mlflow}/", "the token is in the address once only"
            assert b"<html" in page.read()
        with browser.open(f"{mlflow}/ajax-api/2.0/mlflow/experiments/get?experiment_id=1", timeout=10) as found:
            assert json.load(found)["experiment"]["name"] == "toy"
        client = urllib.request.Request(f"{mlflow}/version", headers={"Authorization": f"Bearer {token}"})
        assert urllib.request.urlopen(client, timeout=10).status == 200
        prefect = command.wait_for("Prefect: http://127.0.0.1:").split()[1]
        origin, _, secret = prefect.partition("/trainflow-sign-in#")
        assert re.fullmatch(r"[^&]+&/runs/flow-run/[0-9a-f-]{36}", secret), "the page of this run"
        with urllib.request.urlopen(prefect.partition("#")[0], timeout=10) as page:
            text = page.read().decode()
        assert "prefect-password" in text
        assert secret.partition("&")[0] not in text, "the page alone lets nobody in"
        answer = urllib.request.Request(f"{origin}/api/admin/version")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(answer, timeout=10)
        answer.add_header("Authorization", f"Basic {secret.partition('&')[0]}")
        assert urllib.request.urlopen(answer, timeout=10).status == 200
        assert not list(strange.temporary.glob("trainflow*")), "what has no name is not left behind when this is killed"
        assert command.stop() == 0
    assert "Traceback" not in command.output


def test_what_mlflow_never_gets_is_said_at_the_end_of_the_run(folder: Path, cli: Cli) -> None:
    shutil.rmtree(folder / "store" / "spool", ignore_errors=True)
    (folder / "store" / "spool").touch()  # no folder can be made there
    done = cli("run", folder / "pipeline.yaml", "tracking.enabled=true", "predict.rows_per_file=5").ok()
    assert "MLflow waits for what this run logged, which could not be kept in" in " ".join(done.out.split())


def test_what_a_stranger_leaves_in_the_storage_or_beside_the_recipe_is_not_executed(
    tmp_path: Path, strange: Strange
) -> None:
    project = tmp_path / "project"
    toy.project(project, recipe="import helper\n" + toy.RECIPE.replace("2.0 * x", "helper.SLOPE * x"))
    (project / "helper.py").write_text("SLOPE = 2.0\n")
    (project / "store").mkdir()
    for folder in (project, project / "store"):
        strange.plant(folder)
    with strange.running("run", "pipeline.yaml", *SHORT, IN_PROCESS[0], cwd=project) as run:
        assert run.process.wait(120) == 0, run.output
    for words in (["status"], ["sync"]):
        with strange.running(*words, "--storage", ".", cwd=project / "store") as command:
            assert command.process.wait(60) == 0, command.output


# ----------------------------------------------------------------------------------------------------- being stopped
def test_ctrl_c_saves_ends_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    # A step takes a tenth of a second: long enough to be interrupted in.
    slow = toy.RECIPE.replace("y = self.linear(", "import time; time.sleep(0.1); y = self.linear(")
    spec = toy.project(tmp_path / "project", recipe=slow)
    slowly = ("train.args.max_steps=400", "train.args.save_steps=1000")
    with running("run", spec, *SHORT, IN_PROCESS[0], *slowly, log=tmp_path / "log") as command:
        command.wait_for("step ")
        assert command.stop(signal.SIGINT) == 130, command.output
        assert "running work is saved first" in command.output
        assert "The same command continues: trainflow run" in command.output
        assert "Traceback" not in command.output
    # The leak police sees to it that no process is left.
    assert list((tmp_path / "project" / "store").rglob("checkpoint-*/COMMIT.json")), "its work was saved"


# ----------------------------------------------------------------------------------------------------------------- ui
def test_the_ui_needs_a_free_port(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "The port cannot be used" in refused(cli("ui", "--storage", tmp_path, "--port", port))


def test_a_tracking_server_that_runs_already_is_only_named(spec: Path, cli: Cli) -> None:
    done = cli("ui", spec, env={"MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:9/"}).ok()
    assert "secret" not in done.out + done.err
    assert "127.0.0.1:9" in done.out


# -- what every command writes with --json and with --quiet -----------------------------------------------------------

# Commands over a pipeline that has run: the exit code, 0 or that of a refusal, which has the same form, and the words;
# {free} is the name of a folder that is not there.
CASES = {
    "run": (0, "pipeline.yaml"),
    "why": (0, "pipeline.yaml train.args.seed=7"),
    "init": (0, "{free}"),
    "plan": (0, "pipeline.yaml train.args.seed=7"),
    "sweep": (0, "sweep.yaml"),
    "resume": (2, ""),
    "prove-resume": (2, "pipeline.yaml --at 8"),
    "gc": (0, ""),
    "status": (0, ""),
    "runs": (0, ""),
    "show": (0, "last"),
    "compare": (0, "last last"),
    "logs": (0, "last train"),
    "tag": (0, "last good"),
    "sync": (0, ""),
    "serve": (2, "absent.yaml"),
    "deploy": (2, "pipeline.yaml --pool main"),
    "follow": (0, "pipeline.yaml --once train.eval_split=test"),
    "mix": (2, "pipeline.yaml --weight web=1"),
    "join": (2, "here"),
    "predict": (0, "last new.jsonl --to {free}"),
    "chat": (2, "last --prompt hello"),
    "evaluate": (2, "absent new.jsonl"),
    "export": (2, "absent {free} --to torch-export"),
    "models": (0, ""),
    "promote": (2, "toy 2"),
    "rollback": (2, "toy"),
    "lineage": (0, "last"),
    "verify": (0, "last"),
    "reproduce": (0, "last"),
    "checkpoints list": (0, "store"),
    "checkpoints verify": (0, "store"),
    "checkpoints prune": (0, "store --keep 9"),
    "checkpoints import": (2, "old out --model recipe.py:build"),
}
# Those that print their result with `--quiet` as well.
RESULTS = {"why", "plan", "gc", "status", "runs", "show", "compare", "logs", "models", "lineage", "checkpoints list"}


@pytest.fixture
def project(folder: Path) -> Path:
    spec = (folder / "pipeline.yaml").read_text().replace("kind: process", "kind: in_process")
    spec = spec.replace("tracking: {enabled: false}", "tracking: {enabled: true}")
    (folder / "pipeline.yaml").write_text(spec)
    # What the pipeline has trained is its only trial.
    few = "{space: {train.args.seed: [1, 2]}, sampler: grid, objective: test_error, direction: minimize, trials: 1}"
    (folder / "sweep.yaml").write_text(f"{spec}\nsweep: {few}\n")
    (folder / "new.jsonl").write_text('{"x": [0.5]}\n{"x": [-0.25]}\n')
    return folder


def test_every_command_has_a_case() -> None:
    assert {*CASES, *NO_JSON.keys() & NO_QUIET.keys()} == set(NAMED)


@pytest.mark.parametrize("name", CASES)
def test_json_is_one_object_and_quiet_is_the_result_or_the_failure_alone(project: Path, name: str, cli: Cli) -> None:
    code, words = CASES[name]
    if name not in {*NO_QUIET, "sweep", "reproduce"}:
        done = cli(*name.split(), *words.format(free="new-quiet").split(), "--quiet", cwd=project)
        assert done.code == code, done.out + done.err
        assert done.err.startswith("✗ ") if code else done.err == ""
        if name in RESULTS:
            assert "" not in done.out.splitlines()
        else:
            assert done.out == ""
    if name not in NO_JSON:
        done = cli(*name.split(), *words.format(free="new-json").split(), "--json", cwd=project)
        answer = json.loads(done.out)
        assert done.code == code, done.err
        assert (answer["ok"], answer["exit_code"]) == (code == 0, code)
        assert code == 0 or answer["error"]["message"] in done.err


WIDE = ("run", "plan", "runs", "show", "compare", "why", "status", "checkpoints list", "predict", "lineage", "gc")


@pytest.mark.parametrize("name", WIDE)
def test_lines_fit_a_terminal_of_eighty_columns(project: Path, name: str, cli: Cli) -> None:
    code, words = CASES[name]
    done = cli(*name.split(), *words.format(free="new-wide").split(), cwd=project, env={"COLUMNS": "80"})
    assert done.code == code, done.err
    # A path that is longer than that stands on a line alone.
    assert [line for line in (done.out + done.err).splitlines() if len(line) > 80 and " " in line.strip()] == []
    assert done.out


# -- trainflow checkpoints --------------------------------------------------------------------------------------------
def told(cli: Cli, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `trainflow checkpoints` with ``--json``."""
    done = cli("checkpoints", *arguments, "--json")
    return done.code, json.loads(done.out)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 5, the second of which is the best."""
    for step in range(1, 6):
        state = {"global_step": step, "best_global_step": 2}
        save(Store.open(tmp_path / "run"), step, trainer_state=state)
    return tmp_path / "run"


def interrupted(root: Path, step: int, claim: bytes | None) -> Path:
    """A folder as a save leaves it that came to no end."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    if claim is not None:
        (folder / WRITING).write_bytes(claim)
    return folder


# --------------------------------------------------------------------------------------------------------------- list
def test_a_folder_is_told_state_by_state(root: Path, cli: Cli, tmp_path: Path) -> None:
    (root / "checkpoint-3" / "model.safetensors").unlink()
    (root / "checkpoint-4" / "COMMIT.json").write_text("{}")
    interrupted(root, 6, None)
    interrupted(root, 7, Holder.this_process().to_bytes())
    (root / "checkpoint-8").mkdir()
    (root / "checkpoint-8" / "optimizer.pt").write_bytes(b"")
    (root / "checkpoint-9").symlink_to(tmp_path)
    code, answer = told(cli, "list", root)
    assert code == 0
    states = {entry["step"]: entry["state"] for entry in answer["checkpoints"]}
    assert states == {9: "link", 8: "foreign", 7: "being written", 6: "uncommitted", 5: "good", 4: "damaged",
                      3: "damaged", 2: "good", 1: "good"}  # fmt: skip
    problems = {entry["step"]: " ".join(entry["problems"]) for entry in answer["checkpoints"]}
    assert "model.safetensors: missing" in problems[3]
    assert "COMMIT.json" in problems[4]
    assert f"process {os.getpid()}" in problems[7]
    assert "transformers Trainer" in problems[8]
    assert [entry["step"] for entry in answer["checkpoints"] if entry["best"]] == [2]

    lines = cli("checkpoints", "list", root).out.splitlines()
    assert lines[0].split() == ["step", "committed", "size", "state", "where"]
    assert "good, best" in next(line for line in lines if line.split()[0] == "2")


def test_one_that_is_being_read_says_so_and_stays(root: Path, cli: Cli) -> None:
    with protect_from_removal(Store.open(root / "checkpoint-1")):
        _, answer = told(cli, "list", root)
        assert [bool(entry["in_use"]) for entry in answer["checkpoints"]] == [False, False, False, False, True]
        _, answer = told(cli, "prune", root, "--keep", "1")
    assert [entry["step"] for entry in answer["removed"]] == [3, 4]


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "scheduler.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="transformers Trainer") as caught:
        checkpoints.find(str(tmp_path))
    assert "import" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="No committed checkpoint is there"):
        checkpoints.find(str(tmp_path / "absent"))


def test_every_damaged_byte_is_found_by_verify_which_shows_how_far_it_is(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = told(cli, "list", root)
    assert told(cli, "verify", root)[0] == 0
    progress = []
    for option in ("", "", "--quiet", "--json"):
        progress.append(cli("checkpoints", "verify", root, *filter(None, [option])).err)
        monkeypatch.setattr(Console, "is_terminal", property(lambda self: self.stderr))
        monkeypatch.setenv("TERM", "xterm")
    total = sum(entry["bytes"] for entry in whole["checkpoints"]) / 1000
    assert [progress[0], *progress[2:]] == ["", "", ""], "nothing is drawn without a terminal, or unasked"
    assert all(part in progress[1] for part in ("reading", f"{total:.1f}/{total:.1f} kB", "0:00:00"))
    file = root / "checkpoint-2" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, answer = told(cli, "verify", root)
    assert code == 16
    [(url, problems)] = [(url, found) for url, found in answer["checkpoints"].items() if found]
    assert url.endswith("checkpoint-2")
    assert problems[0].startswith("optimizer.safetensors: digest")
    assert told(cli, "verify", root / "checkpoint-1")[0] == 0


# -------------------------------------------------------------------------------------------------------------- prune
def test_pruning_keeps_the_best_the_newest_and_what_somebody_owns(root: Path, cli: Cli) -> None:
    left = interrupted(root, 6, None)
    gone = interrupted(root, 7, Holder.this_process().to_bytes().replace(str(os.getpid()).encode(), b"4194305"))
    written = interrupted(root, 8, Holder.this_process().to_bytes())
    far = interrupted(root, 9, Holder("a", "elsewhere/boot/1", 5, "1", "2026-01-01", 0.0).to_bytes())
    foreign = interrupted(root, 10, None)
    (foreign / "optimizer.pt").write_bytes(b"")
    code, dry = told(cli, "prune", root, "--keep", "2", "--dry-run")
    assert code == 0
    assert [entry["step"] for entry in dry["removed"]] == [1, 3, 4, 7, 6]
    assert dry["bytes"] == sum(entry["bytes"] for entry in dry["removed"]) > 200
    assert len(list_checkpoints(Store.open(root))) == 5, "a dry run removed something"

    code, answer = told(cli, "prune", root, "--keep", "2")
    assert answer["removed"] == dry["removed"]
    assert [info.step for info in list_checkpoints(Store.open(root))] == [5, 2]
    assert [path.exists() for path in (left, gone, written, far, foreign)] == [False, False, True, True, True]
    assert told(cli, "prune", root, "--keep", "2")[1]["removed"] == []


def test_the_newest_good_one_is_told_by_its_bytes(root: Path, cli: Cli) -> None:
    for step in (4, 5):
        file = root / f"checkpoint-{step}" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    _, answer = told(cli, "prune", root, "--keep", "1")
    assert 3 not in [entry["step"] for entry in answer["removed"]]
    assert (root / "checkpoint-3" / "COMMIT.json").exists()


def test_leftovers_of_a_folder_that_a_run_holds_stay(tmp_path: Path, cli: Cli) -> None:
    root = tmp_path / "stage" / "checkpoints"
    save(Store.open(root), 1)
    left = interrupted(root, 2, None)
    lease = acquire_lease(Store.open(tmp_path / "stage"))
    assert lease is not None
    with lease:
        assert told(cli, "prune", tmp_path / "stage", "--keep", "1")[1]["removed"] == []
        assert left.exists()
    assert len(told(cli, "prune", tmp_path / "stage", "--keep", "1")[1]["removed"]) == 1
    assert not left.exists()


# ------------------------------------------------------------------------------------------------------------- import
def test_a_checkpoint_of_transformers_is_imported(tmp_path: Path, cli: Cli) -> None:
    peer_run(tmp_path / "peer", llama(), lm_rows(8), max_steps=2, save_steps=2)
    code = f"import sys\n\nsys.path.append({str(ROOT)!r})\nfrom tests.support.tiny_models import llama\n"
    (tmp_path / "model.py").write_text(code)
    model = f"{tmp_path / 'model.py'}:llama"
    done = cli("checkpoints", "import", tmp_path / "peer" / "checkpoint-2", tmp_path / "run", "--model", model).ok()
    assert "imported  step 2, 21 parameters" in done.out
    assert "left out  training_args.bin" in done.out
    assert "resume_from_checkpoint=True" in done.out
    assert [info.step for info in list_checkpoints(Store.open(tmp_path / "run"))] == [2]
