"""A stage whose result is older than `refresh` allows runs again, once, beside the old result."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy
from trainer_lib.base.durations import describe
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.storage import Store
from trainer_lib.storage import commit as commits
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec, parse_spec
from trainflow.tasks.configs import MaxAge
from trainflow.tasks.keys.keys import StageKey, stage_key
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.rerun import current_key
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage

DAY = MaxAge(timedelta(days=1), "refresh.prepare")
KEY = stage_key("prepare-data", {"rows": 3, "recipe": {"recipe.py": "a" * 64}})
FILE = "rows"
NO_DURATIONS = ["1 fortnight", "soon", "", True, [1], None, ".nan"]
NOT_POSITIVE, NOT_FINITE = "The duration must be above zero.", "The duration must be finite."


class Clock:
    """The time by which results are committed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2026, 1, 1, 3, tzinfo=UTC)
        clock = self

        class Set(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return clock.now

        monkeypatch.setattr(commits, "datetime", Set)

    def context(self, storage: Path, limit: MaxAge | None = DAY) -> StageContext:
        """The context of a command that begins now."""
        resolver = Resolver()
        resolver.as_of = self.now
        refresh = {"prepare-data": limit} if limit else {}
        return StageContext(name="n", recipe="recipe.py", storage=str(storage), refresh=refresh, resolver=resolver)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(context: StageContext, text: str = "same", key: StageKey = KEY) -> StageManifest:
    def work(attempt: StageAttempt) -> StageOutput:
        return StageOutput([attempt.store.write_bytes(FILE, text.encode())], facts=PrepareFacts({}))

    return run_stage(key, context, work)


def test_a_result_is_used_until_it_is_too_old_and_then_followed_by_another(tmp_path: Path, clock: Clock) -> None:
    first = make(clock.context(tmp_path), "first")
    assert first.key == KEY.digest
    clock.now += timedelta(hours=23)
    assert make(clock.context(tmp_path), "never").created == first.created
    clock.now += timedelta(hours=2)
    second = make(clock.context(tmp_path), "second")
    assert second.key != first.key
    assert second.first_key == first.key == first.first_key
    assert second.reason == "the result of 2026-01-01 03:00 UTC is older than 1 d (refresh.prepare)"
    assert second.store().read_bytes(FILE) == b"second"
    assert first.store().read_bytes(FILE) == b"first", "another run may just be reading it"
    clock.now += timedelta(hours=24)
    assert make(clock.context(tmp_path), "never").key == second.key
    assert StageManifest.from_dict(second.to_dict()) == second
    # Without the setting the first result counts, as ever.
    assert make(clock.context(tmp_path, None), "never").key == first.key


def test_the_way_to_the_newest_of_many_results_is_short_and_can_be_lost(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = make(clock.context(tmp_path))
    for _ in range(12):
        clock.now += timedelta(days=2)
        newest = make(clock.context(tmp_path))
    looks: list[Store] = []

    def read(store: Store, *, kind: str) -> commits.Commit | None:
        looks.append(store)
        return commits.read_commit(store, kind=kind)

    monkeypatch.setattr("trainflow.tasks.stage.rerun.read_commit", read)
    assert current_key(KEY, clock.context(tmp_path)).digest == newest.key
    assert len(looks) == 1
    note = tmp_path / "refresh" / "prepare-data" / f"{KEY.folder}.json"
    for torn in (b"", b"[1", b'{"key": "other", "refresh": "2026"}', b'{"refresh": 5}'):
        note.write_bytes(torn)
        assert current_key(KEY, clock.context(tmp_path)).digest == newest.key
    note.unlink()
    assert current_key(KEY, clock.context(tmp_path)).digest == newest.key


def test_a_stopped_refresh_goes_on_where_it_was(tmp_path: Path, clock: Clock) -> None:
    first = make(clock.context(tmp_path))
    clock.now += timedelta(days=2)

    def stop(attempt: StageAttempt) -> StageOutput:
        attempt.store.write_bytes("checkpoints/part", b"half")
        raise StorageError("gone", field="x")

    with pytest.raises(StorageError):
        run_stage(KEY, clock.context(tmp_path), stop)
    # Days later still: what was started is finished, not started again under another key.
    clock.now += timedelta(days=3)
    seen = []

    def go_on(attempt: StageAttempt) -> StageOutput:
        seen.append((attempt.number, attempt.store.read_bytes("checkpoints/part")))
        return StageOutput([attempt.store.write_bytes(FILE, b"whole")], facts=PrepareFacts({}))

    second = run_stage(KEY, clock.context(tmp_path), go_on)
    assert seen == [(2, b"half")]
    assert (second.first_key, second.reason) == (first.key, "an earlier attempt did not finish")


def test_a_run_decides_once_and_one_that_goes_on_decides_as_it_did(tmp_path: Path, clock: Clock) -> None:
    first = make(clock.context(tmp_path))
    clock.now += timedelta(hours=23)
    started = clock.context(tmp_path)
    assert current_key(KEY, started) == KEY
    started.resolver.as_of = clock.now + timedelta(days=5)  # as if the training before it had taken so long
    assert make(started, "never").key == first.key
    clock.now += timedelta(days=5)
    again = clock.context(tmp_path)
    again.resolver.as_of = clock.now - timedelta(days=5)
    assert make(again, "never").key == first.key
    first.store().write_bytes("COMMIT.json", b"{}")  # a damaged result is made again in its place
    assert make(again).key == first.key


def test_two_commands_at_once_refresh_once(tmp_path: Path, clock: Clock) -> None:
    first = make(clock.context(tmp_path))
    clock.now += timedelta(days=2)
    contexts = [clock.context(tmp_path) for _ in range(4)]
    started: list[str] = []

    def work(attempt: StageAttempt) -> StageOutput:
        started.append(attempt.store.url)
        time.sleep(0.2)
        return StageOutput([attempt.store.write_bytes(FILE, b"again")], facts=PrepareFacts({}))

    with ThreadPoolExecutor(4) as pool:
        keys = {manifest.key for manifest in pool.map(lambda context: run_stage(KEY, context, work), contexts)}
    assert len(started) == 1
    assert len(keys) == 1
    assert first.key not in keys


# ------------------------------------------------------------------------------------------------------------ the plan
def plan_of(project: Path, now: datetime, *overrides: str) -> Plan:
    return Plan.of(load_spec(project / "pipeline.yaml", overrides), as_of=now)


def test_the_plan_names_the_age_and_data_that_come_out_the_same_change_nothing_behind_them(
    tmp_path: Path, clock: Clock
) -> None:
    toy.project(tmp_path, spec=f"{toy.SPEC}\nrefresh: {{prepare: 1d}}\n")
    plan = plan_of(tmp_path, clock.now)
    prepare = make(plan.context, "same", plan.key_of("prepare-data", {}))
    train_key = plan.key_of("train", {"prepare-data": prepare})
    fresh = plan_of(tmp_path, clock.now + timedelta(hours=5))
    assert fresh.reasons["prepare-data"].hit
    assert fresh.pipeline_key == plan.pipeline_key
    clock.now += timedelta(days=2)
    stale = plan_of(tmp_path, clock.now)
    reason = stale.reasons["prepare-data"]
    assert (reason.hit, reason.reason) == (
        False,
        "the result of 2026-01-01 03:00 UTC is older than 1 d (refresh.prepare)",
    )
    assert "prepare-data runs first" in stale.reasons["train"].reason or not stale.reasons["train"].hit
    assert stale.pipeline_key != plan.pipeline_key, "a run with new data is another run"
    again = make(stale.context, "same", stale.key_of("prepare-data", {}))
    assert again.key != prepare.key
    assert stale.key_of("train", {"prepare-data": again}) == train_key
    model = replace(prepare, stage="train")
    publish = [stale.key_of("push-to-hub", {"prepare-data": one, "train": model}) for one in (prepare, again)]
    assert publish[0] == publish[1]
    # Where it goes on after a kill it is the same run.
    assert plan_of(tmp_path, clock.now).pipeline_key == stale.pipeline_key


# What is written -> the seconds that it means, and how these are shown.
DURATIONS: dict[Any, tuple[float, str]] = {
    "1d": (86_400, "1 d"), "12h": (43_200, "12 h"), "1d 6h": (108_000, "1 d 6 h"), "90s": (90, "1 min 30 s"),
    "30m": (1800, "30 min"), "30 min": (1800, "30 min"), "2w": (1_209_600, "14 d"), "1.5h": (5400, "1 h 30 min"),
    "45": (45, "45 s"), 3600: (3600, "1 h"), "P1D": (86_400, "1 d"), "01:30:00": (5400, "1 h 30 min"),
    0.5: (0.5, "0.5 s"), 90_061: (90_061, "1 d 1 h 1 min 1 s"),
}  # fmt: skip


def test_durations_are_read_and_written_as_people_do() -> None:
    for text, (seconds, written) in DURATIONS.items():
        spec = parse_spec({"name": "n", "recipe": "r.py", "refresh": {"prepare": text}})
        assert spec.refresh["prepare"].total_seconds() == seconds, text
        assert parse_spec(json.loads(json.dumps(spec.model_dump(mode="json")))).refresh == spec.refresh, text
        assert describe(timedelta(seconds=seconds)) == written, text


def test_what_is_not_a_duration_is_refused_in_words() -> None:
    rows: list[tuple[Any, str]] = [(value, "This is not a duration.") for value in NO_DURATIONS]
    rows += [("-1d", NOT_POSITIVE), (0, NOT_POSITIVE), (float("nan"), NOT_FINITE), ("1e400", NOT_FINITE)]
    for value, problem in (*rows, ("1000000d", "The duration must be below a hundred years.")):
        with pytest.raises(ConfigError) as refused:
            parse_spec({"name": "n", "recipe": "r.py", "refresh": {"prepare": value}})
        assert (refused.value.message, refused.value.field) == (problem, "refresh.prepare"), value
        assert "1d" in str(refused.value.remedy), value


def test_ages_are_those_of_stages_by_either_name(tmp_path: Path) -> None:
    path = toy.project(tmp_path)
    for refresh, remedy in (("{prepar: 1d}", "prepare"), ("{prepare: 1d, prepare-data: 2d}", "Keep refresh.prepare.")):
        path.write_text(f"{toy.SPEC}\nrefresh: {refresh}\n")
        with pytest.raises(ConfigError) as refused:
            load_spec(path)
        assert remedy in str(refused.value.remedy)
    path.write_text(f"{toy.SPEC}\nrefresh: {{prepare-data: 12h, train: 1w}}\n")
    ages = {name: str(age) for name, age in load_spec(path).max_ages().items()}
    assert ages == {"prepare-data": "12 h (refresh.prepare)", "train": "7 d (refresh.train)"}
    assert Plan.of(load_spec(path)).reasons["prepare-data"].reason == "never run before"
