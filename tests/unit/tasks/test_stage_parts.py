"""Parts of stages: links to Prefect, samples of the machine, names of failures, shared evaluations, flavors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.model_folder.description import ModelDescription
from trainer_lib.protocol.requests import PrepareRequest
from trainer_lib.storage import FileEntry
from trainer_lib.trackers.mlflow.mlflow_registry import Flavor
from trainflow.flows.reports.run_tracking import SystemLoad, parse_gpus
from trainflow.tasks import runners
from trainflow.tasks.configs import LaunchSettings
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.model.logged_models import describe_flavor
from trainflow.tasks.prefect import prefect_client
from trainflow.tasks.prefect.prefect_client import RunLink, _tls_context, quick_client, wait_for_drawings
from trainflow.tasks.prefect.prefect_internals import settings_for_every_thread, without_retries
from trainflow.tasks.stage import worker
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest

CONTEXT = StageContext(name="names", recipe="recipe.py", storage="memory://names")
BERT = {"config.json": json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}).encode()}


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server of Prefect that accepts connections and says nothing."""
    from prefect.settings import PREFECT_API_URL

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}/api"
        with settings_for_every_thread({PREFECT_API_URL: url}):
            yield hanging


def test_an_api_on_loopback_is_refused_where_other_machines_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "PREFECT_API_URL", SimpleNamespace(value=lambda: "http://127.0.0.1:4200/api"))
    runners.require_api([])
    with pytest.raises(ConfigError, match="cannot be reached from node7"):
        runners.require_api(["node7"])


def test_a_server_that_hangs_holds_nothing_up(server: socket.socket) -> None:
    began = time.monotonic()
    link = RunLink("train", uuid.uuid4(), uuid.uuid4())
    link.draw(50.0, "step 1/2")
    assert not link.is_cancelled()
    asked = time.monotonic() - began
    link.close()
    closed = time.monotonic() - began
    wait_for_drawings()
    took = time.monotonic() - began
    link._thread.join(30)
    assert max(asked, closed) < 0.5, "the next stage begins while the last one is drawn"
    assert took < 2.0
    assert not link._thread.is_alive(), "it gives up by itself"


def test_a_stage_that_ends_at_once_asks_nothing_but_shows_what_it_drew(server: socket.socket) -> None:
    server.settimeout(0.5)
    RunLink("train", uuid.uuid4(), uuid.uuid4()).close()
    with pytest.raises(TimeoutError):
        server.accept()
    server.settimeout(10)
    link = RunLink("train", uuid.uuid4(), uuid.uuid4())
    link.draw(100.0, "step 2/2")
    link.close()
    server.accept()[0].close()
    wait_for_drawings()
    link._thread.join(30)
    assert not link._thread.is_alive()


def test_what_is_drawn_during_the_last_exchange_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, closed, shown = threading.Event(), threading.Event(), []
    never_cancelled = SimpleNamespace(read_flow_run=lambda flow_run_id: SimpleNamespace(state=None))

    def draw(link: RunLink, client: object, share: float, text: str) -> None:
        shown.append(share)
        drawing.set()
        closed.wait(10)

    monkeypatch.setattr(RunLink, "_draw", draw)
    monkeypatch.setattr(prefect_client, "FIRST_S", 0.0)
    monkeypatch.setattr(prefect_client, "EVERY_S", 0.02)
    monkeypatch.setattr(prefect_client, "quick_client", lambda: contextlib.nullcontext(never_cancelled))
    link = RunLink("predict", uuid.uuid4(), uuid.uuid4())
    link.draw(2.2, "step 1/45")
    assert drawing.wait(10)
    link.draw(100.0, "committed")
    link.close()
    closed.set()
    wait_for_drawings()
    assert shown == [2.2, 100.0]


def test_requests_are_sent_once_under_the_settings_of_the_moment() -> None:
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    for url in ("http://127.0.0.1:1/api", "http://127.0.0.1:2/api"):
        with temporary_settings({PREFECT_API_URL: url}):
            with without_retries():
                first = get_current_settings()
                assert (first.api.url, first.client.max_retries) == (url, 0)
            assert get_current_settings().client.max_retries > 0
            with without_retries():
                assert get_current_settings() is first, "made once: it takes a tenth of a second"


def test_certificates_are_read_once_for_settings_that_are_equal() -> None:
    from prefect.settings import PREFECT_API_TLS_INSECURE_SKIP_VERIFY, PREFECT_API_URL, temporary_settings

    def checks_hosts() -> bool:
        with quick_client() as client:
            transport: Any = client._client._transport
            return bool(transport._pool._ssl_context.check_hostname)

    with temporary_settings({PREFECT_API_URL: "https://127.0.0.1:1/api"}):
        first = _tls_context()
        assert _tls_context() is first, "it takes 30 ms"
        assert checks_hosts()
        with temporary_settings({PREFECT_API_TLS_INSECURE_SKIP_VERIFY: True}):
            assert not checks_hosts()


def test_samples_come_with_seconds_since_the_run_began_until_they_are_closed(tmp_path: Path) -> None:
    samples: list[tuple[Mapping[str, float], int]] = []
    came = threading.Event()

    def log(values: Mapping[str, float], step: int) -> None:
        samples.append((values, step))
        came.set()

    load = SystemLoad(log, since_s=time.time() - 100, folder=tmp_path, every_s=0.05)
    assert came.wait(20)
    load.close()
    count = len(samples)
    values, step = samples[0]
    assert 100 <= step < 130
    assert 0 <= values["system/cpu_utilization_percentage"] <= 100
    assert 0 < values["system/process_memory_megabytes"] < values["system/system_memory_usage_megabytes"] * 1.1
    assert 0 < values["system/disk_usage_percentage"] <= 100
    time.sleep(0.15)
    assert len(samples) == count


def test_a_log_that_raises_ends_the_sampling_and_nothing_else() -> None:
    calls: list[int] = []

    def log(values: object, step: int) -> None:
        calls.append(step)
        raise OSError("disk full")

    load = SystemLoad(log, since_s=time.time(), every_s=0.01)
    load._thread.join(20)
    assert not load._thread.is_alive()
    load.close()
    assert len(calls) == 1


def test_gpus_are_read_as_their_driver_reports_them() -> None:
    assert parse_gpus("0, 97, 1024, 312.50\n1, [N/A], 0, [N/A]\n") == {
        "system/gpu_0_utilization_percentage": 97.0,
        "system/gpu_0_memory_usage_megabytes": 1073.741824,
        "system/gpu_0_power_usage_watts": 312.5,
        "system/gpu_1_memory_usage_megabytes": 0.0,
    }
    assert parse_gpus("") == {}


def test_a_failure_while_a_stage_runs_names_that_stages_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> None:
        raise InfrastructureError(
            "There was no progress.", field="train.launch.timeout_s", remedy="Raise train.launch.timeout_s."
        )

    monkeypatch.setattr(worker, "launch", hang)
    attempt: Any = SimpleNamespace(
        progress=SimpleNamespace(line=lambda line: None, event=lambda event: None, is_cancelled=lambda: False),
        is_lost=lambda: False,
    )
    settings = LaunchSettings(kind="process", processes=1)
    with pytest.raises(InfrastructureError) as caught:
        worker.launch_request(PrepareRequest(output="memory://names"), settings, CONTEXT, attempt)
    assert (caught.value.field, caught.value.remedy) == ("prepare.launch.timeout_s", "Raise prepare.launch.timeout_s.")


def test_an_error_names_its_own_section() -> None:
    with pytest.raises(ConfigError, match=r"^evaluate\.launch\."):
        Resolver().launch(LaunchSettings(kind="process", processes=2), use_cpu=True, section="evaluate")
    with pytest.raises(ConfigError, match=r"^evaluate\.args\.seed"):
        Resolver().arguments({"seed": -1}, prefix="evaluate.args")


def describe(folder: Path, weights: dict[str, bytes], assets: dict[str, bytes] | None = None) -> Flavor:
    """The flavor of a model with these files."""

    def entries(place: str, below: str, files: dict[str, bytes]) -> tuple[FileEntry, ...]:
        for name, content in files.items():
            (folder / below / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / below / name).write_bytes(content)
        return tuple(FileEntry(place + n, len(c), hashlib.sha256(c).hexdigest()) for n, c in files.items())

    data, model = (
        StageManifest[Any](stage, "k" * 64, str(folder / place), "d" * 64, facts=facts)
        for stage, place, facts in (("prepare-data", "data", PrepareFacts({})), ("train", "model", TrainFacts()))
    )
    description = ModelDescription(
        name="texts",
        recipe="recipe.py",
        code=(),
        weights=entries("", "model/model", weights),
        assets=entries("assets/", "data/assets", assets or {}),
        versions={"transformers": "5.0"},
    )
    return describe_flavor(description, data, model)


def test_a_model_and_the_tokenizer_of_its_data_are_described(tmp_path: Path) -> None:
    tokenizer = {"tokenizer/tokenizer_config.json": b"{}", "tokenizer/tokenizer.json": b"{}", "other.txt": b"x"}
    flavor = describe(tmp_path, {**BERT, "model.safetensors": b"w"}, tokenizer)
    assert flavor.config == {
        "task": "text-classification",
        "instance_type": "Pipeline",
        "pipeline_model_type": "BertForSequenceClassification",
        "source_model_name": "texts",
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "transformers_version": "5.0",
        "code": None,
    }
    assert {(file.path, Path(file.folder, file.name).read_bytes()) for file in flavor.files} == {
        ("model/config.json", BERT["config.json"]),
        ("model/model.safetensors", b"w"),
        ("components/tokenizer/tokenizer_config.json", b"{}"),
        ("components/tokenizer/tokenizer.json", b"{}"),
    }


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"model.safetensors": b"w"}, "not a model of transformers"),
        ({"config.json": b'{"recipe": "recipe.py"}'}, "not a model of transformers"),
        ({"adapter_config.json": b"{}", **BERT}, "needs the weights of its base model"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path: Path, weights: dict[str, bytes], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        describe(tmp_path, weights)
    assert (refused.value.field, refused.value.value) == ("register.flavor", "transformers")
    assert "Remove register.flavor" in (refused.value.remedy or "")
