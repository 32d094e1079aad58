"""Runs recorded on a storage: what an id means, and what is read from their records."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded import commit_stage, leave_sign, nightly, record_run, train_spec
from trainer_lib.errors import ConfigError, DamagedError, HangError
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import remove_run
from trainer_lib.storage import Store
from trainflow.flows.cli.commands.runs import parse_filter, sort_key
from trainflow.flows.cli.main import main
from trainflow.flows.records.past_runs import (
    find_run,
    list_runs,
    newest_unfinished,
    read_record,
    read_tags,
    tag_run,
    untag_run,
    write_record,
)
from trainflow.flows.records.results import StageOutcome, describe_outcomes, flat_metrics
from trainflow.flows.records.run_logs import LogReader, read_attempts
from trainflow.flows.records.run_names import describe_settings, flat_settings, name_run
from trainflow.flows.runs.garbage import find_garbage, remove_garbage
from trainflow.flows.runs.run_details import compare_runs, read_details
from trainflow.flows.runs.run_status import describe_progress, look
from trainflow.flows.server.api import quiet_environment
from trainflow.tasks.stage.retry import Ledger

ODD_SHAPES = (
    '{"name": "toy", "stages": {"train": 1}}',
    '{"name": "toy", "outcomes": [1]}',
    '{"name": "a", "name": "b"}',
    '{"name": "toy", "outcomes": {"train": {"seconds": "9"}}}',
    f'{{"name": "toy", "metrics": {{"loss": {10**400}}}}}',
)
FIRST, SECOND, OTHER = "3fa9c1d2e4b50617", "3fa9ffd2e4b50617", "b81c0000aaaa2222"
HOSTILE = "\x1b]0;owned\x07<script>alert(1)</script>\u202ekcab\u200f\x9b2J\n✗ forged"
RUN, REFERENCE, BAD = "a" * 16, "b" * 16, "c" * 16


def record(storage: Path, run_id: str, **fields: Any) -> None:
    plain: dict[str, Any] = {"day": 20, "status": "FAILED", "started": "2026-11-20T10:00:00Z"}
    record_run(str(storage), run_id, **{**plain, "stages": {"prepare-data": "0" * 64}, "run_name": None, **fields})


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    record(tmp_path, FIRST, failed="train", mlflow_run_id="a" * 32)
    record(tmp_path, SECOND, started="2026-11-21T10:00:00Z", status="KILLED")
    record(tmp_path, OTHER, started="2026-11-22T10:00:00Z", status="FINISHED", name="other")
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text('{"name": "to')
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path


def refused(storage: Path, text: str, pipeline: str | None = "toy") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find_run(str(storage), text, field="--from-run", pipeline=pipeline)
    assert (caught.value.field, caught.value.value, caught.value.exit_code) == ("--from-run", text, 2)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "damage", ["[" * 100_000, "a digit", '{"name": "to', "[]", '{"name": ' * 500, "\xff", " " * (17 << 20), *ODD_SHAPES]
)
def test_a_damaged_record_is_named_once_and_the_other_runs_are_listed(
    storage: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Store.open(str(storage)).child("runs", FIRST)
    write_record(folder, {**read_record(folder), "metrics": {"test_accuracy": 0.125}})
    assert find_run(str(storage), FIRST, field="RUN").metrics == {"test_accuracy": 0.125}
    file = storage / "runs" / FIRST / "run.json"
    file.write_text(file.read_text().replace("0.125", "0.925") if damage == "a digit" else damage, encoding="latin-1")
    for _ in range(3):
        assert [run.id for run in list_runs(str(storage))] == [OTHER, SECOND]
    assert [FIRST in record.getMessage() for record in caplog.records].count(True) == 1
    with pytest.raises(DamagedError, match=r"record of a run is damaged: .*\.") as caught:
        find_run(str(storage), FIRST, field="RUN")
    assert str(caught.value.field).endswith(f"{FIRST}/run.json")
    if damage == "a digit":  # what it referred to is not known
        with pytest.raises(DamagedError, match="record of a run is damaged"):
            remove_garbage(str(storage), find_garbage(str(storage)))


def test_a_run_is_named_by_its_id_its_name_its_mlflow_run_a_tag_or_as_the_last(storage: Path) -> None:
    assert [run.id for run in list_runs(str(storage))] == [OTHER, SECOND, FIRST], "newest first, and no torn records"
    assert list_runs(str(storage / "nowhere")) == []
    for text in (FIRST, "3fa9c1", "a" * 32):
        run = find_run(str(storage), text, field="--from-run", pipeline="toy")
        assert (run.id, run.failed, dict(run.stages)) == (FIRST, "train", {"prepare-data": "0" * 64})
        assert str(run) == f"{FIRST} (toy, 2026-11-20 10:00 UTC, train failed)"
    record(storage, "d" * 16, run_name="toy-lr0.01-3", started="2026-11-19T10:00:00Z")
    where = str(storage)
    assert find_run(where, "toy-lr0.01-3", field="RUN").id == "d" * 16
    assert find_run(where, "last", field="RUN").id == OTHER
    assert find_run(where, "last", field="RUN", pipeline="toy").id == SECOND
    assert "Did you mean toy-lr0.01-3?" in str(refused(storage, "toy-lr0.1-3").remedy)
    tag_run(where, find_run(where, FIRST, field="RUN"), "baseline")
    tag_run(where, find_run(where, FIRST, field="RUN"), "baseline")  # safe to repeat
    assert find_run(where, "baseline", field="RUN").id == FIRST


def test_an_id_that_means_no_run_names_the_nearest_and_what_there_is(storage: Path) -> None:
    error = refused(storage, "3fa9c1d2e4b50618")
    assert "No run with this id, name or tag is recorded" in error.message
    assert f"Did you mean {FIRST}?" in str(error.remedy) and SECOND in str(error.remedy)
    assert OTHER not in str(error.remedy)
    assert "Several runs are meant" in refused(storage, "3fa9").message
    assert "No run with this id, name or tag" in refused(storage, "3f").message  # too short to stand for one
    assert "No run of this pipeline" in str(refused(storage / "nowhere", FIRST).remedy)
    assert "pipeline 'other'" in refused(storage, OTHER).message
    assert find_run(str(storage), OTHER, field="RUN").name == "other"


def test_the_newest_unfinished_run_is_the_one_that_nothing_replaced(storage: Path) -> None:
    assert newest_unfinished(str(storage)).id == SECOND
    assert newest_unfinished(str(storage), at_work={SECOND}).id == FIRST
    with pytest.raises(ConfigError, match="is running now"):
        newest_unfinished(str(storage), at_work={FIRST, SECOND})
    record(storage, "c" * 16, started="2026-11-23T10:00:00Z", status="FINISHED")
    with pytest.raises(ConfigError, match="followed by a finished run") as caught:
        newest_unfinished(str(storage))
    assert SECOND in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="No run is recorded there"):
        newest_unfinished(str(storage / "nowhere"))


def test_the_last_run_is_the_newest_that_has_what_is_needed(storage: Path, caplog: pytest.LogCaptureFixture) -> None:
    for run_id, day in (("d" * 16, 18), ("e" * 16, 19)):
        record(storage, run_id, started=f"2026-11-{day}T10:00:00Z", stages={"train": "1" * 64})
    where = str(storage)
    assert find_run(where, "last", field="RUN", needs="train").id == "e" * 16
    assert re.search(f"last is the run {'e' * 16} .* the newest one, {OTHER} .* no result of train", caplog.text)
    caplog.clear()
    assert find_run(where, "last", field="RUN", needs="prepare-data").id == OTHER
    assert find_run(where, "last", field="RUN", needs="predict").id == OTHER, "the command then says what is missing"
    assert not caplog.records


def test_a_tag_names_one_run_until_it_is_taken_away(storage: Path) -> None:
    where = str(storage)
    first, second = (find_run(where, each, field="RUN") for each in (FIRST, SECOND))
    tag_run(where, first, "v1.2")
    for name in ("v1.2", FIRST, "last", "", "a/b", "../up"):
        with pytest.raises(ConfigError) as caught:
            tag_run(where, second, name)
        assert (caught.value.field, caught.value.value) == ("NAME", name)
    assert read_tags(where, second) == []
    with pytest.raises(ConfigError, match="does not have this tag") as caught:
        untag_run(where, first, "v1")
    assert "v1.2" in str(caught.value.remedy)
    untag_run(where, first, "v1.2")
    tag_run(where, second, "v1.2")
    assert read_tags(where, second) == ["v1.2"]


def test_a_run_that_is_removed_cannot_be_tagged_and_a_tagged_one_is_not_removed(storage: Path) -> None:
    where, folder = str(storage), Store.open(str(storage)).child("runs", FIRST)
    run = find_run(where, FIRST, field="RUN")
    tag_run(where, run, "kept")
    assert not remove_run(folder, "run.json", lambda: bool(read_tags(where, run)))
    assert find_run(where, "kept", field="RUN").id == FIRST
    untag_run(where, run, "kept")
    assert remove_run(folder, "run.json", lambda: bool(read_tags(where, run)))
    with pytest.raises(ConfigError, match="just been removed"):
        tag_run(where, run, "late")
    assert not list((storage / "runs" / FIRST).rglob("*.json"))
    assert not (storage / "runs" / FIRST / "tags").exists()


# -- names ------------------------------------------------------------------------------------------------------------
def test_two_commands_at_once_get_two_names(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def take(place: int) -> str:
        start.wait()
        return name_run(train_spec(str(tmp_path)), f"{place}" * 16)

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(take, range(8))) == sorted(f"toy-{number}" for number in range(1, 9))


@pytest.mark.parametrize("name", ["²", "9" * 250])
def test_strange_names_keep_no_run_from_its_own(name: str, tmp_path: Path) -> None:
    names = tmp_path / "names" / "toy"
    names.mkdir(parents=True)
    for planted in (name, "1"):
        (names / f"{planted}.json").write_text('{"settings": [1]}')
    assert name_run(train_spec(str(tmp_path)), "a" * 16) == "toy-2"


def test_a_name_holds_no_path_no_launch_and_no_secret(tmp_path: Path) -> None:
    record = {**train_spec(str(tmp_path)).to_record(), "predict": {"launch": {"processes": 2}, "options": {"url": "x"}}}
    assert not [name for name in flat_settings(record) if "launch" in name or "storage" in name]
    words = describe_settings({}, {"prepare.options.url": "https://me:hunter-2@host/x", "train.args.a": [1, 2]})
    assert "hunter" not in " ".join(words)
    assert words[0] == "a-1+2"
    assert len(describe_settings({}, {f"train.args.a{number}": number for number in range(9)})) == 3


# -- details and differences ------------------------------------------------------------------------------------------
def test_a_comparison_names_only_what_differs(tmp_path: Path) -> None:
    storage, details = str(tmp_path), []
    for day, (seed, rate) in enumerate((("one", 0.1), ("two", 0.2)), start=1):
        run_id = f"{day}" * 16
        key = commit_stage(storage, "train", seed, metrics={"train_loss": rate})
        record_run(storage, run_id, day=day, stages={"train": key})
        folder = Store.open(storage).child("runs", run_id)
        folder.write_bytes("spec.yaml", f"train: {{args: {{learning_rate: {rate}, seed: 1}}}}".encode())
        arguments = {"train": {"learning_rate": rate, "warmup_steps": day, "seed": 1}}
        folder.write_bytes("arguments.json", json.dumps(arguments).encode())
        details.append(read_details(storage, find_run(storage, f"toy-{day}", field="RUN")))
    found = compare_runs(*details)
    assert [str(each) for each in found.spec] == ["train.args.learning_rate: 0.1 -> 0.2"]
    assert found.code == ["prepare changed (recipe.py)"]
    assert [str(each) for each in found.arguments] == ["warmup_steps: 1 -> 2"]
    assert found.versions == []
    [loss] = found.metrics
    assert loss == {"name": "train_loss", "old": 0.1, "new": 0.2, "delta": pytest.approx(0.1)}
    assert (found.is_equal, compare_runs(details[0], details[0]).is_equal) == (False, True)


def test_a_stage_that_was_found_committed_keeps_the_time_that_it_took_and_metrics_have_one_name_each() -> None:
    manifest = {"key": "k", "metrics": {}}
    ran = describe_outcomes([StageOutcome("train", "ran", "never run before", 9.0, manifest)], None)
    again = describe_outcomes([StageOutcome("train", "cached", "committed", 0.0, manifest)], ran)
    assert again["train"]["seconds"] == 9.0
    other = describe_outcomes([StageOutcome("train", "cached", "committed", 0.0, {**manifest, "key": "l"})], ran)
    assert other["train"]["status"] == "cached"
    test = {"test_error": 0.1, "loss": 1, "test_runtime": 3.0, "note": "x"}
    measured = {"test": test, "train_loss": 0.5, "epoch": 1.0}
    assert flat_metrics(measured) == {"test_error": 0.1, "test_loss": 1, "train_loss": 0.5}


# -- logs -------------------------------------------------------------------------------------------------------------
def test_a_torn_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    record_run(str(tmp_path), "a" * 16, day=1)
    path = tmp_path / "runs" / ("a" * 16) / "logs" / "train" / "0001-001.jsonl"
    path.parent.mkdir(parents=True)
    line = json.dumps({"t": "2026-11-22T10:00:00Z", "kind": "line", "text": "whole", "rank": 0})
    path.write_text(f"{line}\nnot json\n{line[:20]}")
    reader = LogReader(str(tmp_path), list_runs(str(tmp_path))[0])
    assert [each.text for each in reader.read()] == ["whole"]
    path.write_text(f"{line}\nnot json\n{line}\n")
    assert [each.text for each in reader.read()] == ["whole"]
    assert reader.read() == []


def test_attempts_are_listed_with_their_errors(tmp_path: Path) -> None:
    storage = str(tmp_path)
    key = commit_stage(storage, "train", "one")
    ledger = Ledger(Store.open(storage).child("stages", "train", key[:16]))
    ledger.begin(reason="never run before", batch_halvings=0)
    ledger.end(1, "failed", error=HangError("It hung.", rank=1, step=7, details="the stacks"), decision="retry 1 of 3")
    ledger.begin(reason="never run before", batch_halvings=0)
    record_run(storage, "a" * 16, day=1, status="FAILED", worked_in={"train": key})
    first, second = read_attempts(storage, list_runs(storage)[0])
    assert (first.outcome, first.error["rank"], first.error["details"]) == ("failed", 1, "the stacks")
    assert first.decision == "retry 1 of 3"
    assert (second.outcome, second.ended) == ("open", None)


# -- filters and progress ---------------------------------------------------------------------------------------------
def test_conditions_and_orders_are_read_or_refused(tmp_path: Path) -> None:
    nightly(str(tmp_path), 3)
    record_run(str(tmp_path), "f" * 16, day=4)
    name, required = parse_filter("test_accuracy >= 0.9")
    assert (name, required.is_met(0.9), required.is_met(float("nan"))) == ("test_accuracy", True, False)
    for condition in ("test_accuracy", "a>=b", ">=0.9", "a!=0.9"):
        with pytest.raises(ConfigError, match="a metric, a comparison and a number"):
            parse_filter(condition)
    statuses = look(str(tmp_path))
    runs = [each.run for each in statuses]
    firsts = {"test_accuracy": "toy-1", "-test_accuracy": "toy-3", "-started": "toy-4", "name": "toy-1"}
    for text, first in firsts.items():
        key, reverse = sort_key(text, runs)
        names = [each.run.run_name for each in sorted(statuses, key=key, reverse=reverse)]
        assert names[0] == first
        assert names[-1] == "toy-4" or "accuracy" not in text, "a run without the metric comes last"
    with pytest.raises(ConfigError, match=r"cannot be sorted.*test_accuracy"):
        sort_key("test_acuracy", runs)
    # Without runs only what every run has orders them.
    assert sort_key("-seconds", [])[1]
    with pytest.raises(ConfigError, match="no run with a metric") as caught:
        sort_key("-startd", [])
    assert (caught.value.field, caught.value.value) == ("--sort", "-startd")
    assert caught.value.remedy == 'Did you mean "started"?'


def test_progress_counts_the_stage_at_work_and_what_follows(tmp_path: Path) -> None:
    storage = str(tmp_path)
    record_run(storage, "b" * 16, day=2, status="RUNNING", ended=None, planned=["train", "evaluate"])
    folder = Store.open(storage).child("runs", "b" * 16)
    beat: dict[str, Any] = {"stage": "train", "progress": "step 5/10", "step": 5, "max_steps": 10, "eta_s": 20.0}
    leave_sign(folder, Holder.this_process(), **beat)
    [status] = look(storage)
    train, evaluate = describe_progress(status)
    assert (train.state, train.share, train.eta_s) == ("running", 0.5, 20.0)
    assert (evaluate.state, evaluate.eta_s) == ("waiting", None)
    assert status.to_dict()["share"] == 0.5


@pytest.fixture
def hostile_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    environ: dict[str, str] = {}
    quiet_environment(environ)  # as a command does for its own process
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place, outcome = str(tmp_path / "store"), {"status": HOSTILE, "seconds": 1.0, "reason": HOSTILE}
    runs = Store.open(place).child("runs")
    for day, run_id in ((1, RUN), (2, REFERENCE)):
        keys = {name: commit_stage(place, name, f"{name} {day}") for name in ("prepare-data", "train")}
        fields: dict[str, Any] = {
            **dict.fromkeys(("failed", "sweep", "trial", "mlflow_run_id"), HOSTILE),
            **{key: {HOSTILE: HOSTILE} for key in ("worked_in", "sources")},
            "name": f"toy {HOSTILE}",
            "run_name": f"run {HOSTILE} {'x' * 10_000}",
            "metrics": {f"test_{HOSTILE}": day / 10, "m" * 10_000: 1.0, "test_odd": HOSTILE},
            "run_url": f"https://example.org/{HOSTILE}",
            "outcomes": {"train": outcome, HOSTILE: outcome},
            "planned": ["train", HOSTILE],
        }
        record_run(place, run_id, day=day, status="FAILED", stages=keys, **fields)
        runs.child(run_id).write_bytes(f"tags/{'t' * 60}", b"{}")
        runs.child(run_id).write_bytes("arguments.json", b'{"train": "x", "evaluate": [1]}')
        store = Store.open(place).child("stages", "train", keys["train"][:16])
        store.write_bytes("attempts/0001.json", b'{"attempt": {"attempt": "x"}}')
        key = {**json.loads(store.read_bytes("key.json")), "places": {"recipe.py:prepare": [1, 2, 3, 4, 5]}}
        store.write_bytes("key.json", json.dumps({**key, "places": "x"} if run_id == RUN else key).encode())
    write_record(runs.child(BAD), {"name": HOSTILE, "started": HOSTILE})
    runs.child(BAD).write_bytes("run.json", b'{"\x1b]0;x\x07": 1, "\x1b]0;x\x07": 2}')
    return place


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "runs",
        "status",
        f"show {RUN}",
        f"show {RUN} --all",
        f"compare {RUN} {REFERENCE}",
        f"logs {RUN}",
        f"lineage {RUN}",
        f"verify {RUN}",
        f"tag {RUN} best",
        f"show {BAD}",
        f"show {HOSTILE}",
        f"resume {RUN}",
        f"reproduce {RUN}",
        f"tag {RUN} {HOSTILE}",
        "gc",
        "gc --delete",
        "sync",
        "models",
        "checkpoints list",
        f"runs --sort {HOSTILE}",
        f"runs --metric {HOSTILE}>1",
    ],
)
def test_no_command_lets_a_name_steer_the_terminal(
    hostile_storage: str, command: str, as_json: bool, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    words = [word.replace("\0", HOSTILE) for word in command.replace(HOSTILE, "\0").split(" ")]
    words += ["--storage", hostile_storage] if words[0] != "checkpoints" else [hostile_storage]
    with pytest.raises(SystemExit) as ended:
        main([*words, *(["--json"] if as_json else [])])
        raise SystemExit(0)
    shown = capfd.readouterr()
    assert ended.value.code != 1, shown.err
    for text in (shown.out, shown.err, *(record.getMessage() for record in caplog.records)):
        lines = text.split("\n")
        assert not [line for line in lines if not line.replace("\t", "").isprintable()]
        assert not [line for line in lines if line.startswith("✗ forged")]
