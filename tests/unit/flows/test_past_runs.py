"""Runs that are recorded on a storage, and what an id means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.garbage import find_garbage, remove_garbage
from flows.past_runs import (
    find_run,
    list_runs,
    newest_unfinished,
    read_record,
    read_tags,
    tag_run,
    untag_run,
    write_record,
)
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.locks.removal import remove_run
from trainer_lib.storage import Store

ODD_SHAPES = (
    '{"name": "toy", "stages": {"train": 1}}',
    '{"name": "toy", "outcomes": [1]}',
    '{"name": "a", "name": "b"}',
)
FIRST, SECOND, OTHER = "3fa9c1d2e4b50617", "3fa9ffd2e4b50617", "b81c0000aaaa2222"


def record(storage: Path, run_id: str, **fields: Any) -> None:
    folder = storage / "runs" / run_id
    folder.mkdir(parents=True)
    plain = {"name": "toy", "status": "FAILED", "started": "2026-11-20T10:00:00Z", "stages": {"prepare-data": "0" * 64}}
    (folder / "run.json").write_text(json.dumps({**plain, **fields}))


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    record(tmp_path, FIRST, failed="train", mlflow_run_id="a" * 32)
    record(tmp_path, SECOND, started="2026-11-21T10:00:00Z", status="KILLED")
    record(tmp_path, OTHER, started="2026-11-22T10:00:00Z", status="FINISHED", name="other")
    torn = tmp_path / "runs" / "torn"
    torn.mkdir()
    (torn / "run.json").write_text('{"name": "to')
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path


def refused(storage: Path, text: str, pipeline: str | None = "toy") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find_run(str(storage), text, field="--from-run", pipeline=pipeline)
    assert (caught.value.field, caught.value.value, caught.value.exit_code) == ("--from-run", text, 2)
    assert caught.value.remedy
    return caught.value


def test_runs_are_listed_newest_first_and_torn_records_are_none(storage: Path) -> None:
    assert [run.id for run in list_runs(str(storage))] == [OTHER, SECOND, FIRST]
    assert list_runs(str(storage / "nowhere")) == []


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


@pytest.mark.parametrize("text", [FIRST, "3fa9c1", "a" * 32])
def test_a_run_is_named_by_its_id_its_beginning_or_its_mlflow_run(storage: Path, text: str) -> None:
    run = find_run(str(storage), text, field="--from-run", pipeline="toy")
    assert (run.id, run.failed, dict(run.stages)) == (FIRST, "train", {"prepare-data": "0" * 64})
    assert str(run) == f"{FIRST} (toy, 2026-11-20 10:00 UTC, train failed)"


def test_an_id_that_means_no_run_names_the_nearest_and_what_there_is(storage: Path) -> None:
    error = refused(storage, "3fa9c1d2e4b50618")
    assert "No run with this id, name or tag is recorded" in error.message
    assert f"Did you mean {FIRST}?" in str(error.remedy)
    assert SECOND in str(error.remedy)
    assert OTHER not in str(error.remedy)
    assert "Several runs are meant" in refused(storage, "3fa9").message
    assert "No run with this id, name or tag" in refused(storage, "3f").message  # too short to stand for one
    assert "No run of this pipeline" in str(refused(storage / "nowhere", FIRST).remedy)
    assert "pipeline 'other'" in refused(storage, OTHER).message
    assert find_run(str(storage), OTHER, field="RUN").name == "other"


def test_the_newest_unfinished_run_is_the_one_that_nothing_replaced(storage: Path) -> None:
    assert newest_unfinished(str(storage)).id == SECOND
    assert newest_unfinished(str(storage), at_work={SECOND}).id == FIRST
    with pytest.raises(ConfigError, match="at work now"):
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


def test_a_run_is_also_named_by_its_name_a_tag_or_as_the_last(storage: Path) -> None:
    record(storage, "d" * 16, run_name="toy-lr0.01-3", started="2026-11-19T10:00:00Z")
    where = str(storage)
    assert find_run(where, "toy-lr0.01-3", field="RUN").id == "d" * 16
    assert find_run(where, "last", field="RUN").id == OTHER
    assert find_run(where, "last", field="RUN", pipeline="toy").id == SECOND
    assert "Did you mean toy-lr0.01-3?" in str(refused(storage, "toy-lr0.1-3").remedy)
    tag_run(where, find_run(where, FIRST, field="RUN"), "baseline")
    tag_run(where, find_run(where, FIRST, field="RUN"), "baseline")  # safe to repeat
    assert find_run(where, "baseline", field="RUN").id == FIRST


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
