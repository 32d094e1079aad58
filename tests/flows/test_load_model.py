"""A trained model is loaded from every place that a run leaves it at; `import trainflow` has specs, runs and models."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import trainflow
from tests.support.hub_server import HubServer
from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.pages import blocks
from tests.support.runs import IN_PROCESS, broken, only_folder, publication_of, ran, run, run_of, spec_of
from tests.support.s3 import S3_AWAY
from trainer_lib import LoadedModel, load_model
from trainer_lib.errors import CodeError, ConfigError, DamagedError, DataError, StorageError
from trainer_lib.model_folder.description import FILE, read_description
from trainer_lib.model_folder.locate import trust_storage
from trainflow.flows.planning.plan import Plan
from trainflow.tasks.model.portable_model import describe_model

ROWS = [{"x": [-0.5]}, {"x": [0.25]}, {"x": [1.0]}]


def _predicted(folder: Path) -> list[float]:
    parts = sorted(only_folder(folder / "store" / "stages" / "predict").rglob("*.parquet"))
    return [float(value[0]) for part in parts for value in pq.read_table(part)["prediction"].to_pylist()]


def _test_rows() -> list[dict[str, list[float]]]:
    draw, rows = random.Random(1), []
    for _ in range(16):
        rows.append({"x": [draw.uniform(-1, 1)]})
        draw.gauss(0, 1)
    return rows


def test_each_address_of_the_model_gives_the_predictions_of_the_predict_stage(folder: Path) -> None:
    store = folder / "store"
    stage = only_folder(store / "stages" / "train")
    expected = _predicted(folder)
    newest = max((stage / "checkpoints").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    for address in (only_folder(store / "runs"), stage, newest):
        loaded = load_model(str(address))
        assert isinstance(loaded, LoadedModel)
        assert not loaded.model.training
        predictions = loaded.predict(_test_rows())["prediction"]
        assert [float(value[0]) for value in predictions] == expected
        few = loaded.predict(_test_rows()[:3], batch_size=1)["prediction"]
        assert np.allclose([float(value[0]) for value in few], expected[:3], rtol=1e-6)


def test_a_publication_stands_alone_and_its_code_runs_only_when_trusted(folder: Path, tmp_path: Path) -> None:
    expected = _predicted(folder)
    published = tmp_path / "elsewhere"
    shutil.copytree(publication_of(folder), published)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="not trusted") as refused:
        load_model(str(published))
    assert refused.value.field == "trust_code"
    digest = str(refused.value.remedy).split('"')[1]
    assert digest in (published / "README.md").read_text()
    with pytest.raises(ConfigError, match="other code"):
        load_model(str(published), trust_code="0" * 64)
    for trust in (digest, True):
        loaded = load_model(str(published), trust_code=trust)
        assert [float(value[0]) for value in loaded.predict(_test_rows())["prediction"]] == expected


@pytest.mark.parametrize("damaged", ["code/recipe.py", "model.safetensors"])
def test_nothing_that_differs_is_executed_or_loaded(folder: Path, tmp_path: Path, damaged: str) -> None:
    published = tmp_path / "elsewhere"
    shutil.copytree(publication_of(folder), published)
    path = published / damaged
    (tmp_path / "executed").unlink(missing_ok=True)
    data = path.read_bytes()
    path.write_bytes(data + b"\nopen(%r, 'w')\n" % str(tmp_path / "executed") if damaged.endswith(".py") else data[:-1])
    with pytest.raises(DamagedError) as refused:
        load_model(str(published), trust_code=True)
    assert refused.value.value == damaged.removeprefix("code/")
    assert not (tmp_path / "executed").exists()


def test_what_is_no_model_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    store = folder / "store"
    with pytest.raises(ConfigError, match="This is the result of evaluate"):
        load_model(str(only_folder(store / "stages" / "evaluate")))
    with pytest.raises(ConfigError, match=r"There is no model") as nothing:
        load_model(str(tmp_path))
    assert "runs/<run>" in str(nothing.value.remedy)
    run = only_folder(store / "runs")
    text = (run / FILE).read_text()
    (run / FILE).write_text(json.dumps({**json.loads(text), "format": 2}))
    with pytest.raises(ConfigError, match="format 2"):
        load_model(str(run))
    (run / FILE).write_text(text[:-20])
    with pytest.raises(DamagedError, match="is not JSON"):
        load_model(str(run))
    (run / FILE).write_text(json.dumps({**json.loads(text), "recipe": "../../recipe.py"}))
    with pytest.raises(DamagedError, match="path"):
        load_model(str(run))
    (run / FILE).unlink()
    with pytest.raises(ConfigError, match="No run on this storage"):
        load_model(str(only_folder(store / "stages" / "train")))


def test_rows_that_the_model_cannot_take_are_refused_with_row_and_column(folder: Path) -> None:
    loaded = load_model(str(run_of(folder)))
    for rows, words in (
        ([], "no rows"),
        ([{"label": [1.0]}], "the nearest is 'labels'"),
        ([{"x": [1.0]}, {}], "Row 1, column 'x': the column is missing"),
        ([{"x": "1.0"}], "the value is not float64"),
        ([{"x": 1.0}], "one dimension"),
        ([3], "not a mapping"),
    ):
        with pytest.raises(DataError, match=words):
            loaded.predict(rows)  # type: ignore[arg-type]


def test_the_code_on_the_card_runs_as_it_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (folder / "store" / "hub" / "toy" / "README.md").read_text()
    monkeypatch.chdir(publication_of(folder))
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0], names)
    assert list(names["model"].predict([{"x": [0.25]}])) == ["prediction"]


def test_a_changed_prediction_column_is_published_and_the_model_is_kept(folder: Path) -> None:
    broken(
        folder,
        "def compute_metrics(p):",
        "def prediction_columns(p, data):\n    return {'y': p[:, 0]}\n\n\ndef compute_metrics(p):",
    )
    assert ran(run(folder)) == {"predict", "push-to-hub"}
    revisions = sorted((only_folder(folder / "store" / "hub") / "revisions").iterdir())
    assert len(revisions) == 2
    assert list(load_model(str(revisions[-1]), trust_code=True).predict(ROWS)) == ["y"]


def test_a_model_on_the_hub_is_downloaded(
    folder: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = _predicted(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert ran(run(folder, "publish.to=hf://org/toy")) == {"push-to-hub"}
    files = hub.repos["org/toy"].commits[-1].files
    digest = read_description(files[FILE].data, FILE).code_digest
    assert f'load_model("hf://org/toy", trust_code="{digest}")' in files["README.md"].data.decode()
    loaded = load_model("hf://org/toy", trust_code=digest)
    assert [float(value[0]) for value in loaded.predict(_test_rows())["prediction"]] == expected
    with pytest.raises(ConfigError, match=r"refuses the download \(404\)"):
        load_model("hf://org/nothing", trust_code=True)


def test_a_run_of_a_storage_on_which_the_user_never_ran_is_asked_about(folder: Path, tmp_path: Path) -> None:
    strangers = shutil.copytree(folder / "store", tmp_path / "strangers")
    places = ("runs/*", "stages/train/*", "stages/train/*/checkpoints/*-8")
    models = [str(model) for place in places for model in strangers.glob(place)]
    assert len(models) == 3
    for model in models:
        with pytest.raises(ConfigError, match="not trusted") as refused:
            load_model(model)
        [digest] = re.findall("[0-9a-f]{64}", refused.value.message)
        assert load_model(model, trust_code=digest).predict(ROWS)
    trust_storage(str(strangers))
    for model in models:
        assert load_model(model).predict(ROWS)


def test_a_file_in_a_publication_does_not_make_its_code_trusted(folder: Path, tmp_path: Path) -> None:
    revision = publication_of(folder)
    run = run_of(folder)
    for number, place in enumerate(("elsewhere", "runs/stolen")):
        published = tmp_path / str(number) / place
        shutil.copytree(revision, published)
        shutil.copy(run / "run.json", published)
        with pytest.raises(ConfigError, match="not trusted"):
            load_model(str(published))
    # A run's own description, away from its storage: it leads to no committed stage.
    alone = tmp_path / "runs" / "alone"
    shutil.copytree(run, alone)
    with pytest.raises(ConfigError, match="not trusted"):
        load_model(str(alone))


def test_what_a_digest_trusts_is_all_that_decides_what_is_executed(folder: Path) -> None:
    record = json.loads((publication_of(folder) / FILE).read_text())

    def digest(**changed: object) -> str:
        return read_description(json.dumps(record | changed).encode(), FILE).code_digest

    assert digest(name="other", info={"slope": 3}) == digest()
    changes = {"fallback": "recipe.py", "paths": [".", "src"], "model": {"backbone": "x"}, "options": {"a": 1}}
    for name, value in changes.items():
        assert digest(**{name: value}) != digest(), name


def test_loading_and_predicting_leave_the_callers_process_as_it_is(folder: Path) -> None:
    def draw() -> tuple[float, float]:
        return torch.rand(1).item(), random.random()

    torch.manual_seed(3)
    random.seed(3)
    expected = draw()
    torch.manual_seed(3)
    random.seed(3)
    loaded = load_model(str(run_of(folder)))
    usual = loaded._args.per_device_eval_batch_size
    loaded.predict(ROWS, batch_size=1)
    assert draw() == expected
    assert loaded._args.per_device_eval_batch_size == usual


def test_a_model_whose_code_was_edited_since_its_training_is_not_described(folder: Path) -> None:
    plan = Plan.of(spec_of(folder))
    data, model = plan.reasons["prepare-data"].manifest, plan.reasons["train"].manifest
    assert data is not None and model is not None
    config = plan.stages["push-to-hub"].config
    describe_model(config, plan.context, data, model)
    broken(folder, "y = self.linear(x)", "y = 2 * self.linear(x.float())")
    with pytest.raises(CodeError, match="build_model"):
        describe_model(config, plan.context, data, model)


def test_statements_that_a_recipe_runs_when_it_is_imported_are_published_with_the_model(folder: Path) -> None:
    (folder / "numbers_of_mine.py").write_text("WIDTH = 1\n")
    checked = "import logging\n\nimport numbers_of_mine\n\nlogging.captureWarnings(numbers_of_mine.WIDTH == 2)\n\n\n"
    broken(folder, "def compute_metrics(p):", f"{checked}def compute_metrics(p):")
    assert "train" in ran(run(folder))
    [newest] = (folder / "store" / "hub" / "toy" / "revisions").glob("00002-*")
    assert (newest / "code" / "numbers_of_mine.py").is_file()
    plan = Plan.of(spec_of(folder))
    data, model = plan.reasons["prepare-data"].manifest, plan.reasons["train"].manifest
    assert data is not None and model is not None
    broken(folder, "WIDTH == 2", "WIDTH != 2")
    with pytest.raises(CodeError, match="statement"):
        describe_model(plan.stages["push-to-hub"].config, plan.context, data, model)


def test_code_with_a_token_is_not_published_and_code_can_stay_at_home(folder: Path, tmp_path: Path) -> None:
    assert ran(run(folder, "publish.code=false", f"publish.to={tmp_path / 'bare'}")) == {"push-to-hub"}
    bare = only_folder(tmp_path / "bare" / "revisions")
    assert not (bare / "code").exists()
    assert "load_model" not in (bare / "README.md").read_text()
    token = "hf_" + "a" * 30
    broken(folder, "def compute_metrics(p):", f"TOKEN = '{token}'\n\n\ndef compute_metrics(p):")
    result = run(folder, f"publish.to={tmp_path / 'whole'}")
    assert isinstance(result.error, ConfigError)
    assert result.error.field == "publish.code"
    assert "recipe.py:" in str(result.error.value)
    assert token not in str(result.error)
    assert not (tmp_path / "whole").exists()


# -- import trainflow -------------------------------------------------------------------------------------------------
def loaded(folder: Path, *overrides: str) -> trainflow.Spec:
    return trainflow.Spec.load(folder / "pipeline.yaml", *IN_PROCESS, "tracking.enabled=true", *overrides)


def test_a_finished_run_is_found_and_read(folder: Path) -> None:
    spec = loaded(folder)
    assert spec.why()["hit"].all()
    planned = spec.plan()
    assert (planned["ok"], planned["length"]["steps"]) == (True, 8)
    assert [stage["hit"] for stage in planned["stages"]] == [True] * 5
    [run] = trainflow.runs(spec)
    assert run == trainflow.Run("last", storage=spec.storage) == trainflow.Run(run.url)
    assert (run.status, list(run.stages["state"])) == ("finished", ["ran"] * 5)
    assert run.stages["committed"].notna().all()

    assert run.metrics["value"]["test_error"] > 0
    assert list(run.history["loss"].dropna().index) == [2, 4, 6, 8]
    assert list(run.predictions()["row_id"]) == list(range(16))
    model = run.load_model()
    assert float(model.predict([{"x": [0.5]}])["prediction"][0][0]) == pytest.approx(_line(model.model))
    trained = run.details().stage("train")
    assert trained is not None
    assert (link := run.lineage.lineage.stage("train")) is not None
    assert link.key == trained.key
    assert run.mlflow_run_id

    assert trainflow.Run(run.id, storage=spec) == run
    assert trainflow.runs(spec.storage) == [run]
    assert "sandbox" in (run._repr_html_() or "")
    assert repr(run) == f"Run('{run.id}', name='{run.name}', status='finished')"


def _line(model: Any) -> float:
    return float(0.5 * model.linear.weight.item() + model.linear.bias.item())


def test_a_spec_runs_goes_on_and_begins_in_the_middle(folder: Path, prefect_server: str) -> None:
    assert loaded(folder).run().stages["state"].eq("ran").all(), "as it was recorded: nothing ran again"

    broken(folder, 'return {"error"', 'raise ValueError("not today")\n    return {"error"')
    with pytest.raises(CodeError, match="not today"):
        loaded(folder).run(progress=False)
    [failed, _] = trainflow.runs(loaded(folder).storage)
    assert failed.status == "failed"
    broken(folder, 'raise ValueError("not today")\n', "")

    async def cell() -> trainflow.Run:
        return failed.resume(progress=False)

    mended = asyncio.run(cell())
    assert mended.status == "finished"
    with pytest.raises(ConfigError, match="has finished"):
        mended.resume()
    again = mended.resume("predict", progress=False)
    assert list(again.predictions()["row_id"]) == list(mended.predictions()["row_id"])


def test_the_snippets_of_the_readme_and_the_page_do_what_they_say(
    folder: Path, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, page = (
        [block.text for block in blocks(name) if block.language == "python" and "trainflow" in block.text]
        for name in ("../README.md", "python.md")
    )
    [sweep] = [text for text in page if ".sweep()" in text]
    page.remove(sweep)  # tests/flows/test_sweep.py runs it
    assert (len(readme), len(page)) == (1, 3)
    spec = ", ".join(repr(each) for each in (str(folder / "pipeline.yaml"), *IN_PROCESS, "tracking.enabled=true"))
    read_as = {
        '"examples/digits/pipeline.yaml", "train.args.learning_rate=1e-3"': spec,
        '"examples/digits/pipeline.yaml"': spec,
        "examples/digits/../../.trainflow": str(folder / "store"),
        "s3://bucket/store": str(folder / "store"),
        "test_accuracy": "test_error",
        '{"image": image}': '{"x": [0.5]}',
        ".plot()": ".plot",  # it imports matplotlib for a second
        "run.resume()  # one that did not finish, with its own spec\n": "",  # this one has finished
    }
    for snippet in (*readme, *page):
        for shown, here in read_as.items():
            snippet = snippet.replace(shown, here)
        exec(snippet, {"trainflow": trainflow})
    assert "test_error" in capsys.readouterr().out


def test_bad_input_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loaded(folder)
    with pytest.raises(ConfigError, match="learning_rat"):
        loaded(folder, "train.args.learning_rat=1")
    with pytest.raises(ConfigError, match="No run with this id"):
        trainflow.Run("beef", storage=spec.storage)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="No storage was named"):
        trainflow.runs()
    with pytest.raises(ConfigError, match="neither a folder nor a URL nor a Spec"):
        trainflow.runs(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        spec.run(start="evalute")
    assert "evaluate" in str(refused.value)
    assert trainflow.runs(str(tmp_path / "empty")) == []


def test_a_storage_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_AWAY.items():
        monkeypatch.setenv(name, value)
    asked: tuple[Callable[[], object], ...] = (
        lambda: trainflow.Run("last", storage="s3://bucket/x"),
        lambda: trainflow.Run("s3://bucket/x/runs/c829239451964185"),
        lambda: trainflow.runs("s3://bucket/x"),
    )
    for number, ask in enumerate(asked):
        with pytest.raises(StorageError) as refused:
            ask()
        assert "the store does not answer (Connection refused)" in refused.value.message, number
        assert refused.value.message.count(". ") == 0, number
        assert str(refused.value.field).startswith("s3://bucket/x"), number
        assert "Check the" in str(refused.value.remedy), number
