"""Bad input as its user meets it: what is wrong, where, why and what to do; the right exit code; nothing half-done."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.support import toy
from tests.support.command import Cli
from tests.support.runs import IN_PROCESS, ran, reason, run, spec_of, succeeded
from tests.support.s3 import NOWHERE, S3_AWAY
from tests.support.toy import RECIPE
from trainer_lib.errors import ConfigError, StorageGoneError
from trainer_lib.locks.lease import acquire_lease
from trainflow.flows.planning.full_plan import plan_in_full
from trainflow.flows.planning.plan import Plan
from trainflow.tasks.keys.stage_code import code_of
from trainflow.tasks.stage import progress, runner

# The data has a file of its own, so that a change of the model's file does not prepare it again.
DATA, MODEL = toy.RECIPE.split("def build_model")
MODEL = f"def build_model{MODEL}"
SPEC = toy.SPEC.replace("prepare:\n", "prepare:\n  recipe: data.py\n").replace("rows: 64", "rows: 32")
WITH_LOSS = 'return {"loss": ((y - labels) ** 2).mean(), "logits": y}'
COLLATED = "\n\ndef collate(rows):\n    import torch\n\n    return {%s}\n"
PIXELS = '"x": torch.tensor([row["pixels"] for row in rows])'
ZEROS = '"pixels": torch.zeros(len(rows), 1), "labels": torch.zeros(len(rows), 1)'


def project(folder: Path, *, data: str = DATA, storage: Path | None = None) -> Path:
    """A project whose recipe is in two files; the path of its spec."""
    spec = toy.project(folder, recipe=MODEL, spec=SPEC)
    (folder / "data.py").write_text(data)
    if storage is not None:
        spec.write_text(spec.read_text().replace("storage: store", f"storage: {storage}"))
    return spec


def committed(storage: Path) -> set[Path]:
    """The commit files of stages: what counts as complete."""
    return set(storage.glob("stages/*/*/COMMIT.json"))


# ------------------------------------------------------------------------------------- refused before anything starts
@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which every command is refused."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "file").write_text("x")
    (folder / "broken.py").write_text("def prepare(options, out):\n    return {'train': [)}\n")
    (folder / "half.py").write_text("def prepare(options, out): ...\n")
    return project(folder)


MANY = str((os.cpu_count() or 1) + 1)


# tests/unit/flows/test_commands.py has the words for a hundred other values.
@pytest.mark.parametrize(
    ("override", "where", "why", "do"),
    [
        ("predict.row_per_file=5", "predict.row_per_file = 5", "Unknown key", "'rows_per_file'"),
        ("recipe=broken.py", "broken.py", r"not valid Python: .*line 2", "Correct the file"),
        ("recipe=half.py", "half.py", "no function 'build_model'", "Define build_model"),
        ("storage=file", "file", "is a file, not a folder", "Choose a folder"),
        ("storage=file/below", "file/below", "A file is in the place of a folder", "move that file away"),
        ("storage=/proc/trainflow", "/proc/trainflow", "Cannot write there", "another storage|permissions"),
        ("storage=gs://bucket/x", "storage = gs://", "a package that is not installed", r'"trainflow\[gcs\]"'),
        (f"train.launch.processes={MANY}", f"train.launch.processes = {MANY}", "cores?", "at most"),
        ("storage=s3://me:hf_0123@bucket/x", "storage", "A URL with a password", "environment variables"),
    ],
)
def test_what_the_spec_can_tell_is_refused_at_once(
    plain: Path, override: str, where: str, why: str, do: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # An engine that starts would fail.
    done = cli("run", plain, override, cwd=folder, env={"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    rows = done.failure()
    assert done.out == ""
    assert where in rows["where"]
    assert re.search(why, rows["why"]), rows
    assert re.search(do, rows["do"]), rows
    assert "hf_0123" not in done.err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


AWAY = "the store does not answer (Connection refused)"
SWEEP = "sweep={space: {train.args.seed: [1, 2]}, objective: test_error, direction: minimize, trials: 2}"


@pytest.mark.parametrize(
    ("command", "overrides", "where", "why"),
    [
        ("run", ["storage=s3://bucket/x"], "storage = s3://bucket/x", AWAY),
        ("sweep", ["storage=s3://bucket/x", SWEEP], "storage = s3://bucket/x", AWAY),
        ("why", ["storage=s3://bucket/x"], "s3://bucket/x/", AWAY),
        ("why", [f"prepare.sources=[{NOWHERE}/a]"], f"{NOWHERE}/a", "cannot be reached: Connection refused"),
        ("why", ["prepare.sources=[s3://b/a]"], "s3://b/a", AWAY),
    ],
)
def test_what_is_out_of_reach_is_named_in_plain_words(
    plain: Path, command: str, overrides: list[str], where: str, why: str, cli: Cli
) -> None:
    done = cli(command, plain, *overrides, cwd=plain.parent, env=S3_AWAY)
    rows = done.failure(14, "storage out of reach")
    assert rows["where"].startswith(where)
    assert why in rows["why"]
    assert "Check the" in rows["do"]
    assert not re.search("Errno|urlopen|endpoint URL|HTTPConnection", done.out + done.err)


# ------------------------------------------------------------------------------------------ found when the recipe runs
@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A storage in which the sound recipe's stages are committed."""
    folder = project(tmp_path_factory.mktemp("ground")).parent
    run(folder, "predict.enabled=false", "publish.enabled=false").raise_for_error()
    return folder / "store"


@pytest.mark.usefixtures("prefect_server")
def test_the_same_command_works_once_its_cause_is_repaired(tmp_path: Path, cli: Cli) -> None:
    spec = project(tmp_path, data=DATA.replace('{"x": [x]', '{"x": [float("nan") if _ == 7 else x]'))
    words = ("run", spec, *IN_PROCESS, "predict.enabled=false", "publish.enabled=false")
    (tmp_path / "store").write_text("in the way")
    assert "is a file, not a folder" in cli(*words).failure()["why"]
    (tmp_path / "store").unlink()
    nan = cli(*words)
    rows = nan.failure(11, "bad data")
    assert "NaN in split 'train', row 7, column 'x'" in rows["why"]
    assert "prepare.allow_nan=true" in rows["do"]
    assert re.search(r"^  train +skipped +prepare-data failed$", nan.out, re.M), nan.out
    assert committed(tmp_path / "store") == set()
    (tmp_path / "data.py").write_text(DATA)
    assert cli(*words).code == 0
    assert len(committed(tmp_path / "store")) == 3


# What fails while it runs: the file of the project, and what is edited there; then the stage that fails (those before
# it are found committed, or run), the exit code, and what has to be said.
RAISES, ENDS, FIX = '    import torch\n    raise RuntimeError("no weights")\n', "return Line()\n", "Fix the recipe"
CASES = {
    "prepare raises": ("data.py", 'out.info["slope"] = 2.0', 'raise KeyError("slope")',
                       "prepare-data", 10, "data.py:6 in prepare", "KeyError: 'slope'", FIX),
    "a row raises": ("data.py", "random.Random(seed)", "random.Random(seed / 0)",
                     "prepare-data", 10, "data.py:14 in points", "ZeroDivisionError", FIX),
    "an empty split": ("data.py", "points(16, 1)", "points(0, 1)",
                       "prepare-data", 11, "prepare = test", "split 'test' is empty", "Check the filters"),
    "build_model raises": ("recipe.py", "    import torch\n\n", RAISES,
                           "train", 10, "recipe.py:3 in build_model", "RuntimeError: no weights", FIX),
    "collate raises": ("recipe.py", ENDS, f"{ENDS}{COLLATED % PIXELS}",
                       "train", 10, "recipe.py:21 in ", "KeyError: 'pixels'", FIX),
    "a batch that forward does not take": ("recipe.py", ENDS, f"{ENDS}{COLLATED % ZEROS}",
                       "train", 2, "model", "The batch has pixels, labels; the model", "Let collate"),
    "a model without a loss": ("recipe.py", WITH_LOSS, 'return {"logits": y}',
                               "train", 2, "model", "returned no loss but only logits; it was", "Return the loss"),
    "compute_metrics raises": ("measures.py", "p.predictions -", "p.prediction -",
                               "evaluate", 10, "in compute_metrics", "AttributeError.*'prediction'", FIX),
    # Refused before the training that comes before its use.
    "an unknown split": ("pipeline.yaml", "splits: [test]", "splits: [test, tset]",
                         "train", 2, "evaluate.splits = tset", "no such split", "'test'"),
}  # fmt: skip
TITLES = {2: "bad input", 10: "your code raised", 11: "bad data"}


@pytest.mark.parametrize("case", CASES)
def test_what_shows_when_it_runs_ends_its_stage(ground: Path, case: str, tmp_path: Path, cli: Cli) -> None:
    before, (file, old, new, failing, code, where, why, do) = committed(ground), CASES[case]
    spec = project(tmp_path, storage=ground)
    (tmp_path / "measures.py").write_text(MODEL)
    assert old in (tmp_path / file).read_text()
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new, 1))
    measures = ["evaluate.recipe=measures.py"] if file == "measures.py" else []
    done = cli("run", spec, *IN_PROCESS, *measures, cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    rows = done.failure(code, TITLES[code])
    assert where in rows["where"]
    assert re.search(why, rows["why"]), rows
    assert do in rows["do"]
    if code == 10:  # kept in a file: what --debug would have shown, cut to the user's own frames
        kept = frames(Path(rows["more"].split(" (")[0]).read_text())
        assert {Path(name) for name, _, _ in kept} == {tmp_path / file}
    assert committed(ground) == before, "what was committed stays, and nothing else looks complete"
    outcomes = dict(re.findall(r"^  (\S+) +(cached|ran|failed|skipped)\b", done.out, re.M))
    order = ["prepare-data", "train", "evaluate", "predict", "push-to-hub"]
    place = order.index(failing)
    assert all(outcomes[stage] == "cached" for stage in order[:place]), done.out
    assert outcomes[failing] in ("failed", "skipped")
    assert all(outcomes[stage] == "skipped" for stage in order[place + 1 :]), done.out


def test_a_stage_alone_needs_what_comes_before_it(tmp_path: Path, cli: Cli, prefect_server: str) -> None:
    done = cli("run", project(tmp_path), "--only", "predict")
    rows = done.failure()
    assert rows["where"] == "--only = predict"
    assert "prepare-data comes before it and has no committed result" in rows["why"]
    assert done.out == "", "no table of nothing"


@pytest.mark.usefixtures("prefect_server")
def test_a_traceback_is_shown_when_it_is_asked_for(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the run's files are kept
    done = cli("run", project(tmp_path, data=DATA.replace(*CASES["prepare raises"][1:3])), *IN_PROCESS, "--debug")
    assert done.code == 10
    assert frames(done.err) == [(str(tmp_path / "data.py"), "6", "prepare")]


def frames(text: str) -> list[tuple[str, str, str]]:
    """File, line and function of the last traceback in a text (with --debug, Prefect's own come before it)."""
    shown = text[text.rindex("Traceback (most recent call last):") :]
    return re.findall(r'File "(.*)", line (\d+), in (\w+)', shown)


# -- what an evaluation cannot measure --------------------------------------------------------------------------------

GROUPED = RECIPE.replace('yield {"x"', 'yield {"group": f"{x:.9f}", "sign": int(x > 0), "x"')
OBJECT_ALONE = "import torchmetrics\n\ncompute_metrics = torchmetrics.MeanSquaredError()\n"
OBJECT = GROUPED.partition("def compute_metrics")[0] + OBJECT_ALONE
# The model as it begins cannot be evaluated; the trained one can.
UNREADY = GROUPED.replace(
    "            y = self",
    """            if not self.training and self.linear.weight.abs() < 0.5:
                raise ValueError("not trained yet")
            y = self""",
).replace("Linear(1, 1)\n", "Linear(1, 1)\n            torch.nn.init.zeros_(self.linear.weight)\n")
PINBALL = "{name: sklearn.metrics:mean_pinball_loss, alhpa: 0.9}"


@pytest.fixture
def fresh(tmp_path: Path, prefect_server: str) -> Path:
    return toy.project(tmp_path / "project", recipe=GROUPED).parent


@pytest.mark.parametrize(
    ("recipe", "overrides", "field", "value", "words"),
    [
        # Splits of 16 rows and of 64.
        (GROUPED, ("slices=[sign, group]", "splits=[test, train]"), "slices", "group", "'train'"),
        (GROUPED, ("require={test_eror: < 9}",), "require.test_eror", None, 'Did you mean "test_error"?'),
        (GROUPED, ("metrics=[rmse, f1_macro]",), "metrics", "f1_macro", "median_absolute_error"),
        (GROUPED, (f"metrics=[mae, {PINBALL}]",), "metrics", "alhpa", 'Did you mean "alpha"?'),
        (OBJECT, ("metrics=[mae]",), "metrics", "mae", "batch by batch"),
        (OBJECT, ("confidence=0.9",), "confidence", "0.9", "batch by batch"),
        (GROUPED, ("confidence=0.9", "args.batch_eval_metrics=true"), "confidence", "0.9", "batch"),
        (GROUPED, ("recipe={own}", "slices=[sign]"), "slices", None, ""),
    ],
    ids=["slice", "gate", "kind", "argument", "metric object", "object's interval", "by batch", "own recipe"],
)
def test_what_cannot_be_measured_is_refused_by_the_run_before_it_trains_and_by_a_plan(
    fresh: Path, recipe: str, overrides: tuple[str, ...], field: str, value: str | None, words: str
) -> None:
    (fresh / "recipe.py").write_text(recipe)
    (fresh / "measured.py").write_text(OBJECT_ALONE)
    wanted = [f"evaluate.{each}".replace("{own}", str(fresh / "measured.py")) for each in overrides]
    error = run(fresh, *wanted).error
    assert isinstance(error, ConfigError), error
    assert not (fresh / "store" / "stages" / "train").exists(), "no attempt, let alone a commit"
    assert list(fresh.glob("store/stages/prepare-data/*/COMMIT.json"))
    assert error.field == f"evaluate.{field}"
    assert value is None or value in str(error.value)
    assert error.remedy
    assert words in f"{error.message} {error.remedy}"
    [obstacle] = plan_in_full(Plan.of(spec_of(fresh, *wanted))).obstacles
    assert (obstacle.field, obstacle.what) == (error.field, error.message)


def test_what_can_be_measured_trains_and_is_not_tried_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = "evaluate.metrics=[mae, r2, {name: sklearn.metrics:max_error, as: most}]"
    good = (measured, "evaluate.slices=[sign]", "publish.enabled=false")
    events: list[object] = []
    with progress.subscribe(lambda event: events.append(event.get("message")) if "warning" in event.values() else None):
        succeeded(fresh, *good)
    assert events == []
    [metrics] = fresh.glob("store/stages/evaluate/*/metrics.json")
    assert {"mae", "r2", "most", "most/sign/0", "rows/sign/1"} <= set(json.loads(metrics.read_text())["test"])
    # The model is there: another metric is measured, and nothing is tried before.
    monkeypatch.setattr("trainflow.flows.run_stages.rehearse_evaluation", None)
    again = succeeded(fresh, *good, "evaluate.metrics=[mae, bias]")
    assert "evaluate" in ran(again)
    assert "train" not in ran(again)


def test_a_trial_that_fails_by_itself_does_not_stop_the_training(fresh: Path) -> None:
    (fresh / "recipe.py").write_text(UNREADY)
    warned: list[str] = []
    with progress.subscribe(lambda event: warned.append(str(event.get("message")))):
        succeeded(fresh, "evaluate.metrics=[mae]", "train.args.max_steps=60", "publish.enabled=false")
    assert any("could not be tried before the training" in each and "not trained yet" in each for each in warned)


def test_a_storage_that_is_renamed_while_the_training_runs_ends_it_and_is_not_made_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process lives on, so the lease that it could not release has to expire.
    monkeypatch.setattr(runner, "acquire_lease", partial(acquire_lease, ttl_s=6.0))
    store, renamed = fresh / "store", fresh / "renamed"

    def rename(event: progress.Event) -> None:
        if event["event"] == "log" and not renamed.exists():
            store.rename(renamed)

    # Without MLflow: one of its calls that is under way may make its folder again. Its other calls are refused
    # (tests/unit/storage/test_storage_local.py).
    with progress.subscribe(rename):
        result = run(fresh)
    assert isinstance(result.error, StorageGoneError)
    assert not store.exists(), sorted(store.rglob("*"))
    renamed.rename(store)
    again = run(fresh)
    assert again.ok
    assert "train" in ran(again)


# -- the metric that chooses -------------------------------------------------------------------------------------------
CHOSEN = (
    "evaluate.metrics=[mae, r2]",
    "train.eval_split=test",
    "train.args.eval_strategy=steps",
    "train.args.eval_steps=4",
    "train.args.load_best_model_at_end=true",
    "train.args.metric_for_best_model=mae",
    "train.args.greater_is_better=false",
    "publish.enabled=false",
)
PACKAGES = "sklearn.metrics:median_absolute_error"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toy.project(tmp_path / "project").parent


def train_key(folder: Path, *overrides: str) -> str:
    return Plan.of(spec_of(folder, *overrides)).early_keys["train"].digest


def test_a_metric_that_chooses_is_measured_while_training_and_others_train_nothing_again(
    folder: Path, prefect_server: str
) -> None:
    run(folder, *CHOSEN).raise_for_error()
    [history] = folder.glob("store/stages/train/*/history.json")
    evaluations = [entry for entry in json.loads(history.read_text()) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [4, 8]
    assert all({"eval_mae", "eval_error"} <= set(entry) for entry in evaluations)
    assert not any("eval_r2" in entry for entry in evaluations)
    [state] = folder.glob("store/stages/train/*/checkpoints/checkpoint-8/trainer_state.json")
    assert json.loads(state.read_text())["best_metric"] == min(entry["eval_mae"] for entry in evaluations)
    again = succeeded(folder, *CHOSEN, "evaluate.metrics=[mae, bias]")
    assert {"train", "evaluate"} & ran(again) == {"evaluate"}
    assert reason(again, "evaluate").startswith("metrics")


def test_only_the_metric_that_chooses_counts_for_the_key_of_train(folder: Path) -> None:
    plain = train_key(folder)
    assert train_key(folder, "evaluate.metrics=[mae]") == plain, "it chooses nothing"
    chosen = train_key(folder, *CHOSEN)
    assert train_key(folder, *CHOSEN, "evaluate.metrics=[bias, mae]") == chosen
    assert train_key(folder, *CHOSEN, f"evaluate.metrics=[{{name: {PACKAGES}, as: mae}}]") != chosen
    own = (*CHOSEN, "train.args.metric_for_best_model=error")
    assert train_key(folder, *own) == train_key(folder, *own, "evaluate.metrics=[]"), "it is the recipe's own"


def test_a_metric_of_a_package_chooses_by_the_name_of_its_result(folder: Path) -> None:
    spec = spec_of(folder, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:])
    name = "train.args.metric_for_best_model=eval_median_absolute_error"
    found = Plan.of(spec_of(folder, f"evaluate.metrics=[{PACKAGES}]", *CHOSEN[1:], name)).context.metrics
    assert [each.name for each in found] == [PACKAGES]
    assert Plan.of(spec).context.metrics == ()  # mae is left to the recipe, which has a compute_metrics


def test_less_is_better_of_some(folder: Path) -> None:
    without = [each for each in CHOSEN if "greater_is_better" not in each]
    with pytest.raises(ConfigError, match="Less is better of mae") as caught:
        Plan.of(spec_of(folder, *without))
    assert caught.value.field == "train.args.greater_is_better"
    with pytest.raises(ConfigError, match="Less is better of error"):  # as its name says of a metric of the recipe
        Plan.of(spec_of(folder, *without, "train.args.metric_for_best_model=error"))
    assert Plan.of(spec_of(folder, *without, "train.args.metric_for_best_model=r2")).context.metrics


def test_a_metric_that_nothing_gives_is_refused_before_the_training(folder: Path) -> None:
    (folder / "recipe.py").write_text(RECIPE.partition("def compute_metrics")[0])
    wanted = (*CHOSEN, "evaluate.metrics=[r2]", "train.args.metric_for_best_model=eval_r22")
    with pytest.raises(ConfigError, match="gives the loss alone") as caught:
        Plan.of(spec_of(folder, *wanted))
    assert (caught.value.field, caught.value.value) == ("train.args.metric_for_best_model", "eval_r22")
    assert caught.value.remedy == 'Did you mean "r2"?'
    with pytest.raises(ConfigError) as caught:
        Plan.of(spec_of(folder, *wanted, "train.args.metric_for_best_model=accuracy"))
    assert "evaluate.metrics" in str(caught.value.remedy)
    plan = Plan.of(spec_of(folder, *wanted, "train.args.metric_for_best_model=loss"))
    assert not code_of(plan.spec.train, plan.context).defines("compute_metrics")
