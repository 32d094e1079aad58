"""Which checkpoints a follower evaluates, in which order, once each; and which one it keeps."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_untrained, steps
from tests.support.following import LOSSES, FollowedStage, measure
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import CodeError, ConfigError, DamagedError, InfrastructureError, OutOfMemoryError
from trainer_lib.locks.removal import keep_checkpoint, list_readers, withdraw_if_unread
from trainer_lib.protocol.requests import CheckpointMetrics, EvaluateCheckpointRequest
from trainflow.tasks.configs import TrainConfig
from trainflow.tasks.follow import Evaluation, Evaluations, Standard, check_settings, keep_best


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FollowedStage:
    return FollowedStage(tmp_path, monkeypatch)


def test_a_greater_metric_is_better_where_the_spec_says_so_and_one_that_is_not_measured_is_refused(
    project: FollowedStage,
) -> None:
    project.save(1, 2)
    project.follower(metric_for_best_model="loss", greater_is_better=True).work()
    assert project.kept == ["checkpoint-1"]
    project.save(3)
    with pytest.raises(ConfigError, match="gave only eval_loss") as error:
        project.follower(metric_for_best_model="accuracy").work()
    assert error.value.field == "train.args.metric_for_best_model"


def test_a_checkpoint_is_protected_while_it_is_evaluated_with_the_weights_of_training(project: FollowedStage) -> None:
    def look(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
        assert len(list_readers(project.root.child("checkpoint-1"))) == 1
        assert not withdraw_if_unread(project.root.child("checkpoint-1"))
        return measure(request)

    project.save(1)
    project.measure = look
    assert project.follower(bf16=True, bf16_full_eval=True, report_to="tensorboard").work() == 1
    [request] = project.asked
    assert request.args["bf16"] is True
    assert (request.args["bf16_full_eval"], request.args["report_to"], request.tracking) == (False, "none", False)


def test_what_the_training_removes_first_is_named_and_the_next_one_follows(project: FollowedStage) -> None:
    project.save(1, 2, 3)

    def remove(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
        withdraw_if_unread(project.root.child("checkpoint-2"))
        return measure(request)

    project.measure = remove
    assert project.follower().work() == 2
    assert [step for step, _ in project.evaluated] == [1, 3]
    assert project.said == ["The checkpoint of step 2 was removed by the training before it could be evaluated."]


def test_a_checkpoint_that_was_written_again_is_evaluated_again(project: FollowedStage) -> None:
    """After a loss spike a training goes back, and saves other weights under the same name."""
    project.save(1, 2)
    follower = project.follower()
    follower.work()
    withdraw_if_unread(project.root.child("checkpoint-2"), even_kept=True)
    save_untrained(project.root, 2, data={"epoch": 0, "position": 99})
    assert follower.work() == 1
    assert [each.step for each in Evaluations(project.stage).read()] == [1, 2, 2]


def test_a_damaged_checkpoint_is_named_and_the_others_are_evaluated(project: FollowedStage) -> None:
    def fail(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
        if request.checkpoint.endswith("-1"):
            raise DamagedError("its digest differs.", field=f"{request.checkpoint}/model.safetensors")
        return measure(request)

    project.save(1, 2)
    project.measure = fail
    follower = project.follower()
    assert (follower.work(), follower.work()) == (1, 0)
    assert len(follower.damaged) == 1
    assert "checkpoint-1/model.safetensors" in project.said[0]


def test_an_outage_is_tried_again_and_an_error_of_the_recipe_is_not(project: FollowedStage) -> None:
    failures: list[Exception] = [InfrastructureError("the worker vanished."), OutOfMemoryError("no memory.")]

    def fail(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
        if failures:
            raise failures.pop(0)
        return measure(request)

    project.save(1, 2)
    project.measure = fail
    assert project.follower(per_device_eval_batch_size=8).work() == 2
    assert [request.args["per_device_eval_batch_size"] for request in project.asked] == [8, 8, 4, 8]
    failures.append(CodeError("compute_metrics raised KeyError."))
    project.save(3)
    with pytest.raises(CodeError):
        project.follower().work()
    # Another process may try at once.
    project.measure = measure
    assert project.follower().work() == 1


def test_two_processes_share_the_work_and_one_waits_for_the_other_at_the_end(project: FollowedStage) -> None:
    project.save(1, 2)
    inside, release = threading.Event(), threading.Event()

    def hold(request: EvaluateCheckpointRequest) -> CheckpointMetrics:
        if request.checkpoint.endswith("-1"):
            inside.set()
            assert release.wait(20)
        return measure(request)

    project.measure = hold
    first, second = project.follower(), project.follower()
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(first.work()))
    thread.start()
    assert inside.wait(20)
    assert second.work() == 1  # the other one
    release.set()
    assert second.work(wait=True) == 0
    thread.join(20)
    assert counts == [1]
    assert sorted(step for step, _ in project.evaluated) == [1, 2]
    assert project.kept == ["checkpoint-2"]


def test_a_mark_of_what_another_process_has_just_measured_is_left(project: FollowedStage) -> None:
    """Its evaluation is not among those that were read: it may be the better one."""
    project.save(1, 2)
    lower = Standard("eval_loss", is_greater_better=False, is_chosen=False)
    known = [
        Evaluation(info.name, info.step, info.commit.content_digest, {"eval_loss": LOSSES[info.step]}, 0, 0.0)
        for info in sorted(list_checkpoints(project.root), key=lambda info: info.step)
    ]
    keep_checkpoint(project.root.child("checkpoint-2"), "by another process")
    keep_best(project.root, lower, known[:1])
    assert set(project.kept) == {"checkpoint-1", "checkpoint-2"}
    keep_best(project.root, lower, known)
    assert project.kept == ["checkpoint-2"]


def test_the_best_that_is_gone_is_followed_by_the_best_that_is_there(project: FollowedStage) -> None:
    project.save(1, 2, 3)
    follower = project.follower()
    follower.work()
    withdraw_if_unread(project.root.child("checkpoint-2"), even_kept=True)
    follower.begin()
    assert project.kept == ["checkpoint-3"]
    assert steps(project.root) == [3, 1]


@pytest.mark.parametrize(
    ("config", "field"),
    [({}, "train.eval_split"), ({"eval_split": "test", "args": {"optim": "schedule_free_adamw"}}, "train.args.optim")],
)
def test_what_cannot_be_followed_is_refused_first(config: dict[str, Any], field: str, project: FollowedStage) -> None:
    with pytest.raises(ConfigError) as error:
        check_settings(TrainConfig(**config), project.context)
    assert error.value.field == field
    assert error.value.remedy


@pytest.mark.parametrize("damage", [b'{"format": 1}', b"[" * 100_000, b"a digit", b"no seal"])
def test_a_damaged_record_is_named_and_one_of_an_earlier_version_counts(project: FollowedStage, damage: bytes) -> None:
    project.save(1)
    project.follower().work()
    [name] = [file.path for file in project.stage.child("follow").list() if file.path.endswith(".json")]
    written = project.stage.read_bytes(f"follow/{name}")
    loss = repr(LOSSES[1]).encode()
    assert loss in written
    if damage == b"no seal":
        unsealed = {key: value for key, value in json.loads(written).items() if key != "seal"}
        project.stage.write_bytes(f"follow/{name}", json.dumps(unsealed).encode())
        assert [each.step for each in Evaluations(project.stage).read()] == [1]
        return
    project.stage.write_bytes(f"follow/{name}", written.replace(loss, b"0.125") if damage == b"a digit" else damage)
    with pytest.raises(DamagedError, match="record of an evaluation") as error:
        project.follower().begin()
    assert str(error.value.field).endswith(name)
