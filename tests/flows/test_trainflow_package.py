"""`import trainflow`: specs, runs and models as objects, over a storage that has one finished run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainflow
from tests.support.model_folders import remove_fetched_code
from tests.support.pages import blocks
from tests.support.runs import IN_PROCESS, broken
from tests.support.s3 import S3_AWAY
from trainer_lib.errors import CodeError, ConfigError, StorageError


@pytest.fixture(autouse=True)
def _code_is_removed() -> Iterator[None]:
    yield
    remove_fetched_code()


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

    error = run.metrics["value"]["test_error"]
    assert error > 0
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
    assert trainflow.runs(spec.storage).table["test_error"].to_dict() == {run.id: error}
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
    assert trainflow.runs(str(tmp_path / "empty")).table.empty


@pytest.mark.parametrize(
    "ask",
    [
        lambda: trainflow.Run("last", storage="s3://bucket/x"),
        lambda: trainflow.Run("s3://bucket/x/runs/c829239451964185"),
        lambda: trainflow.runs("s3://bucket/x"),
    ],
)
def test_a_storage_out_of_reach_is_one_sentence(
    ask: Callable[[], trainflow.Run | trainflow.Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in S3_AWAY.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError) as refused:
        ask()
    assert "the store does not answer (the connection is refused)" in refused.value.message
    assert refused.value.message.count(". ") == 0
    assert str(refused.value.field).startswith("s3://bucket/x")
    assert "Check the" in str(refused.value.remedy)
