"""The command line as its user meets it: refusals before anything is started, a run followed and told, clean ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import toy
from tests.support.command import TRAINFLOW, Done, Running, running, trainflow
from tests.support.terminal import Terminal, on_a_terminal

# The shortest chain that trains: two launches.
SHORT = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false", "tracking.enabled=false")


# A step takes a tenth of a second: long enough to be interrupted in.
SLOW_RECIPE = toy.RECIPE.replace("y = self.linear(", "import time; time.sleep(0.1); y = self.linear(")


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
def test_a_bad_spec_is_refused_before_any_engine_is_imported(spec: Path) -> None:
    program = (
        "import sys\n"
        "from flows.cli.main import main\n"
        "try:\n"
        f"    main(['run', {str(spec)!r}, 'train.lauch=2'])\n"
        "except SystemExit as end:\n"
        "    heavy = {'prefect', 'mlflow', 'torch', 'sqlalchemy', 'numpy'} & set(sys.modules)\n"
        "    print(end.code, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "2 []\n", done.stderr


def test_a_refusal_says_what_where_why_and_what_to_do(spec: Path) -> None:
    message = refused(trainflow("run", spec, "train.lauch=2"))
    assert message.splitlines() == [
        "✗ bad input",
        "  where  train.lauch = 2",
        "  why    Unknown key (from the command line: train.lauch=…).",
        "  do     Did you mean 'launch'?",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "absent.yaml"], "There is no such file."),
        (["run", "pipeline.yaml", "--only", "trian"], "Did you mean 'train'?"),
        (["serve", "pipeline.yaml", "--cron", "every day"], "Five fields"),
        (["serve", "pipeline.yaml", "--cron", "0 3 * * *", "--interval", "60"], "one of --cron and --interval"),
        (["serve", "pipeline.yaml", "--cron", "0 3 * * *", "--timezone", "Mars"], "time zone does not exist"),
        (["deploy", "pipeline.yaml", "--pool", "main"], "trainflow serve"),
        (["ui", "pipeline.yaml"], "No run has been recorded there yet."),
        (["ui", "pipeline.yaml", "--storage", "elsewhere"], "not both"),
        (["checkpoints", "list", "."], "No committed checkpoint is there."),
        (["predict", "lst", "new.csv"], "No run with this id, name or tag"),
        (["rnu"], 'Did you mean "run"?'),
    ],
)
def test_bad_input_is_refused_with_a_remedy(spec: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused(trainflow(*arguments, cwd=spec.parent))


def test_json_reports_bad_input_as_one_object(spec: Path) -> None:
    done = trainflow("run", spec, "storage=nope://x", "--json")
    assert done.code == 2
    answer = json.loads(done.out)
    assert answer["ok"] is False
    assert answer["error"]["class"] == "ConfigError"
    assert answer["error"]["field"] == "storage"


def test_a_failure_of_our_own_is_one_line_and_a_file(spec: Path, tmp_path: Path) -> None:
    program = (
        "import flows.cli.main as cli\n"
        "def broken(*_, **__): raise RuntimeError('the sky fell')\n"
        "cli.load_spec = broken\n"
        f"cli.main(['run', {str(spec)!r}, *EXTRA])\n"
    )

    def run(*extra: str) -> Done:
        command = [sys.executable, "-c", program.replace("EXTRA", repr(list(extra)))]
        environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        return Done(done.returncode, done.stdout, done.stderr)

    done = run()
    assert done.code == 1
    assert done.err.startswith("✗ unexpected failure: RuntimeError: the sky fell\n")
    assert "Traceback" not in done.err
    [details] = (tmp_path / "state").rglob("*.txt")
    assert str(details) in done.err
    assert "in broken" in details.read_text()
    assert details.stat().st_mode & 0o077 == 0
    assert "in broken" in run("--debug").err


def test_the_version_and_the_commands_are_told() -> None:
    assert re.fullmatch(r"trainflow \d+\.\d+.*\n", trainflow("--version").out)
    listed = trainflow("--help").out
    assert all(name in listed for name in ("run", "why", "ui", "serve", "deploy", "checkpoints"))


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
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    spec = toy.project(tmp_path_factory.mktemp("finished"))
    done = trainflow("run", spec, "tracking.enabled=true", cwd=spec.parent)
    assert done.code == 0, done.out + done.err
    return Finished(spec, done)


def test_a_run_is_followed_and_summed_up(finished: Finished) -> None:
    out = finished.done.out
    assert finished.done.err == "", "nothing of the engines' noise reaches the user"
    assert "toy: pipeline.yaml -> store" in out
    for stage in ("prepare-data", "train", "evaluate", "predict", "push-to-hub"):
        assert re.search(rf"^{stage} +starts: never run before$", out, re.MULTILINE), out
        assert re.search(rf"^  {stage} +ran ", out, re.MULTILINE), out
    assert re.search(r"^train +step \d+/8, loss ", out, re.MULTILINE), out
    for name in ("model", "predictions", "published", "report"):
        [place] = re.findall(rf"^  {name} +(\S+)$", out, re.MULTILINE)
        assert (finished.folder / place).exists(), out
    assert re.search(r"^  test +error 0\.", out, re.MULTILINE), out
    assert f"  browse it    trainflow ui {finished.spec} tracking.enabled=true" in out


def test_the_same_command_finds_everything_done(finished: Finished) -> None:
    again = trainflow("run", finished.spec, "tracking.enabled=true", "--json", cwd=finished.folder)
    assert again.code == 0, again.err
    answer = json.loads(again.out)
    assert {stage["status"] for stage in answer["stages"]} == {"cached"}
    assert (finished.folder / answer["places"]["model"] / "model.safetensors").exists()
    assert "cached: committed" in again.err


def test_a_quiet_run_shows_nothing_but_what_went_wrong(finished: Finished) -> None:
    again = trainflow("run", finished.spec, "tracking.enabled=true", "--quiet", cwd=finished.folder)
    assert (again.code, again.out, again.err) == (0, "", "")
    answer = trainflow("run", finished.spec, "tracking.enabled=true", "-q", "--json", cwd=finished.folder)
    assert json.loads(answer.out)["ok"]
    assert answer.err == ""
    wrong = trainflow("run", finished.spec, "evaluate.splits=[tset]", "--quiet", cwd=finished.folder)
    assert wrong.code != 0
    assert wrong.out == ""
    assert "tset" in wrong.err


def test_colours_are_for_terminals_and_turn_off(finished: Finished) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    command = [*TRAINFLOW, "why", str(finished.spec), "train.args.learning_rate=0.1"]
    shown, code = on_a_terminal(command, NO_COLOR="")
    assert code == 0
    assert colour.search(shown)
    plain, _ = on_a_terminal(command, NO_COLOR="1")
    assert not colour.search(plain)
    dumb, _ = on_a_terminal(command, NO_COLOR="", TERM="dumb")
    assert "\x1b" not in dumb
    assert "\x1b" not in trainflow("why", finished.spec, env={"NO_COLOR": ""}).out
    helped, _ = on_a_terminal([*TRAINFLOW, "run", "--help"], NO_COLOR="1")
    assert not colour.search(helped)


def test_why_tells_what_would_run(finished: Finished) -> None:
    told = trainflow("why", finished.spec, "train.args.learning_rate=0.1").out
    assert re.search(r"^  prepare-data +kept +committed ", told, re.MULTILINE), told
    assert re.search(r"^  train +runs .*learning_rate", told, re.MULTILINE), told
    assert told.count("learning_rate") == 1, told  # a single difference is said once


def test_checkpoints_are_listed_and_verified(finished: Finished, tmp_path: Path) -> None:
    listed = trainflow("checkpoints", "list", finished.folder / "store").out
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "8", "4"]
    [source] = (finished.folder / "store").glob("stages/train/*/checkpoints")
    shutil.copytree(source, tmp_path / "copy")
    assert trainflow("checkpoints", "verify", tmp_path / "copy").out.count("intact") == 2
    weights = tmp_path / "copy" / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    (tmp_path / "copy" / "checkpoint-4" / "COMMIT.json").write_text("{")
    verified = trainflow("checkpoints", "verify", tmp_path / "copy", "--json")
    assert verified.code == 16
    problems = json.loads(verified.out)["checkpoints"]
    assert "model.safetensors" in problems[str(tmp_path / "copy" / "checkpoint-8")][0]
    assert "COMMIT.json" in problems[str(tmp_path / "copy" / "checkpoint-4")][0]


def test_the_ui_shows_the_run_until_it_is_interrupted(finished: Finished, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with running("ui", finished.spec, log=tmp_path / "log", env={"TMPDIR": str(temporary)}) as command:
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


def test_what_mlflow_never_gets_is_said_at_the_end_of_the_run(tmp_path: Path) -> None:
    spec = toy.project(tmp_path / "project")
    (tmp_path / "project" / "store").mkdir()
    (tmp_path / "project" / "store" / "spool").touch()  # no folder can be made there
    done = trainflow("run", spec, *SHORT[:-1], "tracking.enabled=true")
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
    finished: Finished, tmp_path: Path
) -> None:
    project, temporary, mark = tmp_path / "project", tmp_path / "temporary", tmp_path / "mark"
    temporary.mkdir()
    toy.project(project, recipe="import helper\n" + toy.RECIPE.replace("2.0 * x", "helper.SLOPE * x"))
    (project / "helper.py").write_text("SLOPE = 2.0\n")
    shutil.copytree(finished.folder / "store", project / "store")
    for folder in (project, project / "store", temporary):
        plant(folder, mark)
    program = tmp_path / "program" / "trainflow.py"  # as the installed script: its own folder is on the path
    program.parent.mkdir()
    program.write_text("from flows.cli.main import main\nmain()\n")
    environ = {"TMPDIR": str(temporary)}
    with running("run", "pipeline.yaml", *SHORT, log=tmp_path / "1", cwd=project, env=environ, program=program) as run:
        assert run.process.wait(120) == 0, run.output
    for number, words in enumerate((["status"], ["runs"], ["gc"], ["sync"]), start=2):
        log = tmp_path / str(number)
        with running(*words, "--storage", ".", log=log, cwd=project / "store", env=environ, program=program) as command:
            assert command.process.wait(60) == 0, command.output
    words, log = ["ui", "--storage", "."], tmp_path / "log"
    with running(*words, log=log, cwd=project / "store", env=environ, program=program) as command:
        command.wait_for("Prefect: http://127.0.0.1:")
        assert command.stop() == 0
    assert not mark.exists(), list(mark.iterdir())


def test_a_recipe_that_raises_ends_with_its_own_exit_code_and_the_users_line(tmp_path: Path) -> None:
    spec = toy.project(tmp_path, recipe=toy.RECIPE.replace('out.info["slope"] = 2.0', 'raise KeyError("slope")'))
    done = trainflow("run", spec, *SHORT)
    assert done.code == 10
    assert "✗ your code raised" in done.err
    assert "recipe.py" in done.err
    assert "Traceback" not in done.out + done.err
    assert re.search(r"^  train +skipped +prepare-data failed$", done.out, re.MULTILINE), done.out


# ----------------------------------------------------------------------------------------------------- being stopped
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 19), (signal.SIGUSR2, 19)])
def test_a_stopped_run_saves_ends_everything_and_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    spec = toy.project(tmp_path / "project", recipe=SLOW_RECIPE)
    slowly = ("train.args.max_steps=400", "train.args.save_steps=1000")
    with running("run", spec, *SHORT, *slowly, log=tmp_path / "log") as command:
        command.wait_for("step ")
        assert command.stop(number) == code, command.output
        assert "running work is saved first" in command.output
        assert "The same command continues: trainflow run" in command.output
        assert "Traceback" not in command.output
    # The leak police sees to it that no process is left.
    assert list((tmp_path / "project" / "store").rglob("checkpoint-*/COMMIT.json")), "its work was saved"


def test_a_notice_of_preemption_saves_and_ends_the_run_without_a_retry(tmp_path: Path) -> None:
    spec = toy.project(tmp_path / "project", recipe=SLOW_RECIPE)
    notice = tmp_path / "notice"
    slowly = ("train.args.max_steps=400", "train.args.save_steps=1000", f"train.preemption.file={notice}")
    with running("run", spec, *SHORT, *slowly, "train.preemption.every_s=0.1", log=tmp_path / "log") as command:
        command.wait_for("step ")
        notice.touch()
        assert command.process.wait(120) == 19, command.output
        assert "This machine is about to be taken away" in command.output
    store = tmp_path / "project" / "store"
    assert list(store.rglob("checkpoint-*/COMMIT.json")), "its work was saved"
    assert len(list(store.glob("stages/train/*/attempts/*.end.json"))) == 1


# --------------------------------------------------------------------------------------------------------- a terminal
def held_until(go: Path) -> str:
    """A recipe whose training goes on after its third step once a file is there."""
    held = "import pathlib, time\n            self.calls = getattr(self, 'calls', 0) + 1\n"
    held += f"            while self.calls > 3 and not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
    return toy.RECIPE.replace("            y = self.linear(", f"            {held}            y = self.linear(")


@contextlib.contextmanager
def following(spec: Path, log: Path) -> Iterator[tuple[Terminal, Running]]:
    """`status --watch` on a terminal and `logs --follow` beside the run of a spec."""
    status = Terminal([*TRAINFLOW, "status", str(spec), "--watch"])
    try:
        with running("logs", "last", spec, "--follow", log=log) as logs:
            yield status, logs
    finally:
        status.close()


def test_on_a_terminal_the_progress_is_drawn_while_another_command_runs_beside_it(tmp_path: Path) -> None:
    drawn, go = toy.project(tmp_path / "drawn", recipe=SLOW_RECIPE), tmp_path / "go"
    beside = toy.project(tmp_path / "beside", recipe=held_until(go))
    with running("run", beside, *SHORT, log=tmp_path / "beside.log") as other:
        other.wait_for("train         starts")
        with following(beside, tmp_path / "logs") as (status, logs):
            out, code = on_a_terminal([*TRAINFLOW, "run", str(drawn), *SHORT])
            status.wait_for(r"train +running +[━╌]{20} +\d+%")
            logs.wait_for("step 2/8")
            go.touch()
            assert other.process.wait(120) == 0, other.output
            assert status.wait() == 0, status.text
            assert logs.process.wait(60) == 0, logs.output
        # Each has ended with the run: the bars are gone, the list is left; the log goes on to the end of the training.
        assert re.search(r"toy +finished ", status.text.rpartition("state")[2])
        assert re.search(r"train │ step 8/8, .*\n.* train │ committed: never run before\n$", logs.output), logs.output
    assert code == 0, out
    assert re.search(r"step \d/8", out)  # how many of them is a matter of the machine's speed
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is shown again"
    summary = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out[out.rindex("why") :])
    assert re.search(r"train +ran ", summary)
    assert "report" in summary


# ----------------------------------------------------------------------------------------------------------------- ui
def test_the_ui_needs_a_free_port(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "The port cannot be used" in refused(trainflow("ui", "--storage", tmp_path, "--port", str(port)))


def test_a_tracking_server_that_runs_already_is_only_named(spec: Path) -> None:
    done = trainflow("ui", spec, env={"MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:9/"})
    assert done.code == 0
    assert "secret" not in done.out + done.err
    assert "127.0.0.1:9" in done.out
