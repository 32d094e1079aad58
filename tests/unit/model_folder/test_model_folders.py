"""Published folders: lineage.json, what MLflow's pyfunc takes, and models that cannot be loaded."""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_line, publish_recipe
from tests.support.toy import RECIPE
from trainer_lib import load_model
from trainer_lib.errors import ConfigError, DamagedError, StoreUnreachableError
from trainer_lib.model_folder.description import FILE, Places, read_description
from trainer_lib.model_folder.lineage import (
    CheckpointLink,
    Lineage,
    PublicationLink,
    SourceLink,
    StageLink,
    read_lineage,
)
from trainer_lib.model_folder.locate import PIN, model_digest
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.storage import FileEntry
from trainer_lib.storage.commit import content_digest
from trainer_lib.trackers.mlflow import mlflow_models
from trainer_lib.trackers.mlflow.mlflow_registry import ModelRecord

A, B, C = "a" * 64, "b" * 64, "c" * 64
LINEAGE = Lineage(
    name="digits",
    sources=(SourceLink(source="package:scikit-learn", digest=A),),
    stages=(
        StageLink(stage="prepare-data", key=A, content_digest=B),
        StageLink(stage="train", key=B, content_digest=C, inputs={"prepare-data": B}),
    ),
    checkpoints=(CheckpointLink(name="checkpoint-8", step=8, content_digest=C),),
    exported="checkpoint-8",
    tracked_run="f35beed5",
    arguments={"learning_rate": 0.1},
    versions={"python": "3.11.9", "torch": "2.13.0", "processor": "one"},
    publication=PublicationLink(revision="00001-abc", content_digest=A),
    files=(FileEntry("model.safetensors", 184, B),),
)
MISSING = "import no_such_package_at_all"


def _sealed(**changed: Any) -> bytes:
    """A file with other fields and a seal that fits: what a hostile writer makes."""
    record = {**json.loads(LINEAGE.to_json()), **changed}
    record.pop("seal")
    seal = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "seal": seal}).encode()


def test_it_is_read_as_it_was_written_and_a_changed_byte_is_noticed_wherever_it_is() -> None:
    data = LINEAGE.to_json()
    assert read_lineage(data, "x") == read_lineage(_sealed(newer=[1]), "x") == LINEAGE
    refused = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            # Spaces between the fields carry nothing.
            assert read_lineage(bytes(changed), "x") == LINEAGE, position
        except (ConfigError, DamagedError):
            refused += 1
    assert refused > 0.9 * len(data.replace(b" ", b""))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"files": [{"path": "../../etc/passwd", "size": 1, "sha256": A}]}, r"an empty part, '\.' or '\.\.'"),
        ({"files": [{"path": "/etc/passwd", "size": 1, "sha256": A}]}, "is absolute"),
        ({"files": [{"path": "a", "size": "1", "sha256": A}]}, "another form"),
        ({"files": [{"path": "a", "size": 1, "sha256": "short"}]}, "not a SHA-256"),
        ({"stages": [{"stage": "../train", "key": A}]}, "not a name"),
        ({"stages": [{"stage": "train", "key": "http://elsewhere"}]}, "not a SHA-256"),
        ({"stages": [{"stage": "train", "key": A}, {"stage": "train", "key": B}]}, "twice"),
        ({"stages": "train"}, "another form"),
        ({"checkpoints": [{"name": "../../x", "step": 1, "content_digest": A}]}, "not one"),
        ({"run": "../../elsewhere"}, "not a name"),
        ({"publication": {"revision": "http://elsewhere/x", "content_digest": A}}, "not a name"),
        ({"name": None}, "another form"),
        *((data, "The lineage") for data in (b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"NaN", b"{}")),
    ],
)
def test_a_hostile_one_and_what_is_no_lineage_are_bad_input(changed: dict[str, Any] | bytes, words: str) -> None:
    data = changed if isinstance(changed, bytes) else _sealed(**changed)
    with pytest.raises(ConfigError, match=words) as refused:
        read_lineage(data, "s3://bucket/lineage.json")
    assert (refused.value.field, refused.value.exit_code) == ("s3://bucket/lineage.json", 2)
    assert refused.value.remedy


def test_no_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-v4lue")
    token = "hf_" + "a" * 30
    lineage = replace(
        LINEAGE,
        sources=(SourceLink(source=f"https://user:pass1234@host/x?sig={token}", digest=A),),
        arguments={"hub_token": "abcdefgh", "note": f"{token} and s3cr3t-v4lue"},
    )
    for secret in (b"pass1234", token.encode(), b"abcdefgh", b"s3cr3t-v4lue"):
        assert secret not in lineage.to_json()
    read_lineage(lineage.to_json(), "x")


COLLATE = """
def collate(rows):
    import numpy
    import torch

    return {"x": torch.tensor([[float(numpy.sum(row["x"])) + float(row.get("n", 0))] for row in rows])}
"""
CSV = "size,colour,answer\n" + "".join(
    f"{row},{'red' if row % 3 else ''},{'no' if row % 2 else 'yes'}\n" for row in range(40)
)


def _load(published: Path, folder: Path, columns: dict[str, str]) -> Any:
    """The model of a published folder as MLflow loads it."""
    with warnings.catch_warnings(action="ignore"):  # MLflow's own, of its import
        import mlflow.pyfunc as loader

    description = read_description((published / FILE).read_bytes(), FILE)
    description = replace(description, places=Places(weights=str(published), data=str(published)))
    description = replace(description, columns={**description.columns, **columns})
    digest = model_digest(description, content_digest(description.weights))
    files = {"code/recipe.py": published / "code" / "recipe.py"}
    for name, content in ((FILE, description.to_json()), (PIN, json.dumps({"digest": digest}).encode())):
        files[name] = published / f"logged-{name}"
        files[name].write_bytes(content)
    form = TableForm.of(description.info)
    required = () if form is None else tuple(form.columns)
    record = ModelRecord(name="m", digest=digest, step=1, columns=columns, required=required)
    folder.mkdir()
    mlflow_models._write_folder(folder, record, files, "r", "m-1")
    return loader.load_model(str(folder))


@pytest.mark.parametrize("kind", ["float32[2,2]", "float32[*]", "uint8[4]", "float64"])
def test_arrays_of_a_batch_are_rows(kind: str, tmp_path: Path) -> None:
    from tests.support.toy import RECIPE

    publish_line(tmp_path / "line", recipe=RECIPE + COLLATE)
    shape = {"float32[2,2]": (2, 2), "float32[*]": (3,), "uint8[4]": (4,), "float64": ()}[kind]
    model = _load(tmp_path / "line", tmp_path / "logged", {"x": kind, "n": "float64"})
    assert model.metadata.metadata == {"columns": {"x": kind, "n": "float64"}}
    x = np.arange(5 * math.prod(shape), dtype=kind.partition("[")[0]).reshape(5, *shape)
    n = np.arange(5)
    rows = [{"x": each.tolist(), "n": int(number)} for each, number in zip(x, n, strict=True)]
    expected = 2 * (x.reshape(5, -1).sum(axis=1) + n.astype(float))
    for given in (
        rows,
        pd.DataFrame(rows),
        {"x": x, "n": n},
        {"x": x.tolist(), "n": n.tolist()},
        pd.DataFrame({"x": list(x), "n": n}),
    ):
        assert [value[0] for value in model.predict(given)["prediction"]] == pytest.approx(expected)
    assert len(model.predict({"x": x[:1], "n": n[:1]})) == 1
    with pytest.raises(Exception, match=r"different numbers of rows|All arrays must be of the same length"):
        model.predict({"x": x, "n": n[:3]})


def test_a_table_of_pandas_is_taken_with_whole_numbers_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    options = {"label": "answer", "missing": "mean", "categorical": ["colour"]}
    publish_recipe(tmp_path / "m", "tabular-classification", tmp_path / "train.csv", options, {"hidden": [4]})
    model = _load(tmp_path / "m", tmp_path / "logged", {"size": "float64", "colour": "string"})
    frame = pd.read_csv(io.StringIO(CSV))
    assert frame["size"].dtype == np.int64
    whole = model.predict(frame)["confidence"].tolist()
    assert len(whole) == 40
    gaps = {"size": [1.0, None, 3], "colour": [None, "red", 5]}
    found = [
        model.predict(given)["confidence"].tolist()
        for given in (
            gaps,
            pd.DataFrame(gaps),
            pd.DataFrame(gaps).convert_dtypes(),
            [dict(zip(gaps, row, strict=True)) for row in zip(*gaps.values(), strict=True)],
            pd.DataFrame({"size": [1, math.nan, 3], "colour": [math.nan, "red", "5"]}),
        )
    ]
    assert all(values == pytest.approx(found[0]) for values in found)
    assert model.predict(frame.iloc[[0]])["confidence"].tolist() == pytest.approx(whole[:1])
    with pytest.raises(Exception, match="missing inputs"):
        model.predict(frame[["size"]])
    with pytest.raises(Exception, match="Row 0, column 'size': 'big' is not a number"):
        model.predict([{"size": "big", "colour": "red"}])


def test_a_list_of_texts_is_as_many_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 20)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options, config = {"text": "text", "label": "label"}, {"config": {"model_type": "bert", **shape}}
    publish_recipe(tmp_path / "m", "text-classification", tmp_path / "train.csv", options, config)
    model = _load(tmp_path / "m", tmp_path / "logged", {"text": "string"})
    texts = {"text": ["good", "bad"]}
    for given in (texts, pd.DataFrame(texts), [{"text": "good"}, {"text": "bad"}]):
        assert len(model.predict(given)) == 2


def test_a_copy_of_a_recipe_by_name_gives_way_to_the_installed_one(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    options = {"label": "answer", "missing": "mean", "categorical": ["colour"]}
    publish_recipe(tmp_path / "m", "tabular-classification", tmp_path / "train.csv", options, {"hidden": [4]})
    copy, content = "(trainflow)/tabular_classification.py", b"from trainer_lib.recipes.of_another_version import *\n"
    (tmp_path / "m" / "code" / copy).parent.mkdir()
    (tmp_path / "m" / "code" / copy).write_bytes(content)
    description = read_description((tmp_path / "m" / FILE).read_bytes(), FILE)
    entry = FileEntry(copy, len(content), hashlib.sha256(content).hexdigest())
    changed = replace(description, recipe=copy, code=(entry,), paths=(".", "(trainflow)"))
    (tmp_path / "m" / FILE).write_bytes(changed.to_json())
    rows = [{"size": 3, "colour": "red"}]
    assert load_model(str(tmp_path / "m"), trust_code=changed.code_digest).predict(rows)["prediction"][0] in (
        "yes",
        "no",
    )


@pytest.mark.parametrize(
    "recipe",
    [f"{MISSING}\n{RECIPE}", RECIPE.replace("    import torch\n", f"    import torch\n    {MISSING}\n", 1)],
    ids=["of the file", "of build_model"],
)
def test_a_package_that_is_missing_is_named(tmp_path: Path, recipe: str) -> None:
    publish_line(tmp_path, recipe=recipe)
    words = r"needs the package no_such_package_at_all, which is not installed.*Install it\."
    with pytest.raises(ConfigError, match=words):
        load_model(str(tmp_path), trust_code=True)


def test_a_registry_that_is_down_is_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError) as refused:
        load_model("models:/line@champion")
    assert refused.value.message == "The registry does not answer: Connection refused."
    assert "MLFLOW_TRACKING_URI" in str(refused.value.remedy)
