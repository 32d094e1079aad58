"""Models that MLflow loads and serves, while their weights stay on the storage: a real server, fresh processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_proxy import answering, mlflow_server
from tests.support.mlflow_store import client
from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_line
from tests.support.tiny_models import bert, tokenizer
from trainer_lib.base.records import to_record
from trainer_lib.data.rows.column import Column
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.model_folder import loaded as loaded_models
from trainer_lib.model_folder import pyfunc
from trainer_lib.model_folder.description import FILE, Places, read_description
from trainer_lib.model_folder.locate import PIN, model_digest
from trainer_lib.storage import Store
from trainer_lib.storage.commit import content_digest
from trainer_lib.trackers.mlflow import mlflow_models
from trainer_lib.trackers.mlflow.mlflow_client import Clock, RefusedError, connect_timed
from trainer_lib.trackers.mlflow.mlflow_models import deliver_model, download_model, send_model
from trainer_lib.trackers.mlflow.mlflow_registry import Flavor, FlavorFile, ModelRecord, Registration, register


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as port:
        yield f"http://127.0.0.1:{port}"


class Line:
    """A published line, as a run would log it."""

    def __init__(self, folder: Path, *, url: str | None = None) -> None:
        publish_line(folder / "published", slope=2.0)
        described = read_description((folder / "published" / FILE).read_bytes(), FILE)
        self.weights = folder / "published" / "model.safetensors"
        where = url or str(folder / "published")
        if url is not None:
            Store.open(url).write_bytes("model.safetensors", self.weights.read_bytes())
        self.description = replace(described, places=Places(weights=where, data=where))
        self.digest = model_digest(self.description, content_digest(described.weights))
        self.files = {"code/recipe.py": folder / "published" / "code" / "recipe.py"}
        pin = json.dumps({"digest": self.digest}).encode()
        for name, content in ((FILE, self.description.to_json()), (PIN, pin)):
            (folder / name).write_bytes(content)
            self.files[name] = folder / name
        self.record = ModelRecord(name="line", digest=self.digest, step=8, columns={"x": "float64[*]"})

    def logged(self, folder: Path) -> Path:
        """Write its files as MLflow keeps them."""
        for path, file in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(file.read_bytes())
        return folder

    def register(self, uri: str, name: str) -> None:
        connected, run_id = _new_run(uri)
        model_id = send_model(connected, "0", run_id, self.record, self.files)
        register(connect_timed(uri, Clock()), model_id, run_id, Registration(name=name, digest=self.digest))


def _new_run(uri: str) -> tuple[Any, str]:
    connected = client(uri)
    return connected, str(connected.create_run("0").info.run_id)


def _environ(uri: str) -> dict[str, str]:
    return {**os.environ, "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}


def _fresh(code: str, uri: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=_environ(uri), capture_output=True, text=True, timeout=200, check=False)


LOAD = """
import mlflow
model = mlflow.pyfunc.load_model("{}")
print([round(value[0], 6) for value in model.predict([{{"x": [0.5]}}, {{"x": [-1.0]}}])["prediction"]])
print(model.predict(model.input_example).columns.tolist())
from trainer_lib import load_model
from trainer_lib.errors import ConfigError
print(load_model("models:/line@champion", trust_code=True).predict([{{"x": [0.5]}}])["prediction"][0].tolist())
try:
    load_model("models:/line@nothing", trust_code=True)
except ConfigError as refused:
    print(refused.message[:30])
"""


def test_a_model_is_logged_once_and_loaded_by_a_process_that_knows_only_the_server(uri: str, tmp_path: Path) -> None:
    line = Line(tmp_path)
    connected, run_id = _new_run(uri)
    connected.log_metric(run_id, "eval_error", 0.25, step=8)
    connected.log_metric(run_id, "eval_error", 0.5, step=4)
    [model_id] = {send_model(connected, "0", run_id, line.record, line.files) for _ in range(2)}
    logged = connected.get_logged_model(model_id)
    assert str(logged.status) == "READY"
    assert [(each.key, each.value, each.step) for each in logged.metrics] == [("eval_error", 0.25, 8)]
    assert [each.model_id for each in connected.get_run(run_id).outputs.model_outputs] == [model_id]
    assert len(connected.get_metric_history(run_id, "eval_error")) == 2

    register(connect_timed(uri, Clock()), model_id, run_id, Registration(name="line", digest=line.digest))
    done = _fresh(LOAD.format(f"models:/{model_id}"), uri)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1.0, -2.0]", "['prediction']", "[1.0]", "The registry has no such model"]


@pytest.mark.parametrize("changed", ["weights", "pin", "code"])
def test_a_model_whose_files_differ_from_those_that_were_logged_is_refused(changed: str, tmp_path: Path) -> None:
    line = Line(tmp_path)
    logged = line.logged(tmp_path / "logged")
    if changed == "weights":
        data = line.weights.read_bytes()
        line.weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif changed == "pin":
        (logged / FILE).write_bytes(replace(line.description, info={"slope": 3}).to_json())
    else:
        (logged / "code" / "recipe.py").write_bytes(b"open('executed', 'w')")
    with pytest.raises(DamagedError):
        pyfunc._load_pyfunc(str(logged))
    assert not Path("executed").exists()


@pytest.mark.parametrize("checkpoint", [None, "checkpoint-8"])
def test_a_logged_model_whose_files_were_removed_says_so(checkpoint: str | None, tmp_path: Path) -> None:
    line, stage = Line(tmp_path), tmp_path / "stage"
    places = Places(weights=f"file://{stage}/model", data=f"file://{stage}", checkpoint=checkpoint)
    logged = line.logged(tmp_path / "logged")
    (logged / FILE).write_bytes(replace(line.description, places=places).to_json())
    for load in (pyfunc._load_pyfunc, lambda path: loaded_models.load_model(path, trust_code=True)):
        with pytest.raises(DamagedError, match="The weights of this model are not in the storage any more") as gone:
            load(str(logged))
        assert "trainflow tag RUN" in str(gone.value.remedy)


def test_a_signature_takes_the_numbers_of_json_and_the_arrays_of_a_frame() -> None:
    import pandas as pd
    from mlflow.models.utils import _enforce_schema
    from mlflow.types import Schema

    kinds = {"scan": "uint8[2,2]", "x": "float32[*]", "n": "int32", "flag": "bool", "text": "string"}
    record = ModelRecord(name="m", digest="d", step=1, columns=kinds)
    described = mlflow_models._describe(record, "r", "m-1", has_example=True)
    schema = Schema.from_json(described["signature"]["inputs"])
    row = {"scan": [[1, 2], [3, 4]], "x": [0.5], "n": 7, "flag": True, "text": "a"}
    whole_numbers = {**row, "x": [1, 2]}  # as a browser sends [1.0, 2.0]
    for given in (row, whole_numbers, {name: Column.parse(kind).example() for name, kind in kinds.items()}):
        assert _enforce_schema(pd.DataFrame([given]), schema).to_dict("records")[0].keys() == kinds.keys()


def test_a_big_model_is_logged_as_fast_as_a_small_one(uri: str, tmp_path: Path) -> None:
    line = Line(tmp_path)
    connected, run_id = _new_run(uri)
    os.truncate(line.weights, 1 << 30)  # sparse: what reads it would need seconds
    before = time.process_time()
    model_id = send_model(connected, "0", run_id, line.record, line.files)
    assert time.process_time() - before < 5
    folders: tuple[list[str], ...] = ([], ["trainflow"])
    artifacts = [each for folder in folders for each in connected.list_logged_model_artifacts(model_id, *folder)]
    assert 0 < sum(each.file_size or 0 for each in artifacts) < 20_000


PREDICT = 'import mlflow; print(mlflow.pyfunc.load_model("models:/remote@champion").predict([{"x": [0.5]}]))'


def test_a_model_whose_weights_are_on_s3_is_loaded_and_served(uri: str, tmp_path: Path, s3_url: str) -> None:
    Line(tmp_path, url=f"{s3_url}/weights").register(uri, "remote")
    with _served("models:/remote@champion", uri, tmp_path) as port:
        assert _ask(port, {"x": [0.25]}) == (200, {"predictions": [{"prediction": [0.5]}]})
        assert _ask(port, {"x": [2]}) == (200, {"predictions": [{"prediction": [4.0]}]})
        status, answer = _ask(port, {"z": [0.25]})
        assert status == 400
        assert "The rows have none of the columns" in answer["message"]
        assert "Traceback" not in json.dumps(answer)
    Store.open(f"{s3_url}/weights").write_bytes("model.safetensors", b"other")
    refused = _fresh(PREDICT, uri)
    assert refused.returncode == 1
    assert "model.safetensors" in refused.stderr.splitlines()[-1]


def _ask(port: int, row: dict[str, Any]) -> tuple[int, Any]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        data=json.dumps({"dataframe_records": [row]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextlib.contextmanager
def _served(model: str, uri: str, folder: Path) -> Iterator[int]:
    # The command starts `uvicorn` by its name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**_environ(uri), "PATH": path, "TMPDIR": str(folder)}
    with answering(["models", "serve", "-m", model, "--env-manager", "local"], folder, env, "ping") as port:
        yield port


CONFIG = {
    "task": "text-classification",
    "instance_type": "Pipeline",
    "pipeline_model_type": "BertForSequenceClassification",
    "source_model_name": "texts",
    "model_binary": "model",
    "components": ["tokenizer"],
    "tokenizer_type": "AutoTokenizer",
    "code": None,
}
LOAD_FLAVOR = """
import json, mlflow, torch
parts = mlflow.transformers.load_model("models:/texts@champion", return_type="components")
with torch.no_grad():
    logits = parts["model"](**parts["tokenizer"](["a b"], return_tensors="pt")).logits.tolist()
pipeline = mlflow.transformers.load_model("models:/texts@champion")
print(json.dumps([logits, pipeline("a b")[0]["label"]]))
"""


def test_a_version_loads_by_the_flavor_of_transformers_and_only_with_the_weights_of_the_training(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = bert().eval(), tokenizer()
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "components" / "tokenizer")
    connected: Any = connect_timed(uri, Clock())
    run_id, digest = str(connected.create_run("0").info.run_id), "d" * 64
    contents = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    names = {path: str(path.relative_to(tmp_path)) for path in contents}
    files = (
        FlavorFile(names[path], str(tmp_path), names[path], len(content), hashlib.sha256(content).hexdigest())
        for path, content in contents.items()
    )
    flavor = Flavor(name="transformers", config=CONFIG, files=tuple(files))

    def deliver(kind: str, record: Any) -> None:
        deliver_model(connected, run_id, {kind: record, "files": {}}, tmp_path)

    asked = to_record(Registration(name="texts", digest=digest, flavor=flavor))
    deliver("model", to_record(ModelRecord(name="texts", digest=digest, step=1, columns={"text": "string"})))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(contents[weights][:-1] + b"x")
    with pytest.raises(RefusedError, match=r"model\.safetensors has the digest"):
        deliver("registration", asked)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match="no such model"):
        download_model("models:/texts@champion")
    weights.write_bytes(contents[weights])
    deliver("registration", asked)
    with monkeypatch.context() as patch:
        patch.setattr(type(connected._client), "log_model_artifacts", None)  # nothing may be sent
        deliver("registration", asked)  # a delivery that is repeated
    done = _fresh(LOAD_FLAVOR, uri)
    assert done.returncode == 0, done.stderr
    logits, label = json.loads(done.stdout.splitlines()[-1])
    expected = model(**words(["a b"], return_tensors="pt")).logits[0]
    assert logits[0] == pytest.approx(expected.tolist(), abs=1e-6)
    assert label == model.config.id2label[int(expected.argmax())]
