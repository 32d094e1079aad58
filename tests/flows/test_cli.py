"""The command line as its user meets it: refusals before anything is started, a run followed and told, clean ends."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli import main as cli_main
from tests.support import toy
from tests.support.command import TRAINFLOW, Cli, Done, running, trainflow

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
        ("predict lst new.csv", "No run with this id, name or tag"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(spec: Path, words: str, expected: str, cli: Cli) -> None:
    message = refused(cli(*words.split(), cwd=spec.parent))
    assert expected in message
    assert "\n  do " in message


def test_a_failure_of_our_own_is_one_line_and_a_file(
    spec: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(cli_main, "load_spec", broken)
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
    spec = toy.project(tmp_path_factory.mktemp("finished"))
    done = trainflow("run", spec, "tracking.enabled=true", cwd=spec.parent)
    assert done.code == 0, done.out + done.err
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
    assert re.search(r"^  test +error 0\.", out, re.MULTILINE), out
    assert f"  browse it    trainflow ui {followed.spec} tracking.enabled=true" in out


def on_a_terminal(*words: str, **env: str) -> str:
    """Run a command on a terminal of 100 columns; return everything that it wrote there."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **env}
    command, written = [*TRAINFLOW, *words], b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        try:
            while data := os.read(ours, 65536):
                written += data
        except OSError:  # Linux says so when the other side is closed
            pass
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_colours_are_for_terminals_and_turn_off(followed: Finished) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    why = ("why", str(followed.spec), "train.args.learning_rate=0.1")
    assert colour.search(on_a_terminal(*why, NO_COLOR=""))
    assert not colour.search(on_a_terminal(*why, NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(*why, NO_COLOR="", TERM="dumb")
    assert "\x1b" not in trainflow(*why, env={"NO_COLOR": ""}).out
    assert not colour.search(on_a_terminal("run", "--help", NO_COLOR="1"))


def test_on_a_terminal_the_progress_is_drawn(spec: Path) -> None:
    out = on_a_terminal("run", str(spec), *SHORT)
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


def test_the_ui_shows_the_run_until_it_is_interrupted(followed: Finished, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with running("ui", followed.spec, log=tmp_path / "log", env={"TMPDIR": str(temporary)}) as command:
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
        with urllib.request.urlopen(prefect.partition("#")[0], timeout=10) as page:
            text = page.read().decode()
        assert "prefect-password" in text
        assert secret.partition("&")[0] not in text, "the page alone lets nobody in"
        answer = urllib.request.Request(f"{origin}/api/admin/version")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(answer, timeout=10)
        answer.add_header("Authorization", f"Basic {secret.partition('&')[0]}")
        assert urllib.request.urlopen(answer, timeout=10).status == 200
        assert not list(temporary.glob("trainflow*")), "what has no name is not left behind when this is killed"
        assert command.stop() == 0
    assert "Traceback" not in command.output


def test_what_mlflow_never_gets_is_said_at_the_end_of_the_run(folder: Path, cli: Cli) -> None:
    shutil.rmtree(folder / "store" / "spool", ignore_errors=True)
    (folder / "store" / "spool").touch()  # no folder can be made there
    done = cli("run", folder / "pipeline.yaml", "tracking.enabled=true", "predict.rows_per_file=5")
    assert done.code == 0, done.err
    assert "MLflow waits for what this run logged, which could not be kept in" in " ".join(done.out.split())


def plant(folder: Path, mark: Path) -> None:
    """Leave modules and settings that would run code of a stranger, which leaves a mark."""
    for name in ("mlflow", "torch", "sitecustomize", "usercustomize", "uvicorn", "psutil", "json"):
        (folder / f"{name}.py").write_text(f"import os\nos.makedirs({str(mark)!r} + '/{folder.name}-{name}')\n")
    called = {"version": 1, "handlers": {"x": {"()": "os.makedirs", "name": f"{mark}/{folder.name}-settings"}}}
    (folder / "called.yml").write_text(json.dumps({**called, "root": {"handlers": ["x"]}}))
    (folder / "prefect.toml").write_text('[logging]\nconfig_path = "called.yml"\n')
    (folder / ".env").write_text("PREFECT_LOGGING_SETTINGS_PATH=called.yml\n")


def test_what_a_stranger_leaves_in_the_storage_or_beside_the_recipe_is_not_executed(
    followed: Finished, tmp_path: Path
) -> None:
    project, temporary, mark = tmp_path / "project", tmp_path / "temporary", tmp_path / "mark"
    temporary.mkdir()
    toy.project(project, recipe="import helper\n" + toy.RECIPE.replace("2.0 * x", "helper.SLOPE * x"))
    (project / "helper.py").write_text("SLOPE = 2.0\n")
    shutil.copytree(followed.folder / "store", project / "store")
    for folder in (project, project / "store", temporary):
        plant(folder, mark)
    program = tmp_path / "program" / "trainflow.py"  # as the installed script: its own folder is on the path
    program.parent.mkdir()
    program.write_text("from flows.cli.main import main\nmain()\n")
    environ = {"TMPDIR": str(temporary)}
    with running("run", "pipeline.yaml", *SHORT, log=tmp_path / "1", cwd=project, env=environ, program=program) as run:
        assert run.process.wait(120) == 0, run.output
    for number, words in enumerate((["status"], ["sync"]), start=2):
        log = tmp_path / str(number)
        with running(*words, "--storage", ".", log=log, cwd=project / "store", env=environ, program=program) as command:
            assert command.process.wait(60) == 0, command.output
    words, log = ["ui", "--storage", "."], tmp_path / "log"
    with running(*words, log=log, cwd=project / "store", env=environ, program=program) as command:
        command.wait_for("Prefect: http://127.0.0.1:")
        assert command.stop() == 0
    assert not mark.exists(), list(mark.iterdir())


# ----------------------------------------------------------------------------------------------------- being stopped
def test_ctrl_c_saves_ends_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    # A step takes a tenth of a second: long enough to be interrupted in.
    slow = toy.RECIPE.replace("y = self.linear(", "import time; time.sleep(0.1); y = self.linear(")
    spec = toy.project(tmp_path / "project", recipe=slow)
    slowly = ("train.args.max_steps=400", "train.args.save_steps=1000")
    with running("run", spec, *SHORT, *slowly, log=tmp_path / "log") as command:
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
    done = cli("ui", spec, env={"MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:9/"})
    assert done.code == 0
    assert "secret" not in done.out + done.err
    assert "127.0.0.1:9" in done.out
