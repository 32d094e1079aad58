"""What a plan says about length, room and time, what it finds that cannot work, and which launches it announces."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hub_server import HubServer
from tests.support.recorded import commit_facts
from tests.support.toy import project
from trainer_lib.errors import CodeError
from trainer_lib.launch import warm
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.footprint import Estimate, ModelSize, Probe
from trainer_lib.protocol.requests import PreparedSplit
from trainflow.flows.cli.commands.execution import describe_plan
from trainflow.flows.planning import full_plan
from trainflow.flows.planning.full_plan import Forecast, Length, Obstacle, find_obstacles, forecast
from trainflow.flows.planning.plan import Plan
from trainflow.flows.run_stages import expect_launches
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.tasks.stage import rehearsal
from trainflow.tasks.stage.facts import PrepareFacts

SIZE = ModelSize(10, 10, 40, 40, 80, 20, None, 40, 40)
ESTIMATE = Estimate(SIZE, process_bytes=1000, tokens_per_sample=3.0, device="cpu")
PROBE = Probe(10, 0.5, 2.0, 0.01, 1.5, 5000, 700, "cpu", overhead_s=3.0)
FACTS = PrepareFacts({"train": PreparedSplit(64), "test": PreparedSplit(16)})
ONE, TWO = LaunchConfig(kind="process", processes=1), LaunchConfig(kind="torchrun", processes=2)
LAUNCHES = {"prepare-data": ONE, "train": TWO, "evaluate": TWO, "push-to-hub": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"max_steps": 20}, (20, 160, 0, 5)),
        ({"max_steps": -1, "num_train_epochs": 2}, (16, 128, 0, 4)),
        ({"max_steps": -1, "num_train_epochs": 2, "global_batch_size": 60}, (4, 128, 0, 1)),
        ({"max_steps": -1, "global_batch_size": 60, "dataloader_drop_last": True}, (3, 180, 0, 1)),
        ({"max_steps": 20, "eval_strategy": "epoch", "save_strategy": "no"}, (20, 160, 3, 0)),
        ({"max_steps": 20, "eval_strategy": "steps", "eval_steps": 0.5, "eval_on_start": True}, (20, 160, 3, 5)),
    ],
)
def test_the_length_follows_from_rows_and_arguments(
    path: Path, args: dict[str, Any], expected: tuple[int, int, int, int]
) -> None:
    words = (f"train.args.{name}={value}" for name, value in args.items())
    spec = load_spec(path, ("train.eval_split=test", *words))
    found = Length.of(spec.resolver.arguments(spec.train.args), FACTS, spec.train, 1)
    assert (found.steps, found.samples, found.evaluations, found.saves) == expected
    assert found.evaluated_rows == 16


def prepared(spec: PipelineSpec) -> Plan:
    """A plan of a spec whose data is committed."""
    commit_facts(spec.storage, Plan.of(spec).key_of("prepare-data", {}), FACTS)
    return Plan.of(spec)


def planned(plan: Plan, *found: Any, error: CodeError | None = None) -> Forecast:
    def ask(_: object, made: Forecast) -> None:
        (made.estimate, made.probe), made.error = (*found, None, None)[:2], error

    return forecast(plan, ask=ask)


def test_without_prepared_data_it_says_what_is_missing(path: Path) -> None:
    plan = Plan.of(load_spec(path))
    found = planned(plan)
    assert found.length is None
    [sentence] = found.missing
    assert sentence.startswith("The data is not prepared (never run before)")
    assert "trainflow run SPEC --only prepare" in sentence
    assert find_obstacles(plan, found) == []
    json.dumps(found.to_dict())


def test_time_memory_and_room_follow_from_a_probe(path: Path) -> None:
    spec = load_spec(path, ("train.eval_split=test", "train.args.eval_strategy=epoch", "train.args.save_total_limit=1"))
    found = planned(prepared(spec), ESTIMATE, PROBE)
    # 8 steps, an evaluation of 16 rows, two saves.
    assert found.seconds == pytest.approx(3.0 + 8 * 0.5 + 2.0 + 16 * 0.01 + 2 * 1.5)
    assert (found.peak_bytes, found.tokens, found.strategy) == (700, 64 * 3, "single")
    assert found.room is not None
    assert found.room.needed_bytes == 2 * 5000 + 2 * 40
    # Without one memory is worked out, and the time is not known.
    plan = prepared(load_spec(path))
    found = planned(plan, ESTIMATE)
    assert found.own is not None
    assert (found.peak_bytes, found.seconds) == (1000 + (found.own.total or 0), None)
    # The plan shows what each rank writes.
    lines = [line.plain for line in describe_plan(plan, found, [])]
    [names] = [re.split(" {2,}", line.strip()) for line in lines if "DDP" in line]
    [written] = [re.split(" {2,}", line.strip()) for line in lines if line.startswith("    writes ")]
    sizes = dict(zip(names, written[1:], strict=True))
    assert (sizes["DDP"], sizes["FSDP"]) == ("120 B", "60 B ×2")
    assert any("not known: --probe measures a few steps" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "written", "writers"),
    [
        ((), 60, 2),
        (("train.args.fsdp_config={state_dict_type: FULL_STATE_DICT}",), 120, 1),
        (("train.args.fsdp=hybrid_shard", "train.args.fsdp_config={hybrid_group_size: 1}"), 120, 1),
        (("train.args.fsdp=hybrid_shard",), 60, 2),
        (("train.args.save_only_model=true",), 20, 2),
    ],
)
def test_what_ranks_write_follows_from_the_arguments(
    path: Path, overrides: tuple[str, ...], written: int, writers: int
) -> None:
    spec = load_spec(path, ("train.launch={kind: torchrun, processes: 2}", "train.args.fsdp=full_shard", *overrides))
    found = planned(prepared(spec), ESTIMATE)
    assert found.own is not None
    assert (found.own.checkpoint, found.own.writers) == (written, writers)
    [row] = [each for each in found.to_dict()["ranks"] if each["strategy"] == "fsdp"]
    assert (row["checkpoint"], row["writers"]) == (written, writers)
    assert found.room is not None
    assert found.room.checkpoint_bytes == written * writers + 20_000


def obstacles(path: Path, *overrides: str, found: tuple[Any, ...] = (ESTIMATE,), **more: Any) -> list[Obstacle]:
    plan = prepared(load_spec(path, overrides))
    return find_obstacles(plan, planned(plan, *found, **more))


def test_a_split_that_does_not_exist_is_found_and_what_the_recipe_raises(path: Path) -> None:
    [found] = obstacles(path, "predict.split=tset")
    assert found.field == "predict.split"
    assert "Did you mean 'test'?" in str(found.remedy)
    # A training split ends the forecast.
    ended = obstacles(path, "train.train_split=trian", found=(), error=CodeError("unreached"))
    assert [each.field for each in ended] == ["train.train_split"]
    error = CodeError("KeyError: 'width'", field="build_model", remedy="Mend it.")
    [raised] = obstacles(path, found=(), error=error)
    assert (raised.what, raised.remedy) == ("KeyError: 'width'", "Mend it.")


def test_a_disk_that_is_too_small_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real._replace(free=1000))
    [found] = obstacles(path, found=(ESTIMATE, PROBE))
    assert found.field == "storage"
    assert "2 checkpoints of 5 kB, and the model), and 1 kB are free" in found.what


def test_a_hub_that_refuses_or_does_not_answer_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = "publish.to=hf://acme/model"
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert obstacles(path, publish) == []
        [absent] = obstacles(path, publish, "train.model.base=hf://acme/base")
        assert absent.field == "train.model.base" and "(404)" in absent.what
        monkeypatch.delenv("HF_TOKEN")
        [stranger] = obstacles(path, publish)
        assert stranger.field == "publish.to"
        hub.fault = lambda method, target: "drop"
        [silent] = obstacles(path, publish)
        assert "cannot be reached" in silent.what


def test_a_folder_that_cannot_be_published_to_is_found_and_nothing_is_left(path: Path, tmp_path: Path) -> None:
    assert obstacles(path, f"publish.to={tmp_path / 'new' / 'models'}") == []
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("in the way")
    for target in (tmp_path / "file", tmp_path / "file" / "models", Path("/proc/models")):
        [found] = obstacles(path, f"publish.to={target}")
        assert (found.field, found.value) == ("publish.to", str(target))
        assert found.what.startswith("Cannot write there: ")
        assert found.remedy
    assert obstacles(path, f"publish.to={tmp_path / 'file'}", "publish.enabled=false") == []


def test_a_store_that_does_not_answer_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "MAX_ATTEMPTS": "1"}
    for name, value in away.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    [store] = obstacles(path, "publish.to=s3://bucket/models")
    assert (store.field, store.value) == ("publish.to", "s3://bucket/models")
    assert "does not answer" in store.what


# -- launches that are announced --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "wanted", "force", "announced"),
    [
        (set(), set(LAUNCHES), set(), [[("train", TWO), ("evaluate", TWO)]]),
        ({"prepare-data"}, {"prepare-data", "train"}, set(), [[("train", TWO)]]),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, {"train"}, [[("train", TWO)]]),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, set(), []),
    ],
)
def test_stages_that_will_run_are_announced(
    hits: set[str], wanted: set[str], force: set[str], announced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(warm, "expect", launches.append)
    plan: Any = SimpleNamespace(
        reasons={name: SimpleNamespace(hit=name in hits) for name in LAUNCHES},
        stages={n: SimpleNamespace(launch=launch, stage=SimpleNamespace(name=n)) for n, launch in LAUNCHES.items()},
        is_wanted=lambda name: name in wanted,
        context=SimpleNamespace(force=force),
    )
    expect_launches(plan)
    assert launches == announced


def test_a_worker_alone_has_the_threads_of_one_of_all_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert rehearsal._alone(LaunchConfig(kind="torchrun", processes=2, threads=3)).threads == 3
    assert rehearsal._alone(LaunchConfig(kind="torchrun", processes=2, env={"OMP_NUM_THREADS": "5"})).threads == 5
    here, elsewhere = LaunchConfig(kind="in_process", processes=1), LaunchConfig(engine="slurm", processes="auto")
    assert (rehearsal._alone(here).threads, rehearsal._alone(elsewhere).threads) == (None, None)


@pytest.mark.parametrize(("probe", "done"), [(True, [["estimate", "probe"], "asked"]), (False, ["asked"])])
def test_a_plan_with_a_probe_announces_its_launches_first(
    path: Path, monkeypatch: pytest.MonkeyPatch, probe: bool, done: list[Any]
) -> None:
    calls: list[Any] = []

    monkeypatch.setattr(warm, "expect", lambda launches: calls.append([verb for verb, _ in launches]))
    monkeypatch.setattr(full_plan, "_ask", lambda *_, **__: calls.append("asked"))
    full_plan.plan_in_full(prepared(load_spec(path)), probe=probe)
    assert calls == done
