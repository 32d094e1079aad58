"""What every command writes with `--json` and with `--quiet`: one JSON object, and nothing that was not asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import toy
from tests.support.command import trainflow
from tests.support.sweeps import SWEEP
from tests.unit.flows.test_commands import NAMED, NO_JSON, NO_QUIET

REGISTERED = """
register: {name: toy}
"""


@dataclass(frozen=True)
class Case:
    """A command over a pipeline that has run.

    Attributes:
        words: its arguments; {free}: the name of a folder that is not there.
        code: its exit code: 0, or that of a refusal, which has the same form.
        result: whether it prints its result with `--quiet`.
    """

    words: str
    code: int = 0
    result: bool = False


CASES = {
    "run": Case("pipeline.yaml"),
    "why": Case("pipeline.yaml train.args.seed=7", result=True),
    "init": Case("{free}"),
    "plan": Case("pipeline.yaml train.args.seed=7", result=True),
    "sweep": Case("sweep.yaml"),
    "resume": Case("", code=2),
    "prove-resume": Case("pipeline.yaml --steps 4"),
    "gc": Case("", result=True),
    "status": Case("", result=True),
    "runs": Case("", result=True),
    "show": Case("last", result=True),
    "compare": Case("last last", result=True),
    "logs": Case("last train", result=True),
    "tag": Case("last good"),
    "sync": Case(""),
    "serve": Case("absent.yaml", code=2),
    "deploy": Case("pipeline.yaml --pool main", code=2),
    "watch": Case("new toy/toy --every never", code=2),
    "follow": Case("pipeline.yaml --once"),
    "join": Case("here", code=2),
    "predict": Case("last new.jsonl --to {free}"),
    "models": Case("", result=True),
    "promote": Case("toy 2", code=2),
    "rollback": Case("toy", code=2),
    "lineage": Case("last", result=True),
    "verify": Case("last"),
    "reproduce": Case("last"),
    "checkpoints list": Case("store", result=True),
    "checkpoints verify": Case("store"),
    "checkpoints prune": Case("store --keep 9"),
    "checkpoints import": Case("old out", code=2),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    spec = toy.SPEC.replace("tracking: {enabled: false}", "tracking: {enabled: true}")
    spec = spec.replace("train:", "train:\n  eval_split: test")
    toy.project(folder, spec=spec + REGISTERED)
    (folder / "sweep.yaml").write_text(spec + SWEEP.replace("trials: 4", "trials: 2"))
    (folder / "new.jsonl").write_text('{"x": [0.5]}\n{"x": [-0.25]}\n')
    planned = trainflow("plan", "pipeline.yaml", "--probe", "--json", cwd=folder)
    assert planned.code == 0, planned.err
    (folder / "planned.json").write_text(planned.out)
    done = trainflow("run", "pipeline.yaml", "--quiet", cwd=folder)
    assert (done.code, done.out, done.err) == (0, "", "")
    return folder


def test_what_a_probe_planned_on_unprepared_data_is_compared_with_what_came(project: Path) -> None:
    planned = json.loads((project / "planned.json").read_text())
    stages = {each["stage"]: (each["hit"], each["reason"].split()[0]) for each in planned["stages"]}
    assert stages["prepare-data"] == (True, "committed"), "the probe has prepared the data"
    assert stages["train"] == (False, "never")
    assert (planned["length"]["steps"], planned["length"]["samples"]) == (8, 64)
    assert planned["time_source"] == "a probe of a few steps"
    assert planned["missing"] == []
    assert planned["probe"]["step_s"] > 0
    shown = json.loads(trainflow("show", "toy-1", "--json", cwd=project).out)
    compared = {each["quantity"]: each for each in shown["compared"]}
    assert set(compared) == {"seconds", "peak_bytes", "steps", "samples", "checkpoint_bytes"}
    for same in ("steps", "samples"):
        assert compared[same]["difference"] == 0, compared[same]
    for measured in ("seconds", "peak_bytes", "checkpoint_bytes"):
        assert compared[measured]["planned"] > 0
        assert compared[measured]["actual"] > 0
    assert abs(compared["peak_bytes"]["difference"]) < 0.5, compared["peak_bytes"]
    assert not list((project / "store").glob("probe-*"))


def test_every_command_has_a_case() -> None:
    assert {*CASES, *NO_JSON.keys() & NO_QUIET.keys()} == set(NAMED)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_JSON])
def test_json_is_one_object(project: Path, name: str) -> None:
    case = CASES[name]
    words = case.words.format(free=f"{name}-json").split()
    done = trainflow(*name.split(), *words, "--json", cwd=project)
    answer = json.loads(done.out)
    assert done.code == case.code, done.err
    assert (answer["ok"], answer["exit_code"]) == (case.code == 0, case.code)
    assert case.code == 0 or answer["error"]["message"] in done.err


@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_QUIET])
def test_quiet_is_the_result_or_the_failure_alone(project: Path, name: str) -> None:
    case = CASES[name]
    words = case.words.format(free=f"{name}-quiet").split()
    done = trainflow(*name.split(), *words, "--quiet", cwd=project)
    assert done.code == case.code, done.out + done.err
    assert done.err.startswith("✗ ") if case.code else done.err == ""
    if case.result:
        assert "" not in done.out.splitlines()
    else:
        assert done.out == ""
