"""More than thirty secrets that a recipe prints, logs and raises are found nowhere after its runs."""

from __future__ import annotations

import json
import os
import random
import string
from pathlib import Path

import pytest

from tests.support.runs import run, succeeded
from tests.support.toy import RECIPE, project
from trainflow.flows.cli import terminal

SAY = """
import json, logging, os, pathlib, sys


def say(where):
    known = json.loads(pathlib.Path(os.environ["PLANTED"]).read_text())
    lines = [*known["lines"], *(f"value {os.environ[name]}" for name in known["names"])]
    for line in lines:
        print(where, line)
        print(where, line, file=sys.stderr)
        logging.getLogger("recipe").warning("%s %s", where, line)
    if pathlib.Path("broken").exists() and where == "build_model":
        raise RuntimeError(f"{where} broke: " + " | ".join(lines))

"""
LETTERS = string.ascii_letters + string.digits
NAMES = (
    *("MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY", "DB_PASSWORD", "PGPASSWORD"),
    *("OPENAI_API_KEY", "SLACK_BOT_TOKEN", "AWS_SESSION_TOKEN", "COMET_API_KEY"),
    *("NEPTUNE_API_TOKEN", "MY_SERVICE_SECRET", "AZURE_STORAGE_PASSWORD", "HF_TOKEN"),
    *("GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "STRIPE_LIVE_TOKEN", "VAULT_CREDENTIAL"),
    *("SSHPASS", "REDISCLI_AUTH", "MYSQL_PWD", "FTP_PASS", "DB_PASSWORD_PROD", "TEAM_WEBHOOK_URL"),
)
FORMS = (
    *("postgresql://me:{}@db/x", "s3://key:{}@bucket/x", "https://me:{}@host/x", "https://b.example/x?sig={}"),
    *("Authorization: Bearer {}", "password={}", "AccountKey={};", "https://h.example/x?api_key={}"),
    *("sk-proj-{}", "glpat-{}", "pypi-{}", "xoxb-{}", "hf_{}", "ghp_{}", "github_pat_{}", "eyJhbGciOiJI.eyJzdWIi{}.{}"),
    # In parts, so that no scanner takes this file's forms for tokens.
    *("sk" + "_live_{}", "S" + "G.{}.{}", "np" + "m_{}", "dckr" + "_pat_{}", "hv" + "s.{}", "xa" + "pp-1-{}"),
    *("https://hooks." + "slack.com/services/T0/B0/{}", "Authorization: Basic {}", "mysql -uroot -p{} db"),
    *("sshpass -p {} ssh h", "redis-cli -a {} ping", "curl -u me:{} https://h", '{{"password": "{}"}}', "--api-key {}"),
)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The secrets: half of them in the environment, half of them in texts."""
    draw = random.Random(7)
    words = ["9" + "".join(draw.choices(LETTERS, k=36)) for _ in (*NAMES, *FORMS)]
    for name, value in zip(NAMES, words[: len(NAMES)], strict=True):
        monkeypatch.setenv(name, value)
    lines = [form.format(*[word] * form.count("{}")) for form, word in zip(FORMS, words[len(NAMES) :], strict=True)]
    (tmp_path / "planted.json").write_text(json.dumps({"lines": lines, "names": NAMES}))
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted.json"))
    return words


def test_secrets_are_nowhere_after_a_failed_run_and_a_whole_one(
    planted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str
) -> None:
    assert len(planted) >= 30
    recipe = SAY + RECIPE.replace("def prepare(options, out):\n", 'def prepare(options, out):\n    say("prepare")\n')
    recipe = recipe.replace("    import torch\n", '    import torch\n\n    say("build_model")\n', 1)
    folder = project(tmp_path / "project", recipe=recipe).parent
    monkeypatch.chdir(folder)
    shown: list[str] = []
    (folder / "broken").touch()
    more: tuple[str, ...] = ("train.launch={kind: process, processes: 1}", "evaluate.launch=in_process")
    more += ("predict.launch=in_process", "tracking.enabled=true", "register.name=toy")
    with terminal.logs(_Display(shown), debug=False):  # type: ignore[arg-type]
        failed = run(folder, *more)
        assert failed.error is not None
        assert "broke" in str(failed.error)
        shown += [str(failed.error), json.dumps(failed.to_dict())]
        (folder / "broken").unlink()
        result = succeeded(folder, *more)
    shown.append(json.dumps(result.to_dict()))
    homes = [folder, Path(os.environ["HOME"]), Path(os.environ["PREFECT_HOME"])]
    files = {path: path.read_bytes() for home in homes for path in home.rglob("*") if path.is_file()}
    logs = [path for path in files if path.suffix == ".jsonl"]
    assert any(b"***" in files[path] for path in logs)  # the lines are there
    leaks = [(word, str(path)) for word in planted for path, data in files.items() if word.encode() in data]
    leaks += [(word, text[:200]) for word in planted for text in shown if word in text]
    assert leaks == []


class _Display:
    """Keeps what a terminal would show."""

    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def __call__(self, event: object) -> None:
        self._shown.append(str(event))

    def say(self, text: str) -> None:
        self._shown.append(text)

    def warn(self, text: str) -> None:
        self._shown.append(text)
