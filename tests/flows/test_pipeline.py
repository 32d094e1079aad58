"""Which stages run again, and why, and in which order: every change to a project that has run, and what it does."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.support.runs import ALL, IN_PROCESS, broken, ran, reason, run, spec_of, succeeded
from tests.support.toy import RECIPE, project
from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import CodeError, ConfigError
from trainer_lib.launch.settings import config
from trainer_lib.launch.settings.config import LaunchConfig
from trainflow.flows.cli import presentation
from trainflow.flows.pipeline import run_pipeline
from trainflow.flows.planning.plan import Plan, StagePlan, StageReason
from trainflow.flows.records.past_runs import list_runs
from trainflow.flows.spec.spec import load_spec
from trainflow.flows.stages import find_stage, stage_names
from trainflow.tasks.code import closure
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.stage import progress

AFTER_TRAIN = ALL - {"prepare-data"}


def test_an_unchanged_spec_starts_nothing(folder: Path) -> None:
    told: list[dict[str, Any]] = []
    [report] = folder.glob("store/runs/*/report.html")
    before = report.read_text()
    with progress.subscribe(told.append):
        result = run(folder)
    assert [outcome.status for outcome in result.stages] == ["cached"] * 5
    assert report.read_text() == before  # it still tells of the run that did the work
    assert result.report_url == str(report)
    assert {event["status"] for event in told} == {"cached"}
    assert all(one.hit for one in Plan.of(spec_of(folder)).reasons.values())


def test_settings_that_change_no_result_and_a_batch_cut_up_otherwise_run_nothing(folder: Path) -> None:
    others = ("train.args.logging_steps=3", "train.args.save_steps=3", "train.launch.threads=2", "train.retries=1")
    assert ran(run(folder, *others, "train.args.per_device_train_batch_size=2")) == set()


def test_a_training_argument_runs_train_and_what_follows_but_not_prepare(folder: Path) -> None:
    planned = plan_of(folder, "train.args.learning_rate=1e-2")
    assert str(planned["train"].differences[0]) == "args.learning_rate: 0.05 -> 0.01"
    result = run(folder, "train.args.learning_rate=1e-2")
    assert ran(result) == AFTER_TRAIN
    assert reason(result, "train") == "args.learning_rate: 0.05 -> 0.01"
    assert reason(result, "evaluate").startswith("model changed")
    assert ran(run(folder)) == set()  # the earlier result is still there


def test_prepares_options_run_everything(folder: Path) -> None:
    result = run(folder, "prepare.options.rows=48")
    assert ran(result) == ALL
    assert reason(result, "prepare-data") == "options.rows: 64 -> 48"
    assert reason(result, "train").startswith("data changed")


@pytest.mark.parametrize("deleted", [{"prepare-data", "evaluate", "push-to-hub"}, {"train", "predict"}])
def test_deleted_stages_run_and_what_follows_them_is_kept(folder: Path, deleted: set[str]) -> None:
    for stage in deleted:
        shutil.rmtree(folder / "store" / "stages" / stage)
    if "push-to-hub" in deleted:
        shutil.rmtree(folder / "store" / "hub")
    result = run(folder)
    assert ran(result) == deleted  # what they make is the same, bit for bit
    assert {reason(result, stage) for stage in deleted} == {"never run before"}


DAMAGED = {
    "prepare-data": "data/train/*.arrow",
    "train": "model/model.safetensors",
    "evaluate": "metrics.json",
    "predict": "predictions/test/*.parquet",
}


@pytest.mark.parametrize("stages", [("evaluate", "prepare-data"), ("predict", "train")])
def test_truncating_files_runs_their_stages_again_and_names_the_files(folder: Path, stages: tuple[str, str]) -> None:
    files = {stage: sorted(folder.glob(f"store/stages/{stage}/*/{DAMAGED[stage]}"))[0] for stage in stages}
    for stage, file in files.items():  # the later one first: it is planned for its own damage
        file.write_bytes(file.read_bytes()[:-1])
        assert file.name in plan_of(folder)[stage].reason
    result = run(folder)
    assert ran(result) == set(stages)
    for stage, file in files.items():
        assert "damaged" in reason(result, stage)
        assert file.name in reason(result, stage)


def plan_of(folder: Path, *overrides: str) -> dict[str, StageReason]:
    return dict(Plan.of(spec_of(folder, *overrides)).reasons)


def test_a_fixed_metric_runs_evaluate_and_what_follows_and_a_comment_nothing(folder: Path) -> None:
    recipe = folder / "recipe.py"
    recipe.write_text("# a comment\n" + recipe.read_text())
    assert ran(run(folder)) == set()
    line = broken(folder, '    return {"error"', '    p = p\n    return {"error"') - 1
    planned = plan_of(folder)
    assert planned["evaluate"].reason == f"compute_metrics changed (recipe.py:{line})"
    result = run(folder)
    assert ran(result) == {"evaluate", "push-to-hub"}  # the model card shows the key of what measured
    assert reason(result, "evaluate") == planned["evaluate"].reason
    broken(folder, "abs(p.predictions", "2 * abs(p.predictions")
    assert ran(run(folder)) == {"evaluate", "push-to-hub"}


def test_a_stage_that_runs_whatever_comes_before_it_gives_its_own_reason(folder: Path) -> None:
    broken(folder, "rows = int(", "rows = 0 + int(")
    planned = plan_of(folder)
    assert planned["prepare-data"].reason == "prepare changed (recipe.py:5)"
    assert (planned["train"].certain, planned["train"].reason.partition(";")[0]) == (False, "prepare-data runs first")
    line = broken(folder, "Linear(1, 1)", "Linear(1, 1, bias=True)")
    planned = plan_of(folder)
    start = (folder / "recipe.py").read_text().splitlines().index("def build_model(options, data):") + 1
    assert start < line
    assert (planned["train"].certain, planned["train"].reason) == (True, f"build_model changed (recipe.py:{start})")
    broken(folder, "def compute_metrics", "points.__doc__ = 'x'\n\n\ndef compute_metrics")
    shown = plan_of(folder)["evaluate"].reason
    assert "a statement that runs at import added (recipe.py:" in shown
    assert "points.__doc__ = 'x'" in shown


def test_a_stage_with_its_own_recipe_is_edited_alone(folder: Path) -> None:
    own = folder / "metrics.py"
    own.write_text("def compute_metrics(p):\n    return {'error': 1.0}\n")
    assert ran(run(folder, f"evaluate.recipe={own}")) == {"evaluate", "push-to-hub"}
    own.write_text("def compute_metrics(p):\n    return {'error': 2.0}\n")
    result = run(folder, f"evaluate.recipe={own}")
    assert ran(result) == {"evaluate", "push-to-hub"}
    assert reason(result, "evaluate") == "compute_metrics changed (metrics.py:1)"
    # The model is the pipeline's: what the file does not define comes from there.
    broken(folder, "Linear(1, 1)", "Linear(1, 1, bias=False)")
    assert {"train", "evaluate"} <= ran(run(folder, f"evaluate.recipe={own}"))


def test_sources_and_declared_paths_reach_the_recipe_resolved_from_any_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "table.csv").write_text("7")
    (folder / "words").write_text("a b")
    spec = folder / "pipeline.yaml"
    text = spec.read_text().replace("prepare:\n", "prepare:\n  sources: [table.csv, 'stdlib:json']\n")
    text = text.replace("{rows: 64}", "{rows: 64, table: table.csv, also: [words, 's3://bucket/x']}")
    spec.write_text(text.replace("train:\n", "train:\n  model: {words: words}\n"))
    read = "    out.info['read'] = Path(out.sources[0]).read_text() + options['table'].read_text() + out.sources[1]\n"
    read += "    out.info['also'] = [options['also'][0].read_text(), options['also'][1]]\n"
    broken(folder, "    rows = int(", f"{read}    rows = int(")
    broken(folder, "def prepare(options, out)", "def prepare(options: Options, out)")
    broken(folder, "def build_model(options, data):", "def build_model(options: Words, data):")
    broken(folder, "    import torch\n", "    import torch\n\n    assert options['words'].read_text() == 'a b'\n")
    declared = (
        "from pathlib import Path\nfrom typing import TypedDict\n\n\nclass Options(TypedDict):\n    table: Path\n"
    )
    declared += "    also: list[Path]\n\n\nclass Words(TypedDict):\n    words: Path\n"
    broken(folder, "\n\ndef prepare", f"\n{declared}\n\ndef prepare")
    monkeypatch.chdir("/")
    result = succeeded(folder)
    data, model, *_ = [each.manifest for each in result.stages]
    assert data is not None
    assert data["meta"]["info"] == {"slope": 2.0, "read": "77stdlib:json", "also": ["a b", "s3://bucket/x"]}
    # No path of this machine's folder is in what a stage commits.
    assert model is not None
    assert model["meta"]["model"] == {"words": "words"}
    assert str(folder) not in (Path(model["url"]) / "model" / "config.json").read_text()
    shutil.move(folder, folder.parent / "moved")
    assert ran(run(folder.parent / "moved")) == set()


def test_one_stage_alone_a_later_start_and_a_forced_stage(folder: Path) -> None:
    forced = run(folder, force=["evaluate"])
    assert (ran(forced), reason(forced, "evaluate")) == ({"evaluate"}, "forced")
    only = run(folder, "predict.rows_per_file=3", only="predict")
    assert ran(only) == {"predict"}
    assert {outcome.stage for outcome in only.stages} == set(stage_names())
    assert ran(run(folder, "evaluate.splits=[train, test]", start="evaluate")) == {"evaluate", "push-to-hub"}


def test_stages_that_are_switched_off_are_left_out(folder: Path) -> None:
    result = run(folder, "predict.enabled=false", "evaluate.enabled=false", "train.args.seed=9")
    assert ran(result) == {"train", "push-to-hub"}
    assert reason(result, "predict") == "switched off in the spec"


# -- a check on a few rows ---------------------------------------------------------------------------------------------

# A generator that fails where a check has no business.
ENDLESS = """
    def numbered():
        for number, row in enumerate(points(10**9, 0)):
            assert number < 6, "read too far"
            yield row
    return {"train": numbered(), "test": points(16, 1)}
"""


def test_a_check_goes_through_every_stage_and_leaves_real_results_alone(folder: Path) -> None:
    before = {path for path in folder.rglob("*") if path.is_file()}
    result = succeeded(folder, "limit=6", "publish.to=hf://nowhere/at-all")
    assert ran(result) == ALL
    [data, model, *_] = (outcome.manifest or {} for outcome in result.stages)
    assert data["metrics"] == {"train_rows": 6, "test_rows": 6}
    assert model["meta"]["global_step"] == 4
    changed = {path for path in folder.rglob("*") if path.is_file()} - before
    limited = folder / "store" / "limited"
    assert all(path.is_relative_to(limited) or path.suffix == ".pyc" for path in changed)
    assert (limited / "hub" / "toy").is_dir()
    # Neither is a hit for the other, and each is one for itself.
    assert all(reason.hit for reason in Plan.of(spec_of(folder)).reasons.values())
    assert ran(run(folder, "limit=6")) == set()
    assert not any(reason.hit for reason in Plan.of(spec_of(folder, "limit=7")).reasons.values())
    [note, _] = presentation.check_note(result, 6)
    assert "a check on 6 rows of each split: it went through every stage" in note.plain


def test_a_check_reads_a_generator_no_further_than_its_rows(folder: Path) -> None:
    broken(folder, '    return {"train": points(rows, 0), "test": points(16, 1)}\n', ENDLESS)
    run(folder, "limit=6", only="prepare-data").raise_for_error()


# -- a run that begins in the middle, with what an earlier one has made ------------------------------------------------
def newest(folder: Path) -> str:
    return list_runs(str(folder / "store"))[0].id


def plan(folder: Path, *overrides: str, **how: Any) -> Plan:
    return Plan.of(spec_of(folder, *overrides), **how)


def hits(reasons: Mapping[str, StageReason]) -> set[str]:
    return {name for name, each in reasons.items() if each.hit}


def test_a_failed_run_goes_on_at_its_failed_stage_with_what_it_had_made(folder: Path) -> None:
    sound = (folder / "recipe.py").read_text()
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    assert run(folder, "train.args.learning_rate=1e-2").error is not None
    failed = newest(folder)
    (folder / "recipe.py").write_text(sound.replace("Linear(1, 1)", "Linear(1, 1, bias=True)"))
    ways: tuple[str, ...] = ("train.args.learning_rate=3e-2",)
    planned = plan(folder, *ways, from_run=failed[:6])
    assert planned.start == "evaluate"
    assert hits(planned.reasons) == {"prepare-data", "train"}
    assert planned.reasons["train"].reason.startswith(f"taken from run {failed}, committed ")
    [sentence] = planned.warnings["train"]
    assert sentence.startswith(f"The result of train is that of run {failed}; since then: ")
    assert "build_model changed (recipe.py:" in sentence
    assert "args.learning_rate: 0.01 -> 0.03" in sentence
    assert planned.warnings["prepare-data"] == []

    result = succeeded(folder, *ways, from_run=failed)
    assert ran(result) == {"evaluate", "predict", "push-to-hub"}
    assert {each.stage: each.reason for each in result.stages if each.status == "cached"} == {
        name: planned.reasons[name].reason for name in ("prepare-data", "train")
    }
    # What it ran is found again, and a plain run trains with the settings of the spec.
    assert ran(run(folder, *ways, from_run=failed)) == set()
    past = list_runs(str(folder / "store"))[0]
    assert (past.from_run, past.start, past.is_finished) == (failed, "evaluate", True)
    assert not plan(folder, *ways).reasons["train"].hit


def test_a_run_that_changed_nothing_is_the_same_run(folder: Path) -> None:
    finished = newest(folder)
    assert plan(folder, from_run=finished, start="train").pipeline_key == plan(folder).pipeline_key
    other = plan(folder, "train.args.learning_rate=1e-2", from_run=finished, start="evaluate")
    assert other.pipeline_key != plan(folder, "train.args.learning_rate=1e-2").pipeline_key
    assert hits(other.reasons) == set(other.stages), "the model is the same, so is what follows"
    only = run(folder, "predict.rows_per_file=3", "train.args.learning_rate=1e-2", from_run=finished, only="predict")
    assert ran(only) == {"predict"}
    assert reason(only, "train").startswith("taken from run")


def test_what_a_run_does_not_have_is_refused_with_what_to_do(folder: Path) -> None:
    finished = newest(folder)

    def refused(**how: Any) -> ConfigError:
        result = run(folder, **how)
        assert isinstance(result.error, ConfigError)
        assert result.error.exit_code == 2
        assert result.error.remedy
        return result.error

    assert "has finished" in refused(from_run=finished).message
    assert "--from STAGE" in str(refused(from_run=finished).remedy)
    assert f"Did you mean {finished}?" in str(refused(from_run=finished[:-1] + "x").remedy)
    shutil.rmtree(folder / "store" / "stages" / "train")
    gone = refused(from_run=finished, start="evaluate")
    assert gone.message == f"The stage train cannot be taken: its result in run {finished} is gone from the storage."
    assert gone.remedy == "Begin with it: --from train."
    broken(folder, "y = self.linear(x)", "raise ValueError('wrong shape')")
    assert run(folder, "name=second").error is not None
    failed = newest(folder)
    assert "a run of the pipeline 'second', and the spec is that of 'toy'" in refused(from_run=failed).message
    missing = run(folder, "name=second", from_run=failed, start="predict").error
    assert missing is not None
    assert missing.message == f"The stage train cannot be taken: run {failed} has no committed result of it."


def test_a_stage_that_takes_a_later_ones_place_needs_all_its_inputs(folder: Path) -> None:
    shutil.rmtree(folder / "store" / "stages" / "evaluate")
    error = run(folder, start="predict").error
    assert isinstance(error, ConfigError)
    assert "evaluate comes before it and has no committed result" in error.message


# -- before the first optimizer step, arguments, launches and closures are worked out once -----------------------------
@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def counting(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(TrainingArguments, "__post_init__", "arguments")
    counting(config, "check_installed", "launch checks")
    counting(closure._Walk, "visit", "closures")
    return found


@pytest.mark.usefixtures("prefect_server")
def test_arguments_launches_and_closures_are_worked_out_once(tmp_path: Path, counts: Counter[str]) -> None:
    spec = load_spec(project(tmp_path / "project"), IN_PROCESS[:1], Resolver())
    before_the_first_step: dict[str, int] = {}

    def stop_when_training_starts(event: dict[str, Any]) -> None:
        if event["stage"] == "train" and event["event"] == "start":
            before_the_first_step.update(counts)
            raise KeyboardInterrupt

    with progress.subscribe(stop_when_training_starts), pytest.raises(KeyboardInterrupt):
        run_pipeline(spec)
    # Launches: prepare's and train's. Evaluate and predict ask for the same arguments and the same launch as train.
    assert before_the_first_step == {"arguments": 1, "launch checks": 2, "closures": 1}


def test_a_spec_of_your_own_is_resolved_anew_by_every_run(tmp_path: Path, counts: Counter[str]) -> None:
    spec = load_spec(project(tmp_path / "project"))
    before = dict(counts)
    assert spec.resolver is not spec.resolver
    spec.check()
    assert counts["closures"] == before["closures"] + 1, "its recipe may have been edited since"


# -- evaluate and predict: one after the other, or together -----------------------------------------------------------

# Both have something to do, in processes of their own.
BOTH = (
    *("evaluate.launch=process", "predict.launch=process", "publish.enabled=false"),
    *("evaluate.splits=[train, test]", "predict.rows_per_file=3"),
)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU for each."""
    monkeypatch.setattr(StagePlan, "has_devices_apart_from", lambda self, other: True)


def spans(events: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Stage -> positions of its first and its last event among all events."""
    found: dict[str, tuple[int, int]] = {}
    for number, event in enumerate(events):
        found[event["stage"]] = (found.get(event["stage"], (number, 0))[0], number)
    return found


def planned(launch: LaunchConfig | None, *, use_cpu: bool = False) -> StagePlan:
    stage = find_stage("evaluate")
    assert stage is not None
    return StagePlan(stage, None, TrainingArguments(use_cpu=use_cpu), launch)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({"devices": (0,)}, {"devices": (1,)}, True),
        ({"devices": (0, 1)}, {"devices": (1, 2)}, False),
        ({"devices": (0,)}, {}, False),
        ({}, {}, False),
        ({"devices": ("GPU-a",)}, {"devices": ("GPU-b",)}, True),
        ({"devices": (0,)}, {"devices": ("GPU-b",)}, False),
        ({"devices": (0,)}, {"devices": (1,), "device_order": "PCI_BUS_ID"}, False),
        ({"devices": (0,), "kind": "in_process"}, {"devices": (1,)}, False),
    ],
)
def test_stages_run_together_only_on_gpus_of_their_own(one: Any, other: Any, apart: bool) -> None:
    first, second = planned(LaunchConfig(**one)), planned(LaunchConfig(**other))
    assert first.has_devices_apart_from(second) is apart
    assert second.has_devices_apart_from(first) is apart


def test_stages_on_the_cpu_and_those_without_workers_run_one_after_the_other() -> None:
    gpu, other = planned(LaunchConfig(devices=(0,))), LaunchConfig(devices=(1,))
    assert not gpu.has_devices_apart_from(planned(other, use_cpu=True))
    assert not gpu.has_devices_apart_from(planned(None))


def test_on_shared_devices_they_run_one_after_the_other(folder: Path) -> None:
    assert ["evaluate"] in Plan.of(spec_of(folder)).groups()
    events: list[dict[str, Any]] = []
    with progress.subscribe(events.append):
        run(folder, "evaluate.splits=[train, test]", "predict.rows_per_file=3").raise_for_error()
    found = spans(events)
    assert found["evaluate"][1] < found["predict"][0]


@pytest.mark.usefixtures("together")
def test_with_devices_of_their_own_they_run_at_the_same_time_and_ctrl_c_stops_both(folder: Path) -> None:
    assert ["evaluate", "predict"] in Plan.of(spec_of(folder)).groups()
    slow = folder / "slow.py"
    slow.write_text(RECIPE.replace("y = self.linear(", "import time; time.sleep(2); y = self.linear("))
    started: set[str] = set()

    def interrupt_when_both_work(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            started.add(event["stage"])
            if started == {"evaluate", "predict"}:
                os.kill(os.getpid(), signal.SIGINT)

    recipes = (f"evaluate.recipe={slow}", f"predict.recipe={slow}")
    with progress.subscribe(interrupt_when_both_work), pytest.raises(KeyboardInterrupt):
        run(folder, *BOTH, *recipes)
    # The leak police fails this test for a worker that is still there.

    events: list[dict[str, Any]] = []
    with progress.subscribe(events.append):
        result = succeeded(folder, *BOTH, "tracking.enabled=true")
    assert ran(result) == {"evaluate", "predict"}
    assert [outcome.stage for outcome in result.stages][2:4] == ["evaluate", "predict"]
    assert all(outcome.seconds > 0 for outcome in result.stages[2:4])
    found = spans(events)
    assert found["predict"][0] < found["evaluate"][1] and found["evaluate"][0] < found["predict"][1]

    tracked = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id or "").data
    assert {"trainflow.evaluate", "trainflow.predict"} <= set(tracked.tags)
    assert {"train-split/error", "test/error"} <= set(tracked.metrics)


@pytest.mark.usefixtures("together")
def test_one_that_fails_leaves_the_other_its_result(folder: Path) -> None:
    own = folder / "metrics.py"
    own.write_text(RECIPE.replace('return {"error"', 'return {"error": 1 / 0, "e"'))
    result = run(folder, *BOTH, f"evaluate.recipe={own}")
    assert isinstance(result.error, CodeError)
    outcomes = {outcome.stage: outcome for outcome in result.stages}
    assert (outcomes["evaluate"].status, outcomes["predict"].status) == ("failed", "ran")
    assert (outcomes["push-to-hub"].status, outcomes["push-to-hub"].reason) == ("skipped", "evaluate failed")
