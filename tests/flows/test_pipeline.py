"""Which stages run again, and why: every change to a project that has run, and what it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flows.plan import explain
from flows.stages import stage_names
from tasks.stage import progress as _progress
from tests.support.runs import ALL, newest_flow_run, ran, reason, run, spec_of
from trainer_lib.errors import ConfigError

AFTER_TRAIN = ALL - {"prepare-data"}


def stage_folder(folder: Path, stage: str) -> Path:
    [found] = (folder / "store" / "stages" / stage).iterdir()
    return found


def test_an_unchanged_spec_starts_nothing(folder: Path) -> None:
    told: list[dict[str, Any]] = []
    [report] = folder.glob("store/runs/*/report.html")
    before = report.read_text()
    with _progress.subscribe(told.append):
        result = run(folder)
    assert [outcome.status for outcome in result.stages] == ["cached"] * 5
    assert report.read_text() == before  # it still tells of the run that did the work
    assert result.report_url == str(report)
    assert {event["status"] for event in told} == {"cached"}
    assert all(one.hit for one in explain(spec_of(folder)))


@pytest.mark.parametrize(
    "override", ["train.args.logging_steps=3", "train.args.save_steps=3", "train.launch.threads=2", "train.retries=1"]
)
def test_settings_that_change_no_result_run_nothing(folder: Path, override: str) -> None:
    assert ran(run(folder, override)) == set()


def test_the_same_global_batch_cut_up_otherwise_runs_nothing(folder: Path) -> None:
    assert ran(run(folder, "train.args.per_device_train_batch_size=2")) == set()


def test_a_training_argument_runs_train_and_what_follows_but_not_prepare(folder: Path) -> None:
    planned = {one.stage: one for one in explain(spec_of(folder, "train.args.learning_rate=1e-2"))}
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


@pytest.mark.parametrize("stage", sorted(ALL))
def test_deleting_one_stage_runs_that_stage_only(folder: Path, stage: str) -> None:
    shutil.rmtree(folder / "store" / "stages" / stage)
    if stage == "push-to-hub":
        shutil.rmtree(folder / "store" / "hub")
    result = run(folder)
    assert ran(result) == {stage}  # what it makes is the same, bit for bit: what follows is kept
    assert reason(result, stage) == "never run before"


@pytest.mark.parametrize(
    ("stage", "pattern"),
    [
        ("prepare-data", "data/train/*.arrow"),
        ("train", "model/model.safetensors"),
        ("evaluate", "metrics.json"),
        ("predict", "predictions/test/*.parquet"),
    ],
)
def test_truncating_one_file_runs_its_stage_again_and_names_the_file(folder: Path, stage: str, pattern: str) -> None:
    [file, *_] = sorted(stage_folder(folder, stage).glob(pattern))
    file.write_bytes(file.read_bytes()[:-1])
    planned = {one.stage: one for one in explain(spec_of(folder))}
    assert file.name in planned[stage].reason
    result = run(folder)
    assert ran(result) == {stage}
    assert "damaged" in reason(result, stage)
    assert file.name in reason(result, stage)


def edit(folder: Path, old: str, new: str) -> int:
    """Edit the recipe, and return the line of what was edited."""
    recipe = folder / "recipe.py"
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def test_a_fixed_metric_runs_evaluate_and_what_follows_and_a_comment_nothing(folder: Path) -> None:
    recipe = folder / "recipe.py"
    recipe.write_text("# a comment\n" + recipe.read_text())
    assert ran(run(folder)) == set()
    line = edit(folder, '    return {"error"', '    p = p\n    return {"error"') - 1
    planned = {one.stage: one for one in explain(spec_of(folder))}
    assert planned["evaluate"].reason == f"compute_metrics changed (recipe.py:{line})"
    result = run(folder)
    assert ran(result) == {"evaluate", "push-to-hub"}  # the model card shows the key of what measured
    assert reason(result, "evaluate") == planned["evaluate"].reason
    edit(folder, "abs(p.predictions", "2 * abs(p.predictions")
    assert ran(run(folder)) == {"evaluate", "push-to-hub"}


def test_an_edited_model_runs_all_but_prepare_and_says_so(folder: Path) -> None:
    line = edit(folder, "Linear(1, 1)", "Linear(1, 1, bias=True)")
    result = run(folder)
    assert "prepare-data" not in ran(result)
    assert {"train", "evaluate", "predict"} <= ran(result)
    start = (folder / "recipe.py").read_text().splitlines().index("def build_model(options, data):") + 1
    assert start < line
    assert reason(result, "train") == f"build_model changed (recipe.py:{start})"


def test_a_stage_that_runs_whatever_comes_before_it_gives_its_own_reason(folder: Path) -> None:
    edit(folder, "rows = int(", "rows = 0 + int(")
    planned = {one.stage: one for one in explain(spec_of(folder))}
    assert planned["prepare-data"].reason == "prepare changed (recipe.py:5)"
    assert (planned["train"].certain, planned["train"].reason.partition(";")[0]) == (False, "prepare-data runs first")
    edit(folder, "Linear(1, 1)", "Linear(1, 1, bias=True)")
    planned = {one.stage: one for one in explain(spec_of(folder))}
    assert planned["train"].certain
    assert planned["train"].reason.startswith("build_model changed (recipe.py:")


def test_a_statement_that_may_change_anything_runs_all_and_is_shown(folder: Path) -> None:
    edit(folder, "def compute_metrics", "points.__doc__ = 'x'\n\n\ndef compute_metrics")
    result = run(folder)
    assert {"prepare-data", "train", "evaluate", "predict"} <= ran(result)
    assert "a statement that runs at import added (recipe.py:" in reason(result, "train")
    assert "points.__doc__ = 'x'" in reason(result, "train")


def test_a_stage_with_its_own_recipe_is_edited_alone(folder: Path) -> None:
    own = folder / "metrics.py"
    own.write_text("def compute_metrics(p):\n    return {'error': 1.0}\n")
    assert ran(run(folder, f"evaluate.recipe={own}")) == {"evaluate", "push-to-hub"}
    own.write_text("def compute_metrics(p):\n    return {'error': 2.0}\n")
    result = run(folder, f"evaluate.recipe={own}")
    assert ran(result) == {"evaluate", "push-to-hub"}
    assert reason(result, "evaluate") == "compute_metrics changed (metrics.py:1)"
    # The model is the pipeline's: what the file does not define comes from there.
    edit(folder, "Linear(1, 1)", "Linear(1, 1, bias=False)")
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
    edit(folder, "    rows = int(", f"{read}    rows = int(")
    edit(folder, "def prepare(options, out)", "def prepare(options: Options, out)")
    edit(folder, "def build_model(options, data):", "def build_model(options: Words, data):")
    edit(folder, "    import torch\n", "    import torch\n\n    assert options['words'].read_text() == 'a b'\n")
    declared = (
        "from pathlib import Path\nfrom typing import TypedDict\n\n\nclass Options(TypedDict):\n    table: Path\n"
    )
    declared += "    also: list[Path]\n\n\nclass Words(TypedDict):\n    words: Path\n"
    edit(folder, "\n\ndef prepare", f"\n{declared}\n\ndef prepare")
    monkeypatch.chdir("/")
    result = run(folder)
    result.raise_for_error()
    data, model, *_ = [each.manifest for each in result.stages]
    assert data is not None
    assert data["meta"]["info"] == {"slope": 2.0, "read": "77stdlib:json", "also": ["a b", "s3://bucket/x"]}
    # No path of this machine's folder is in what a stage commits.
    assert model is not None
    assert model["meta"]["model"] == {"words": "words"}
    assert str(folder) not in (Path(model["url"]) / "model" / "config.json").read_text()
    shutil.move(folder, folder.parent / "moved")
    assert ran(run(folder.parent / "moved")) == set()


def test_force_runs_a_stage_again(folder: Path) -> None:
    result = run(folder, force=["evaluate"])
    assert ran(result) == {"evaluate"}
    assert reason(result, "evaluate") == "forced"


def test_one_stage_alone_and_a_later_start(folder: Path) -> None:
    only = run(folder, "predict.rows_per_file=3", only="predict")
    assert ran(only) == {"predict"}
    assert {outcome.stage for outcome in only.stages} == set(stage_names())
    later = run(folder, "evaluate.splits=[train, test]", start="evaluate")
    assert ran(later) == {"evaluate", "push-to-hub"}


def test_only_and_start_demand_what_comes_before(folder: Path) -> None:
    result = run(folder, "train.args.seed=5", only="evaluate")
    assert isinstance(result.error, ConfigError)
    assert (result.error.field, result.error.value) == ("--only", "evaluate")
    assert "train" in result.error.message
    unknown = run(folder, start="trian")
    assert isinstance(unknown.error, ConfigError)
    assert unknown.error.field == "--from"


def test_stages_that_are_switched_off_are_left_out(folder: Path) -> None:
    result = run(folder, "predict.enabled=false", "evaluate.enabled=false", "train.args.seed=9")
    assert ran(result) == {"train", "push-to-hub"}
    assert reason(result, "predict") == "switched off in the spec"


def test_a_spec_larger_than_prefects_parameters_runs_and_is_deployed(folder: Path) -> None:
    from prefect.client.orchestration import get_client

    from flows.deployed import pipeline as deployed_pipeline
    from flows.server.serving import _deployment

    large = f"prepare.options={json.dumps({'rows': 64, 'words': 'word ' * 130_000})}"
    assert run(folder, large, only="prepare-data").ok
    assert set(newest_flow_run().parameters["spec"]) == {"name", "storage", "spec_file", "sha256"}
    spec = spec_of(folder, large)
    deployment = _deployment(spec, "large", None).apply()
    assert isinstance(deployment, UUID)
    with get_client(sync_client=True) as client:
        parameters = client.read_deployment(deployment).parameters
        client.delete_deployment(deployment)
    assert deployed_pipeline.validate_parameters(parameters)["spec"] == spec
