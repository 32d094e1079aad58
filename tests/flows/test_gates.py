"""Gates in a pipeline: what misses a requirement is measured and committed, and not published."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.registry import promote
from flows.plan import Plan
from tests.support.mlflow_store import client, fresh_store
from tests.support.runs import ran, reason, run, spec_of
from trainer_lib.errors import ConfigError, GateError
from trainer_lib.storage import Store

PASSED, MISSED = "evaluate.require.test_error=< 100", "evaluate.require.test_error=< 0"


def test_a_cached_evaluation_is_checked_and_another_threshold_runs_nothing(folder: Path, tmp_path: Path) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    tracked = ("tracking.enabled=true", f"tracking.uri={uri}")
    held = run(folder, MISSED, *tracked)
    assert isinstance(held.error, GateError)
    assert held.error.field == "evaluate.require.test_error"
    assert ran(held) == set()
    assert reason(held, "push-to-hub") == "held back by the gate"
    assert [gate["passed"] for gate in held.gates] == [False]
    assert held.mlflow_run_id is not None
    text = Store.open(str(held.report_url).rpartition("/")[0]).read_bytes("report.html").decode()
    assert "test_error" in text
    assert "&lt; 0" in text
    passed = run(folder, PASSED, *tracked)
    assert passed.ok
    assert ran(passed) == set()
    assert [gate["passed"] for gate in passed.gates] == [True]
    # The same run went on: the threshold is in no key.
    assert (passed.pipeline_key, passed.mlflow_run_id) == (held.pipeline_key, held.mlflow_run_id)
    assert client(uri).get_run(passed.mlflow_run_id).data.tags["trainflow.gate"].startswith("passed: test_error")


def test_a_version_that_misses_a_requirement_is_promoted_only_on_demand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    spec = folder / "pipeline.yaml"
    plain = spec.read_text().replace("tracking: {enabled: false}", "register: {name: toy-line}")
    spec.write_text(plain)
    assert run(folder, "train.args.seed=7", "register.name=null").ok
    # The run has finished and nothing of it runs again; it is registered all the same, and only once.
    first = run(folder, "train.args.seed=7")
    assert first.ok
    assert ran(first) == set()
    assert run(folder, "train.args.seed=7").mlflow_run_id == first.mlflow_run_id
    promote("toy-line", "1", spec=spec)
    assert "toy-line version 1 is champion" in capsys.readouterr().out
    for requirement, problem in (("< 0", r"test_error is 0\.\d+, and must be < 0"), ("> 0", "")):
        spec.write_text(plain.replace("evaluate: {", f'evaluate: {{require: {{test_error: "{requirement}"}}, '))
        if problem:
            with pytest.raises(GateError, match=rf"The model is not promoted: {problem}\.") as refused:
                promote("toy-line", "1", spec=spec)
            assert refused.value.field == "evaluate.require.test_error"
            assert "--ignore-gates" in str(refused.value.remedy)
            promote("toy-line", "1", spec=spec, ignore_gates=True)
        else:
            promote("toy-line", "1", spec=spec)
    # Without its spec, what the run recorded counts.
    promote("toy-line", "1", storage=str(folder / "store"))
    client(uri).set_tag(first.mlflow_run_id, "trainflow.gate", "failed: test_error 0.5 (not < 0)")
    with pytest.raises(GateError, match=r"its run recorded that the gates failed: test_error 0\.5 \(not < 0\)\."):
        promote("toy-line", "1", storage=str(folder / "store"))


def test_nothing_new_is_published_or_registered_and_the_evaluation_stays_committed(
    folder: Path, tmp_path: Path
) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    registering = ("train.args.seed=5", "tracking.enabled=true", f"tracking.uri={uri}", "register.name=toy-line")
    held = run(folder, MISSED, *registering)
    assert isinstance(held.error, GateError)
    assert ran(held) == {"train", "evaluate", "predict"}
    assert isinstance(run(folder, MISSED, *registering).error, GateError), "nor with the evaluation from before"
    assert registered(uri) == []
    passed = run(folder, PASSED, *registering)
    assert passed.ok
    assert ran(passed) == {"push-to-hub"}
    champion = [("1", passed.mlflow_run_id, {"candidate", "champion"})]
    assert registered(uri) == champion
    # A new training that misses the requirement leaves the champion alone.
    assert isinstance(run(folder, MISSED, *registering, "train.args.seed=6").error, GateError)
    assert registered(uri) == champion


def registered(uri: str) -> list[tuple[str, str, set[str]]]:
    """Version, run and aliases of everything in a registry."""
    versions = client(uri).search_model_versions("")
    named = [client(uri).get_model_version(each.name, each.version) for each in versions]
    return [(str(each.version), each.run_id, set(each.aliases)) for each in named]


def test_no_choice_of_stages_goes_around_a_gate(folder: Path) -> None:
    ways: list[dict[str, str]] = [{"only": "push-to-hub"}, {"start": "push-to-hub"}, {"only": "evaluate"}]
    for how in (*ways, {"from_run": run(folder).pipeline_key[:16], "start": "publish"}):
        assert isinstance(run(folder, MISSED, **how).error, GateError), how
        assert run(folder, PASSED, **how).ok
    assert isinstance(run(folder, MISSED, "publish.enabled=false").error, GateError)
    assert run(folder, MISSED, only="predict").ok, "no gate guards it"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ((PASSED, "evaluate.enabled=false"), "evaluate.enabled"),
        (("evaluate.require.accuracy=> 0.5",), "evaluate.require.accuracy"),
        (("evaluate.require.tets_error=> 0.5",), "evaluate.require.tets_error"),
    ],
)
def test_what_no_evaluation_could_pass_is_refused_before_anything_runs(
    folder: Path, overrides: tuple[str, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(folder, *overrides)
    assert caught.value.field == field
    assert caught.value.remedy


def test_why_says_that_the_gate_will_hold_back(folder: Path) -> None:
    found = Plan.of(spec_of(folder, MISSED)).reasons["push-to-hub"]
    assert (found.hit, found.held_back) == (False, True)
    assert "test_error" in found.reason
    assert found.to_dict()["held_back"] is True
    assert Plan.of(spec_of(folder, PASSED)).reasons["push-to-hub"].hit
    # A new training is measured first.
    assert not Plan.of(spec_of(folder, MISSED, "train.args.seed=6")).reasons["push-to-hub"].held_back
