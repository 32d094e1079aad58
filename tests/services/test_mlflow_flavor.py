"""A version that MLflow loads by its flavor of transformers: a real server, a fresh process, nothing unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_proxy import mlflow_server
from tests.support.tiny_models import bert, tokenizer
from trainer_lib.errors import ConfigError
from trainer_lib.records import to_record
from trainer_lib.trackers.mlflow_client import RefusedError, connect_timed
from trainer_lib.trackers.mlflow_models import deliver_model, download_model
from trainer_lib.trackers.mlflow_registry import Registration
from trainer_lib.trackers.model_record import Flavor, FlavorFile, ModelRecord
from trainer_lib.trackers.shipper import Clock

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
LOAD = """
import json, mlflow, torch
parts = mlflow.transformers.load_model("models:/texts@champion", return_type="components")
with torch.no_grad():
    logits = parts["model"](**parts["tokenizer"](["a b"], return_tensors="pt")).logits.tolist()
pipeline = mlflow.transformers.load_model("models:/texts@champion")
outputs = mlflow.models.get_model_info("models:/texts@champion").signature.outputs
print(json.dumps([logits, pipeline("a b")[0]["label"], outputs.to_dict()]))
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as port:
        yield f"http://127.0.0.1:{port}"


class Texts:
    """A tiny model at random with a tokenizer, as training commits it, and the run that logs it."""

    def __init__(self, uri: str, folder: Path, name: str) -> None:
        self.model, self.tokenizer = bert().eval(), tokenizer()
        self.model.save_pretrained(folder / "model")
        self.tokenizer.save_pretrained(folder / "components" / "tokenizer")
        self.client: Any = connect_timed(uri, Clock())
        self.run_id = str(self.client.create_run("0").info.run_id)
        self.digest = hashlib.sha256(name.encode()).hexdigest()
        self.name, self.folder = name, folder
        record = ModelRecord(name=name, digest=self.digest, step=1, columns={"text": "string"})
        self.deliver({"model": to_record(record), "files": {}})

    def flavor(self) -> Flavor:
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return Flavor(name="transformers", config=CONFIG, files=tuple(self._describe(path) for path in files))

    def _describe(self, path: Path) -> FlavorFile:
        content, name = path.read_bytes(), str(path.relative_to(self.folder))
        return FlavorFile(name, str(self.folder), name, len(content), hashlib.sha256(content).hexdigest())

    def register(self, flavor: Flavor) -> None:
        asked = Registration(name=self.name, digest=self.digest, flavor=flavor)
        self.deliver({"registration": to_record(asked), "files": {}})

    def deliver(self, record: dict[str, Any]) -> None:
        deliver_model(self.client, self.run_id, record, self.folder)


def test_a_version_loads_by_the_flavor_of_transformers(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(uri, tmp_path, "texts")
    texts.register(texts.flavor())
    texts.deliver({"outputs": {"digest": texts.digest, "columns": {"label": "string", "scores": "float64[*]"}}})
    with monkeypatch.context() as patch:
        patch.setattr(type(texts.client._client), "log_model_artifacts", None)  # nothing may be sent
        texts.register(texts.flavor())  # a delivery that is repeated
    env = {**os.environ, "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    logits, label, outputs = json.loads(done.stdout.splitlines()[-1])
    expected = texts.model(**texts.tokenizer(["a b"], return_tensors="pt")).logits[0]
    assert logits[0] == pytest.approx(expected.tolist(), abs=1e-6)
    assert label == texts.model.config.id2label[int(expected.argmax())]
    assert outputs == [
        {"name": "label", "type": "string", "required": True},
        {"name": "scores", "type": "array", "items": {"type": "double"}, "required": True},
    ]


def test_weights_that_are_not_those_of_the_training_make_no_version(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(uri, tmp_path, "changed")
    flavor = texts.flavor()
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(RefusedError, match=r"model\.safetensors has the digest"):
        texts.register(flavor)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match="no such model"):
        download_model("models:/changed@champion")
