"""A recorded run is run again: the same bytes, or what differs is named; `prove-resume` proves equal runs equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy
from tests.support.command import Cli
from tests.support.runs import IN_PROCESS, broken, run_of, succeeded
from trainer_lib.base.json_text import seal_of
from trainer_lib.errors import ConfigError, NotReproducibleError
from trainflow.flows.lineage.lineage_chain import find_chain
from trainflow.flows.lineage.reproduction import Outcome, Reproduction, open_scratch
from trainflow.flows.pipeline import run_pipeline


def _reproduced(
    folder: Path,
    to: Path,
    said: list[str],
    edit: Callable[[Reproduction], None] | None = None,
    tolerance: float | None = None,
) -> Outcome:
    job = Reproduction(find_chain(str(run_of(folder))), str(to), tolerance, said.append)
    if edit is not None:
        edit(job)
    return job.carry_out(run_pipeline)


def test_a_run_is_reproduced_bit_by_bit_from_what_it_kept(folder: Path, finished: Path, tmp_path: Path) -> None:
    said: list[str] = []
    # The project has changed since; the run kept what it ran.
    spec = run_of(folder) / "spec.yaml"
    spec.write_text(spec.read_text().replace(str(finished), str(folder)))
    broken(folder, "2.0 * x", "3.0 * x")
    outcome = _reproduced(folder, tmp_path / "again", said)
    assert outcome.verdict == "same bytes"
    assert {each["path"] for each in outcome.files} == {
        "model/model.safetensors",
        "predictions/test/part-00000.parquet",
        "predictions/test/part-00001.parquet",
    }
    assert all(each["then"] == each["now"] for each in outcome.files)
    assert (outcome.comparison.is_equal, outcome.tolerance) == (True, None)
    [line] = said
    assert line.startswith("The recipe is the one that the run kept")
    assert not (tmp_path / "again" / "hub").exists()
    assert not (tmp_path / "again" / "mlflow.db").exists()
    assert outcome.failure() is None


def _other_rate(rate: float) -> Callable[[Reproduction], None]:
    """As another device would: other numbers from the same spec."""

    def edit(job: Reproduction) -> None:
        train = job.spec.train.model_copy(update={"args": {**job.spec.train.args, "learning_rate": rate}})
        job.spec = job.spec.model_copy(update={"train": train}).with_resolver(job.spec.resolver)

    return edit


def test_other_numbers_are_judged_by_the_tolerance(folder: Path, tmp_path: Path) -> None:
    strict = _reproduced(folder, tmp_path / "strict", [], _other_rate(5.0001e-2))
    assert strict.verdict == "different"
    assert "model/model.safetensors has other bytes" in strict.differences
    failure = strict.failure()
    assert failure is not None and "model.safetensors" in failure.message and failure.exit_code == 20
    shutil.rmtree(tmp_path / "strict")
    lenient = _reproduced(folder, tmp_path / "strict", [], _other_rate(5.0001e-2), tolerance=1e-2)
    assert (lenient.verdict, lenient.differences, lenient.tolerance) == ("same metrics", [], 1e-2)


def test_other_data_ends_it_before_training(folder: Path, tmp_path: Path) -> None:
    rows = folder / "rows.csv"
    rows.write_text("1\n")
    result = succeeded(folder, f"prepare.sources=[{rows}]")
    assert result.report_url is not None
    chain = find_chain(result.report_url.rpartition("/")[0])
    again = tmp_path / "again"
    job = Reproduction(chain, str(again), None, lambda text: None)
    job.spec = job.spec.model_copy(
        update={"prepare": job.spec.prepare.model_copy(update={"options": {"rows": 65}})}
    ).with_resolver(job.spec.resolver)
    with pytest.raises(NotReproducibleError, match="the prepared data has the digest"):
        job.carry_out(run_pipeline)
    assert [stage.name for stage in (again / "stages").iterdir()] == ["prepare-data"]
    rows.unlink()
    with pytest.raises(ConfigError, match=r"(?s)rows\.csv"):
        Reproduction(chain, str(again), None, lambda text: None)


def test_what_cannot_be_repeated_is_bad_input(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    [published] = (folder / "store" / "hub" / "toy" / "revisions").iterdir()
    shutil.copytree(published, copy)
    with pytest.raises(ConfigError, match="The run is not known here"):
        Reproduction(find_chain(str(copy)), str(tmp_path / "again"), None, lambda text: None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"), open_scratch(str(tmp_path / "full"), "run"):
        pass
    with open_scratch(None, "run") as place:
        assert Path(place).is_dir()
    assert not Path(place).exists()
    # A second run that was killed goes on in its folder, and another run does not.
    with open_scratch(str(tmp_path / "again"), "first") as place:
        (Path(place) / "stages").mkdir()
    with open_scratch(str(tmp_path / "again"), "first") as place:
        assert (Path(place) / "stages").is_dir()
    with pytest.raises(ConfigError, match="not empty"), open_scratch(str(tmp_path / "again"), "another"):
        pass


# -- prove-resume -----------------------------------------------------------------------------------------------------

# What no checkpoint holds: a number that the model counts up by itself.
FORGETFUL = toy.RECIPE.replace("self.linear = torch.nn.Linear(1, 1)", "self.linear = torch.nn.Linear(1, 1); self.n = 0")
FORGETFUL = FORGETFUL.replace("y = self.linear(", "self.n += self.training; y = (1 + 0.01 * self.n) * self.linear(")


def test_equal_runs_are_proved_and_the_verdict_is_sealed(tmp_path: Path, cli: Cli) -> None:
    spec, verdict = toy.project(tmp_path), tmp_path / "verdict.json"
    words = (IN_PROCESS[0], "train.launch.processes=1", "--kill", "--at", "7", "-o", verdict)
    done = cli("prove-resume", spec, *words).ok()
    assert "equal  toy: 8 steps, stopped by SIGKILL after step 7, resumed from 4" in done.out
    found: dict[str, Any] = json.loads(verdict.read_text())
    assert (found["verdict"], found["resumed_from"], found["compared"]["checkpoints"]) == ("equal", 4, [4, 8])
    assert found["compared"]["steps"] == found["compared"]["learning_rates"] == 8
    assert {"model.safetensors", "optimizer.safetensors", "rng/rank-00000.json"} <= set(found["compared"]["states"])
    assert list(found["source"]) == ["recipe.py:build_model"]  # what train reaches in the recipe
    assert found.pop("seal") == seal_of(found) != seal_of({**found, "steps": 9})
    assert not (tmp_path / "store").exists()


def test_a_state_that_is_lost_is_found_and_named(tmp_path: Path, cli: Cli) -> None:
    spec = toy.project(tmp_path, recipe=FORGETFUL)
    words = ("--steps", "4", "--at", "2", "--json", "--keep", tmp_path / "kept")
    done = cli("prove-resume", spec, *IN_PROCESS, *words)
    assert done.code == 20, done.err
    answer = json.loads(done.out)
    assert (answer["ok"], answer["exit_code"]) == (False, 20)
    found = answer["proof"]
    assert found["verdict"] == "different" and found.pop("seal") == seal_of(found)
    first = found["first_difference"]
    assert (first["step"], first["what"]) == (3, "loss") and first["whole"] != first["resumed"]
    assert "optimizer.safetensors: linear.weight/exp_avg[0]" in [each["what"] for each in found["differences"]]
    assert sorted(path.name for path in (tmp_path / "kept" / "whole" / "checkpoints").iterdir()) == ["checkpoint-4"]
