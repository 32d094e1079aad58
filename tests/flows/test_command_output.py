"""What every command writes with `--json` and with `--quiet`: one JSON object, and nothing that was not asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import Cli
from tests.unit.flows.test_commands import NAMED, NO_JSON, NO_QUIET

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
    "watch": (2, "new toy/toy --every never"),
    "follow": (0, "pipeline.yaml --once train.eval_split=test"),
    "join": (2, "here"),
    "predict": (0, "last new.jsonl --to {free}"),
    "models": (0, ""),
    "promote": (2, "toy 2"),
    "rollback": (2, "toy"),
    "lineage": (0, "last"),
    "verify": (0, "last"),
    "reproduce": (0, "last"),
    "checkpoints list": (0, "store"),
    "checkpoints verify": (0, "store"),
    "checkpoints prune": (0, "store --keep 9"),
    "checkpoints import": (2, "old out"),
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


@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_JSON])
def test_json_is_one_object(project: Path, name: str, cli: Cli) -> None:
    code, words = CASES[name]
    done = cli(*name.split(), *words.format(free="new-json").split(), "--json", cwd=project)
    answer = json.loads(done.out)
    assert done.code == code, done.err
    assert (answer["ok"], answer["exit_code"]) == (code == 0, code)
    assert code == 0 or answer["error"]["message"] in done.err


@pytest.mark.parametrize("name", [name for name in CASES if name not in {*NO_QUIET, "sweep"}])
def test_quiet_is_the_result_or_the_failure_alone(project: Path, name: str, cli: Cli) -> None:
    code, words = CASES[name]
    done = cli(*name.split(), *words.format(free="new-quiet").split(), "--quiet", cwd=project)
    assert done.code == code, done.out + done.err
    assert done.err.startswith("✗ ") if code else done.err == ""
    if name in RESULTS:
        assert "" not in done.out.splitlines()
    else:
        assert done.out == ""
