"""The golden test: a run that was stopped and resumed ends, bit for bit, like one that was not."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.toys import Augmented, Classifier, StatefulStream, Stream, classification_rows
from tests.support.training import Note, StopAt, accuracy, assert_equal, final_state, preempted_at, trainer
from trainer_lib import EarlyStoppingCallback, Trainer, TrainerCallback
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, read_commit, write_commit
from trainer_lib.storage.remote import RemoteBackend

ROWS = classification_rows(22)
#: 22 samples: the third step of each epoch has 6 of 8, in uneven micro-batches.
EVERYTHING: dict[str, Any] = {"num_train_epochs": 3, "gradient_accumulation_steps": 2}
EVERYTHING |= {"lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_strategy": "steps", "logging_steps": 2}
EVERYTHING |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
SHORT: dict[str, Any] = {**EVERYTHING, "eval_strategy": "no"}


def run(folder: Path, *, stop: int | None = None, event: str = "on_step_end", **given: Any) -> Trainer:
    """Train with everything on; with `stop`, be stopped at that step and resume in a fresh Trainer."""
    settings = {**EVERYTHING, "eval_dataset": ROWS[:7], "compute_metrics": accuracy, **given}
    callbacks, data = settings.pop("callbacks", list), settings.pop("data", lambda: ROWS)
    reached = settings.pop("reached", stop)

    def fresh(*extra: TrainerCallback) -> Trainer:
        return trainer(folder, data(), callbacks=[*callbacks(), *extra], **settings)

    if stop is None:
        result = fresh()
        result.train()
        return result
    assert preempted_at(fresh(StopAt(stop, event))) == reached
    result = fresh()
    result.train(resume_from_checkpoint=True)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run with everything on ends with, when nobody stops it."""
    return final_state(run(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """A short run that ended, and its folder, in which nothing is trained."""
    folder = tmp_path_factory.mktemp("finished")
    one = trainer(folder, ROWS, **SHORT)
    one.train(resume_from_checkpoint="auto")
    return folder, one


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    trainer(folder, ROWS, **SHORT, save_only_model=True).train()
    return folder


@pytest.mark.parametrize(
    ("stop", "event"),
    [
        *((step, "on_step_end") for step in (1, 2, 3, 6, 8)),  # before, at and after saves, logs, evaluations, epochs
        *((4, "on_step_begin"), (4, "on_substep_end"), (3, "on_prediction_step"), (3, "on_evaluate"), (4, "on_save")),
    ],
)
def test_stopped_and_resumed_anywhere_it_ends_the_same(
    stop: int, event: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    reached = stop + (event in ("on_step_begin", "on_substep_end"))
    assert_equal(whole, final_state(run(tmp_path, stop=stop, event=event, reached=reached)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_mixed_precision_with_the_loss_scaler_and_random_augmentation(precision: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {precision: True, "data": lambda: Augmented(ROWS)}
    whole = run(tmp_path / "whole", **given)
    assert (whole._trainflow.engine.precision.scaler_state() is not None) == (precision == "fp16")
    assert_equal(final_state(whole), final_state(run(tmp_path / "cut", stop=5, **given)))


@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_of_a_stream(stream: type[Stream], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"data": lambda: stream(ROWS), "max_steps": 9}
    whole = final_state(run(tmp_path / "whole", **given))
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        assert_equal(whole, final_state(run(tmp_path / "cut", stop=5, **given)))
    assert ("reading and discarding 16 samples" in caplog.text) == (stream is Stream)


def test_the_best_model_is_found_again(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    given |= {"callbacks": lambda: [EarlyStoppingCallback(3)], "learning_rate": 0.3}
    whole, cut = run(tmp_path / "whole", **given), run(tmp_path / "cut", stop=5, **given)
    assert_equal(final_state(whole), final_state(cut))
    assert whole.state.best_model_checkpoint is not None
    assert Path(whole.state.best_model_checkpoint).is_dir()


def test_what_can_be_resumed_from(finished: tuple[Path, Trainer], tmp_path: Path) -> None:
    folder, whole = finished
    with pytest.raises(ConfigError, match=r'resume_from_checkpoint = True: No checkpoint is in .*"auto"'):
        trainer(tmp_path, ROWS, **SHORT).train(resume_from_checkpoint=True)
    by_url = trainer(tmp_path / "other", ROWS, **SHORT)
    by_url.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert_equal(final_state(whole), final_state(by_url))
    by_argument = trainer(tmp_path / "other", ROWS, **SHORT, resume_from_checkpoint=True)
    by_argument.train()
    assert by_argument.state.global_step == 9
    with pytest.raises(ConfigError, match="no committed checkpoint: it is empty or does not exist"):
        trainer(tmp_path / "third", ROWS, **SHORT).train(str(folder / "checkpoint-3"))


def test_a_finished_run_can_be_prolonged(tmp_path: Path) -> None:
    given: dict[str, Any] = {**SHORT, "lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer(tmp_path / "two", ROWS, **{**given, "num_train_epochs": 2}).train()
    longer = trainer(tmp_path / "two", ROWS, **given)
    longer.train("auto")
    whole = trainer(tmp_path / "three", ROWS, **given)
    whole.train()
    assert_equal(final_state(whole), final_state(longer))


def test_another_model_another_batch_or_weights_alone_are_refused(
    finished: tuple[Path, Trainer], weights_alone: Path, tmp_path: Path
) -> None:
    folder, _ = finished
    imported = Store.open(shutil.copytree(folder, tmp_path / "imported") / "checkpoint-9")
    commit = read_commit(imported) or pytest.fail("it is committed")
    imported.delete(COMMIT)
    write_commit(imported, "checkpoint", commit.files, {**commit.meta, "optimizer": None})
    with pytest.raises(ConfigError, match=r"another shape for .*body\.bias|has another shape"):
        torch.manual_seed(0)
        trainer(folder, ROWS, model=Classifier(features=6, classes=4), **SHORT).train(True)
    with pytest.raises(ConfigError, match="global_batch_size = 4: The global batch was 8 when"):
        trainer(folder, ROWS, **{**SHORT, "gradient_accumulation_steps": 1}).train(True)
    for own in (torch.optim.SGD, torch.optim.RAdam, torch.optim.Adamax):
        with pytest.raises(ConfigError, match=f"optimizer = {own.__name__}: The checkpoint holds the state of AdamW"):
            trainer(folder, ROWS, optimizer_cls_and_kwargs=(own, {"lr": 0.01}), **SHORT).train(True)
        with pytest.raises(ConfigError, match=f"optimizer = {own.__name__}: The .* state of an optimizer with amsgrad"):
            trainer(tmp_path / "imported", ROWS, optimizer_cls_and_kwargs=(own, {"lr": 0.01}), **SHORT).train(True)
    trainer(tmp_path / "imported", ROWS, **SHORT).train(True)
    with pytest.raises(ConfigError, match=r"holds only a model .*Give True or its URL to resume with a new optimizer"):
        trainer(weights_alone, ROWS, **SHORT).train("auto")


def test_weights_alone_are_resumed_with_a_new_optimizer_where_that_is_asked_for(
    finished: tuple[Path, Trainer], weights_alone: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, whole = weights_alone / "checkpoint-2", finished[1]

    def look(state: Any, model: Any, optimizer: Any, **_: Any) -> tuple[int, dict[str, torch.Tensor], int]:
        return state.global_step, {n: v.clone() for n, v in model.state_dict().items()}, len(optimizer.state)

    beginning = Note("on_train_begin", look)
    one = trainer(tmp_path, ROWS, callbacks=[beginning], **SHORT)
    one.train(str(place))
    [(step, weights, states)] = beginning.kept
    assert (step, states) == (2, 0)
    saved = load_file(place / "model.safetensors")
    assert saved.keys() == weights.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)
    assert f"{place} holds only a model (save_only_model): optimizer, loss scale" in caplog.text
    assert one.state.global_step == whole.state.global_step
    rates = [[entry.get("learning_rate") for entry in run.state.log_history] for run in (one, whole)]
    assert rates[0] == rates[1]


def test_changed_arguments_are_told_and_data_may_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preempted_at(trainer(tmp_path, ROWS, callbacks=[StopAt(5)], **SHORT))
    data = Augmented(ROWS)
    resumed = trainer(tmp_path, data, **{**SHORT, "max_grad_norm": 0.5}, ignore_data_skip=True)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        resumed.train(True)
    assert "max_grad_norm was 1.0 when the checkpoint was written, and is 0.5 now" in caplog.text
    assert resumed.state.global_step == 9
    assert len(data.read) > 2 * 22 - 16


def test_an_earlier_runs_checkpoints_are_not_mixed_with_a_new_ones(
    finished: tuple[Path, Trainer], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    with pytest.raises(ConfigError, match="The folder holds checkpoints of an earlier run"):
        trainer(folder, ROWS, **SHORT).train()
    trainer(folder, ROWS, **{**SHORT, "num_train_epochs": 1}, overwrite_output_dir=True).train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_each_file_is_read_once_from_a_remote_store(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://read-once/run"
    preempted_at(trainer(url, ROWS, callbacks=[StopAt(5)], **SHORT))
    opened: Counter[str] = Counter()
    real = RemoteBackend.open_read

    def counted(self: Any, rel: str) -> Any:
        opened[self.path(rel).partition("checkpoint-5/")[2]] += 1
        return real(self, rel)

    monkeypatch.setattr(RemoteBackend, "open_read", counted)
    trainer(url, ROWS, **SHORT).train("auto")
    for name in ("", COMMIT, "WRITING.json"):  # "": other folders
        opened.pop(name, None)
    assert {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "rng/rank-00000.json"} <= opened.keys()
    assert {name: count for name, count in opened.items() if count > 1} == {}


class Untouched(Trainer):
    loaded: list[str]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.__dict__.setdefault("loaded", []).append(resume_from_checkpoint.rpartition("/")[2])
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["model.safetensors", "data.json"])  # all others: unit/checkpoint
def test_damage_is_found_before_anything_is_taken_up(
    file: str, whole: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**EVERYTHING, "eval_dataset": ROWS[:7], "compute_metrics": accuracy}
    preempted_at(trainer(tmp_path, ROWS, callbacks=[StopAt(5)], **settings))
    for step in (5, 4):
        flip(tmp_path / f"checkpoint-{step}" / file)
    with pytest.raises(DamagedError, match=re.escape(file)):  # one that was named is not replaced by another
        trainer(tmp_path, ROWS, cls=Untouched, **settings).train(str(tmp_path / "checkpoint-5"))
    assert (tmp_path / "checkpoint-5" / COMMIT).exists()
    resumed = trainer(tmp_path, ROWS, cls=Untouched, **settings)
    assert isinstance(resumed, Untouched)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        resumed.train("auto")
    assert resumed.loaded == ["checkpoint-2"]
    for step in (5, 4):
        assert f"checkpoint-{step} is damaged and will not be used: {file}: " in caplog.text
    assert_equal(whole, final_state(resumed))
