"""Sections of a spec: runners, sweeps, requirements, messages and metrics of packages, and what refuses them."""

from __future__ import annotations

import importlib.util
import logging
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support import shared_sources, toy
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.errors import CodeError, ConfigError, GateError, Interrupted, Pruned, from_record
from trainflow.flows.records.results import PipelineResult, StageOutcome, describe_run, tell_of_run
from trainflow.flows.spec.checks import check_spec, find_measured
from trainflow.flows.spec.spec import PipelineSpec, load_spec, parse_spec
from trainflow.flows.spec.sweep_settings import Range
from trainflow.tasks.configs import EvaluateConfig, LaunchSettings
from trainflow.tasks.keys import keys as _keys
from trainflow.tasks.keys.keys import metric_packages
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.settings import RunnerSettings, check_runner, parse_requirement
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking.notifying import Message, NotifySettings

DASK = ("prepare.runner.kind=dask", "prepare.runner.workers=2")
SWEEP: Any = {"space": {"train.args.seed": [1, 2]}, "objective": "test_error", "direction": "minimize", "trials": 4}
SECRET = "json://user:hunter2-secret@127.0.0.1:9/hook"
KAPPA, BETA = "sklearn.metrics:cohen_kappa_score", "sklearn.metrics:fbeta_score"


def refused(**sections: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_spec({"name": "toy", "recipe": "recipe.py", **sections})
    return caught.value


# -- runners ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def check(launch: dict[str, Any] | None = None, *, is_sharded: bool = True, **runner: Any) -> None:
    settings = RunnerSettings(**{"kind": "dask", "workers": 4, **runner})
    check_runner(settings, LaunchSettings(**(launch or {})), is_sharded=is_sharded)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "tls://host:8786", "host:8786", None])
def test_addresses_of_dask(address: str | None, installed: None) -> None:
    check(address=address)
    check({"threads": 2, "max_restarts": 1, "timeout_s": 60, "env": {"A": "b"}, "grace_s": 5}, address=address)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"address": "host"}, "runner.address", "This is not the address of a Dask cluster. Give that of"),
        ({"address": "http://host:8786"}, "runner.address", "not the address of a Dask cluster"),
        ({"kind": "ray", "address": "ray://host:10001"}, "runner.address", "not the address of a Ray cluster"),
        ({"launch": {"processes": 4}}, "launch.processes", "The runner decides this"),
        ({"launch": {"engine": "ray", "processes": 1}}, "launch.engine", "The runner decides this"),
        ({"launch": {"kind": "in_process"}}, "launch.kind", "Remove it, or remove prepare.runner."),
        ({"launch": {"nodes": 2}}, "launch.nodes", "The runner decides this"),
        ({"launch": {"devices": (0,)}}, "launch.devices", "The runner decides this"),
        ({"is_sharded": False}, "runner.kind", "it has no function 'prepare_shard'"),
    ],
)
def test_a_runner_that_makes_no_sense_is_refused(
    given: dict[str, Any], field: str, message: str, installed: None
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**given)
    assert caught.value.field == f"prepare.{field}"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe=whole.py", "it has no function 'prepare_shard'"),
        ("prepare.runner.kind=dsk", "dask"),
        ("prepare.runner.wokers=2", "Did you mean 'workers'?"),
        ("prepare.runner.workers=0", "prepare.runner.workers"),
    ],
)
def test_a_runner_is_checked_with_its_recipe(tmp_path: Path, override: str, message: str, installed: None) -> None:
    folder = shared_sources.project(tmp_path / "project")
    check_spec(load_spec(folder / "pipeline.yaml", DASK), Resolver())
    whole = (folder / "recipe.py").read_text().replace("prepare_shard(source", "prepare(source")
    (folder / "whole.py").write_text(whole)
    override = override.replace("whole.py", str(folder / "whole.py"))
    with pytest.raises(ConfigError) as caught:
        check_spec(load_spec(folder / "pipeline.yaml", (*DASK, override)), Resolver())
    assert message in str(caught.value)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def space(values: Any) -> dict[str, Any]:
    return {"space": {"train.args.seed": values}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"objektive": "x"}, "Did you mean 'objective'?"),
        ({"direction": "max"}, "maximize, minimize"),
        ({"direction": None}, "sweep.direction"),
        ({"direction": "left out"}, "sweep.direction"),
        ({"objective": ["a", "b"]}, "2 objectives and 1 direction"),
        ({"trials": None}, "Set sweep.trials"),
        ({"trials": 0}, "at least 1"),
        ({"space": {}}, "at least 1 entry"),
        (space(3), "{low: 1e-4"),
        (space([3]), "List two values"),
        (space({"low": 2, "high": 1}), "The range is empty"),
        (space({"low": 0, "high": 1, "log": True}), "begins above zero"),
        (space({"low": 1, "high": 9, "log": True, "step": 2}), "has no step"),
        (space({"low": 1, "hihg": 9}), "Did you mean 'high'?"),
        ({"sampler": "grid", "space": {"train.args.lr": {"low": 0.1, "high": 0.9}}}, "values that can be counted"),
        ({"sampler": "gird"}, '"grid"'),
        ({"pruner": "hyperband"}, "asha"),
        ({"pruner": "asha", "objective": ["a", "b"], "direction": ["minimize"] * 2}, "several objectives"),
        ({"parallel": 0}, "at least 1"),
        ({"runner": "dask"}, "prefect"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(changed: dict[str, Any], expected: str) -> None:
    sweep = {name: value for name, value in {**SWEEP, **changed}.items() if value != "left out"}
    assert expected in str(refused(sweep=sweep))


def test_ranges_count_their_values() -> None:
    assert Range(low=1, high=4).values() == [1, 2, 3, 4]
    assert Range(low=0, high=1, step=0.25).values() == [0, 0.25, 0.5, 0.75, 1]
    assert Range(low=0.1, high=1.0).count == math.inf
    assert Range(low=1, high=100, log=True).count == 100


# -- requirements of an evaluation ------------------------------------------------------------------------------------
def verdict(require: dict[str, Any], **metrics: Any) -> Any:
    manifest = StageManifest("evaluate", "", "", "", metrics={"test": metrics, "overall": {"bleu": 20.0}})
    return judge(EvaluateConfig(require=require), manifest)


def test_a_requirement_is_met_or_not_and_nan_meets_none() -> None:
    rows: list[tuple[Any, Any, bool]] = [
        (">= 0.9", 0.9, True),
        (">=0.9", 0.89, False),
        ("> 0.9", 0.9, False),
        ("<= 1e-1", 0.1, True),
        ("< .5", 0.5, False),
        ("== 3", 3.0, True),
        (">= 0.5, < 2", 2.0, False),
        (">= -1, < 2", 0.0, True),
        ({"min": 0.5}, 0.4, False),
        ({"min": 0.5, "max": 2}, 2.0, True),
        (">= 0", math.nan, False),
        ("<= 0", math.nan, False),
        (">= 0", "NaN", False),
        ("<= 5", math.inf, False),
        (">= 5", "Infinity", True),
    ]
    for written, value, passed in rows:
        found = verdict({"test_accuracy": written}, accuracy=value)
        assert (found.passed, "failed" in str(found)) == (passed, not passed), (written, value)


def test_a_requirement_has_one_form_that_is_read_again() -> None:
    config = EvaluateConfig.model_validate({"require": {"test_x": {"max": 2, "min": 0.5}, "test_y": ">=0.90"}})
    assert config.require == {"test_x": "<= 2, >= 0.5", "test_y": ">= 0.9"}
    assert EvaluateConfig(**config.model_dump(mode="json")) == config
    assert parse_requirement(str(parse_requirement("> 123456789.5"))).conditions == ((">", 123456789.5),)
    third = parse_requirement(f">= {1 / 3}")
    assert parse_requirement(str(third)).conditions == third.conditions


@pytest.mark.parametrize(
    "written", ["0.9", 0.9, "=> 0.9", ">= ninety", ">= nan", "> inf", "", ">= 1,", {}, {"mni": 1}, [], None, "!= 1"]
)
def test_what_is_no_requirement_is_refused_with_the_spec(written: Any) -> None:
    error = refused(evaluate={"require": {"test_accuracy": written}})
    assert str(error.field).startswith("evaluate.require.test_accuracy")
    assert '">= 0.9"' in str(error.remedy)


def test_an_unknown_metric_names_the_nearest_and_a_model_that_was_not_evaluated_passes_nothing() -> None:
    with pytest.raises(GateError) as caught:
        verdict({"test_acuracy": ">= 0.9"}, accuracy=0.95).enforce("published")
    assert caught.value.field == "evaluate.require.test_acuracy"
    assert "'test_accuracy'" in str(caught.value.remedy)
    with pytest.raises(GateError, match="nothing was evaluated"):
        judge(EvaluateConfig(require={"test_accuracy": ">= 0"}), None).enforce("published")
    judge(EvaluateConfig(), None).enforce("published")  # where nothing is required


def test_the_failure_names_every_missed_requirement_and_survives_a_process_boundary() -> None:
    found = verdict({"test_accuracy": ">= 0.9", "test_loss": "< 1", "overall_bleu": "> 10"}, accuracy=0.5, loss=3.0)
    with pytest.raises(GateError, match=r"(?s)test_accuracy is 0\.5.*test_loss") as caught:
        found.enforce("published")
    error = from_record(caught.value.to_record())
    assert (type(error), error.exit_code, error.retryable) == (GateError, 21, False)
    assert error.message == caught.value.message
    assert [check["passed"] for check in found.to_dicts()] == [False, False, True]


# -- messages about how a run ended -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["slack://a/b/c", "https://hooks.slack.com/x", "team_chat", "block:teamchat", "9LIVES"]
)
def test_an_address_in_a_spec_is_refused_and_not_repeated(place: str) -> None:
    for notify in ({"to": [place]}, {"to": place}, {"to": {place: place}}, place):
        error = refused(notify=notify)
        assert "notify" in str(error)
        assert place not in str(error) + str(error.to_record())
        if notify in ({"to": [place]}, {"to": place}):
            assert "TEAM_CHAT" in str(error.remedy)


def test_a_variable_that_is_not_set_or_holds_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = NotifySettings(to=["TEAM_CHAT", "block:slack-webhook/team"])
    monkeypatch.delenv("TEAM_CHAT", raising=False)
    with pytest.raises(ConfigError, match="is not set"):
        settings.check()
    monkeypatch.setenv("TEAM_CHAT", "hunter2-secret")
    with pytest.raises(ConfigError, match="Apprise knows") as caught:
        settings.check()
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("TEAM_CHAT", SECRET)
    settings.check()


def test_a_place_that_does_not_answer_is_a_warning_without_the_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEAM_CHAT", SECRET)
    with caplog.at_level(logging.DEBUG):
        NotifySettings(to=["TEAM_CHAT"]).send(Message("failed", "toy failed", ["train: failed"]))
    assert "The message to TEAM_CHAT could not be sent" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_message_says_what_failed_and_how_to_go_on() -> None:
    result = PipelineResult("toy", "0123456789abcdef77", "store", run_name="toy-1", report_url="store/r.html")
    result.stages = [StageOutcome("prepare-data", "ran", "", 3.0), StageOutcome("predict", "skipped", "")]
    result.error = CodeError("ValueError: no", remedy="Correct it.")
    message = describe_run(result)
    assert (message.state, message.subject) == ("failed", "toy-1 failed")
    assert message.lines == [
        "prepare-data: ran, 3 s",
        "your code raised: ValueError: no",
        "Correct it.",
        "Report: store/r.html",
        "Resume: trainflow resume 0123456789abcdef --storage store",
    ]


def test_only_the_ends_that_are_asked_for_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def note(place: str, subject: str, body: str) -> bool:
        sent.append(subject)
        return True

    monkeypatch.setattr("trainflow.tasks.tracking.notifying._send", note)
    ends = (
        PipelineResult("done", "", "s", stages=[StageOutcome("train", "ran", "", 1.0)]),
        PipelineResult("cached", "", "s", stages=[StageOutcome("train", "cached", "")]),
        PipelineResult("stopped", "", "s", error=Interrupted("Ctrl-C.")),
        PipelineResult("pruned", "", "s", error=Pruned("Others were better.")),
        PipelineResult("failed", "", "s", error=CodeError("no")),
    )
    for asked, expected in (({}, ["done finished", "failed failed"]), ({"on": ["stopped"]}, ["stopped stopped"])):
        sent.clear()
        for result in ends:
            tell_of_run(NotifySettings.model_validate({"to": ["TEAM_CHAT"], **asked}), result)
        assert sent == expected


# -- metrics of packages ----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return toy.project(tmp_path / "project")


def spec_of(path: Path, metrics: str) -> PipelineSpec:
    return load_spec(path, (f"evaluate.metrics={metrics}",))


def fields(path: Path, metrics: list[Any]) -> dict[str, Any]:
    context = StageContext(name="toy", recipe=str(path.with_name("recipe.py")), storage="store")
    data, model = (StageManifest(stage, "", "", stage[0] * 64) for stage in ("prepare-data", "train"))
    return _keys.evaluate_key(EvaluateConfig(metrics=metrics), context, data, model).fields


def test_metrics_are_written_as_names_or_with_what_they_are_called_with(path: Path) -> None:
    entry = f"{{name: {BETA}, as: f2, beta: 2, average: macro}}"
    found = spec_of(path, f"[accuracy, {KAPPA}, {entry}, {{name: rmse}}]").evaluate.metrics
    assert found == ["accuracy", KAPPA, {"name": BETA, "as": "f2", "beta": 2, "average": "macro"}, "rmse"]
    assert spec_of(path, "[accuracy]").to_record()["evaluate"]["metrics"] == ["accuracy"]


@pytest.mark.parametrize(
    ("metrics", "value", "says"),
    [
        ("[mae, f1_marco]", "f1_marco", "f1_macro"),
        ("[sklearn.metrics.f1_score]", "sklearn.metrics.f1_score", "No metric has this name"),
        ("[{name: mae, beta: 2}]", "beta", "takes no arguments"),
        ("[{beta: 2}]", "beta", "a mapping with a name"),
        ("[3]", "3", "a mapping with a name"),
        (f"[{KAPPA}, '{KAPPA}']", "cohen_kappa_score", "as: …"),
    ],
)
def test_entries_that_are_none_are_refused_as_the_spec_is_read(path: Path, metrics: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(path, metrics)
    assert str(caught.value.field).startswith("evaluate.metrics")
    assert value in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("where", ["scores.py", "src/scores.py", "scores/__init__.py"])
def test_code_of_the_project_belongs_into_the_recipe(path: Path, where: str) -> None:
    file = path.parent / where
    file.parent.mkdir(exist_ok=True)
    file.write_text("def kappa(y_true, y_pred): return 0.0\n")
    with pytest.raises(ConfigError, match="belongs to the project") as caught:
        spec_of(path, "[scores:kappa]")
    assert caught.value.value == "scores:kappa"
    assert "compute_metrics" in str(caught.value.remedy)


def test_the_version_of_the_package_and_the_arguments_count_for_the_key(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fields(path, ["mae", KAPPA, "mlflow.metrics:genai", "nowhere_at_all:f"])["metric_packages"]
    assert found["scikit-learn"] == metadata.version("scikit-learn")
    assert found["mlflow"] == metadata.version("mlflow")
    assert found["nowhere_at_all"] == "not installed"
    assert fields(path, ["mae"])["metric_packages"] == {}
    one, two = (fields(path, [{"name": BETA, "beta": beta}])["metrics"] for beta in (1, 2))
    assert one != two
    monkeypatch.setattr("trainflow.tasks.keys.keys.metadata.version", lambda name: "0.0.1")
    assert metric_packages(read_metrics([KAPPA])) == {"scikit-learn": "0.0.1"}


def test_which_metrics_there_will_be_is_known_only_where_none_is_of_a_package(path: Path) -> None:
    spec = spec_of(path, "[{name: mae, as: off}]")
    assert find_measured(spec, spec.resolver) == ["error", "off"]
    spec = spec_of(path, f"[{KAPPA}]")
    assert find_measured(spec, spec.resolver) is None
