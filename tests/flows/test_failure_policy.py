"""The table of docs/failures.md from outside: one fault of each class in a small pipeline; and gates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.support.command import Cli
from tests.support.faulty import Faults
from tests.support.mlflow_store import client, fresh_store
from tests.support.runs import broken, ran, reason, run, spec_of, succeeded
from tests.support.s3 import S3Server
from trainer_lib.errors import CodeError, DataError, GateError, NonFiniteError, OutOfMemoryError, StorageFullError
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.tasks.stage import progress, task

TRAINING = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")


def attempts(storage: str, stage: str) -> list[dict[str, Any]]:
    """The records of a stage's attempts in its only folder, each start with its end."""
    stages = Store.open(storage).child("stages", stage)
    [folder] = stages.children()
    ledger = stages.child(folder, "attempts")
    names = [name for name in ledger.children() if not name.endswith(".end.json")]
    read = [(name, ledger.read_if_exists(f"{name[:4]}.end.json")) for name in names]
    return [{**json.loads(ledger.read_bytes(name)), **json.loads(end or b"{}")} for name, end in read]


def committed(result: PipelineResult) -> dict[str, Any]:
    """The manifest of the training."""
    outcome = result.outcome("train")
    assert outcome is not None and outcome.manifest is not None
    return outcome.manifest


@pytest.fixture
def storage(folder: Path) -> str:
    """An empty one."""
    return str(folder / "fresh")


# -------------------------------------------------------------------------------------------------- never tried again
@pytest.mark.parametrize(
    ("old", "new", "kind", "field"),
    [
        ("y = self.linear(x)", "raise ValueError('wrong shape')", CodeError, "recipe"),
        ('"x": [x]', '"x": [float("nan")]', DataError, None),
        ("((y - labels) ** 2).mean()", "((y - labels) ** 2).mean() * float('nan')", NonFiniteError, None),
    ],
    ids=["code", "data", "not finite"],
)
def test_what_a_retry_cannot_help_fails_at_once(
    folder: Path, storage: str, old: str, new: str, kind: type[Exception], field: str | None
) -> None:
    broken(folder, old, new)
    result = run(folder, f"storage={storage}", "train.args.max_nonfinite_steps=3", *TRAINING)
    assert type(result.error) is kind
    assert result.error is not None
    assert field is None or result.error.field == field
    assert Path(result.report_url or "").is_file()
    with pytest.raises(kind):
        result.raise_for_error()
    json.dumps(result.to_dict())
    failed = next(each.stage for each in result.stages if each.status == "failed")
    [only] = attempts(storage, failed)
    assert only["decision"] == "a retry cannot help"


def test_a_full_disk_is_not_tried_again_and_says_what_it_needs(folder: Path, faults: Faults) -> None:
    seen: list[int] = []

    def fill(event: dict[str, Any]) -> None:
        if event.get("stage") == "prepare-data" and event.get("status") == "started" and not seen:
            seen.append(1)
            faults.plan(2, "full", only="/data/train/")  # 1 opens the first shard

    with progress.subscribe(fill):
        result = run(folder, "storage=faulty://bucket/full", *TRAINING)
    assert type(result.error) is StorageFullError
    assert "no space left" in result.error.message
    assert "The file needs at least" in result.error.message
    [only] = attempts("faulty://bucket/full", "prepare-data")
    assert only["decision"] == "a retry cannot help"
    again = succeeded(folder, "storage=faulty://bucket/full", *TRAINING)
    assert ran(again) == {"prepare-data", "train"}


# ----------------------------------------------------------------------------------------------------------- preempted
def test_a_preempted_training_is_resumed_free_of_charge(folder: Path, storage: str) -> None:
    """The machine asks the worker to go (SIGTERM), once: the stage goes on from the step that was saved for that."""
    broken(folder, "y = self.linear", "drain(len(x))\n            y = self.linear")
    once = f"Path({str(folder / 'drained')!r})"
    broken(
        folder,
        "def compute_metrics",
        f"def drain(rows):\n    import os\n    from pathlib import Path\n\n    if not {once}.exists():\n"
        f"        {once}.touch()\n        os.kill(os.getpid(), 15)\n\n\ndef compute_metrics",
    )
    result = succeeded(folder, f"storage={storage}", "train.launch=process", "train.retries=0", *TRAINING)
    first, second = attempts(storage, "train")
    assert first["error"]["class"] == "Preempted"
    assert first["decision"] == "preempted: tried again, free of charge"
    assert second["outcome"] == "committed"
    assert committed(result)["meta"]["resumed_from"] == first["error"]["step"] == 1


# ------------------------------------------------------------------------------------------------------- out of memory
GIVEN = "train.args.per_device_train_batch_size=8"
EXHAUSTED = "def exhausted():\n    raise MemoryError('too many rows')\n\n\ndef compute_metrics"


@pytest.mark.parametrize(("more", "halvings"), [((GIVEN,), [0, 1, 2, 3]), ((), [0])])
def test_memory_that_one_sample_exceeds_ends_the_stage(
    folder: Path, storage: str, more: tuple[str, ...], halvings: list[int]
) -> None:
    """A size that is given is halved from attempt to attempt, another one by the Trainer itself."""
    broken(folder, "y = self.linear", "assert not self.training or exhausted()\n            y = self.linear")
    broken(folder, "def compute_metrics", EXHAUSTED)
    result = run(folder, f"storage={storage}", *more, *TRAINING)
    assert type(result.error) is OutOfMemoryError
    assert [attempt["batch_halvings"] for attempt in attempts(storage, "train")] == halvings
    assert attempts(storage, "train")[-1]["decision"] == "out of memory, and nothing left to lower"
    assert "One sample at a time is too large already" in str(result.error.remedy)


def test_memory_that_runs_out_where_there_is_no_batch_says_what_helps(folder: Path, storage: str) -> None:
    broken(folder, 'out.info["slope"] = 2.0', 'raise MemoryError("all rows at once")')
    result = run(folder, f"storage={storage}", *TRAINING)
    assert type(result.error) is OutOfMemoryError
    assert "yield its rows one by one" in str(result.error.remedy)
    assert "batch" not in str(result.error)
    assert len(attempts(storage, "prepare-data")) == 1


# ------------------------------------------------------------------------------------------------------------- a store
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client of S3 that gives a request up within seconds."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()  # a client of an earlier test would go on with its own patience
    yield
    S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("impatient")
def test_an_outage_of_the_store_is_survived(
    folder: Path, s3_url: str, s3_faults: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, told = f"{s3_url}/outage", list[str]()
    monkeypatch.setattr(task, "DELAYS_S", [0.5])

    def cut_off(event: dict[str, Any]) -> None:
        if event.get("event") != "stage" or event.get("stage") != "train":
            return
        told.append(f"{event['status']}: {event['reason']}")
        if event["status"] == "started" and len(told) == 1:
            s3_faults.plan(2, "outage", seconds=3.0)

    with progress.subscribe(cut_off):
        result = succeeded(folder, f"storage={storage}", "train.retries=1", *TRAINING)
    assert ran(result) == {"prepare-data", "train"}
    assert told[-1].startswith("committed")
    assert len([each for each in told if each.startswith("started")]) > 1
    assert committed(run(folder, *TRAINING))["content_digest"] == committed(result)["content_digest"]


# -- gates: what misses a requirement is measured and committed, and not published ------------------------------------

PASSED, MISSED = "evaluate.require.test_error=< 100", "evaluate.require.test_error=< 0"


def test_a_cached_evaluation_is_checked_and_another_threshold_runs_nothing(folder: Path, tmp_path: Path) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    tracked = ("tracking.enabled=true", f"tracking.uri={uri}")
    held = run(folder, MISSED, *tracked)
    assert isinstance(held.error, GateError)
    assert held.error.field == "evaluate.require.test_error"
    assert ran(held) == set()
    assert reason(held, "push-to-hub") == "held back by the gate"
    assert [gate["passed"] for gate in held.gates] == [False]
    assert held.mlflow_run_id is not None
    text = Store.open(str(held.report_url).rpartition("/")[0]).read_bytes("report.html").decode()
    assert "test_error" in text
    assert "&lt; 0" in text
    passed = run(folder, PASSED, *tracked)
    assert passed.ok
    assert ran(passed) == set()
    assert [gate["passed"] for gate in passed.gates] == [True]
    # The same run went on: the threshold is in no key.
    assert (passed.pipeline_key, passed.mlflow_run_id) == (held.pipeline_key, held.mlflow_run_id)
    assert client(uri).get_run(passed.mlflow_run_id).data.tags["trainflow.gate"].startswith("passed: test_error")


def test_a_version_that_misses_a_requirement_is_promoted_only_on_demand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    spec = folder / "pipeline.yaml"
    plain = spec.read_text().replace("tracking: {enabled: false}", "register: {name: toy-line}")
    spec.write_text(plain)
    assert run(folder, "train.args.seed=7", "register.name=null").ok
    # The run has finished and nothing of it runs again; it is registered all the same, and only once.
    first = run(folder, "train.args.seed=7")
    assert first.ok
    assert ran(first) == set()
    assert run(folder, "train.args.seed=7").mlflow_run_id == first.mlflow_run_id
    promote = ("promote", "toy-line", "1")
    assert "toy-line version 1 is champion" in cli(*promote, "--spec", spec).out
    for requirement, problem in (("< 0", r"test_error is 0\.\d+, and must be < 0"), ("> 0", "")):
        spec.write_text(plain.replace("evaluate: {", f'evaluate: {{require: {{test_error: "{requirement}"}}, '))
        if problem:
            rows = cli(*promote, "--spec", spec).failure(21, GateError.title)
            assert rows["where"].startswith("evaluate.require.test_error")
            assert re.search(rf"The model is not promoted: {problem}\.", rows["why"])
            assert "--ignore-gates" in rows["do"]
            assert cli(*promote, "--spec", spec, "--ignore-gates").code == 0
        else:
            assert cli(*promote, "--spec", spec).code == 0
    # Without its spec, what the run recorded counts.
    assert cli(*promote, "--storage", folder / "store").code == 0
    client(uri).set_tag(first.mlflow_run_id, "trainflow.gate", "failed: test_error 0.5 (not < 0)")
    rows = cli(*promote, "--storage", folder / "store").failure(21, GateError.title)
    assert "its run recorded that the gates failed: test_error 0.5 (not < 0)." in rows["why"]


def test_nothing_new_is_published_or_registered_and_the_evaluation_stays_committed(
    folder: Path, tmp_path: Path
) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    registering = ("train.args.seed=5", "tracking.enabled=true", f"tracking.uri={uri}", "register.name=toy-line")
    held = run(folder, MISSED, *registering)
    assert isinstance(held.error, GateError)
    assert ran(held) == {"train", "evaluate", "predict"}
    assert isinstance(run(folder, MISSED, *registering).error, GateError), "nor with the evaluation from before"
    assert registered(uri) == []
    passed = run(folder, PASSED, *registering)
    assert passed.ok
    assert ran(passed) == {"push-to-hub"}
    champion = [("1", passed.mlflow_run_id, {"candidate", "champion"})]
    assert registered(uri) == champion
    # A new training that misses the requirement leaves the champion alone.
    assert isinstance(run(folder, MISSED, *registering, "train.args.seed=6").error, GateError)
    assert registered(uri) == champion


def registered(uri: str) -> list[tuple[str, str, set[str]]]:
    """Version, run and aliases of everything in a registry."""
    versions = client(uri).search_model_versions("")
    named = [client(uri).get_model_version(each.name, each.version) for each in versions]
    return [(str(each.version), each.run_id, set(each.aliases)) for each in named]


def test_no_choice_of_stages_goes_around_a_gate(folder: Path) -> None:
    ways: list[dict[str, str]] = [{"only": "push-to-hub"}, {"start": "push-to-hub"}, {"only": "evaluate"}]
    for how in (*ways, {"from_run": run(folder).pipeline_key[:16], "start": "publish"}):
        assert isinstance(run(folder, MISSED, **how).error, GateError), how
        assert run(folder, PASSED, **how).ok
    assert isinstance(run(folder, MISSED, "publish.enabled=false").error, GateError)
    assert run(folder, MISSED, only="predict").ok, "no gate guards it"


def test_why_says_that_the_gate_will_hold_back(folder: Path) -> None:
    found = Plan.of(spec_of(folder, MISSED)).reasons["push-to-hub"]
    assert (found.hit, found.held_back) == (False, True)
    assert "test_error" in found.reason
    assert found.to_dict()["held_back"] is True
    assert Plan.of(spec_of(folder, PASSED)).reasons["push-to-hub"].hit
    # A new training is measured first.
    assert not Plan.of(spec_of(folder, MISSED, "train.args.seed=6")).reasons["push-to-hub"].held_back
