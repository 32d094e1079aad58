"""Resuming reads each file of a checkpoint once, knows of damage before it touches the Trainer, and goes one back."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.toys import classification_rows
from tests.support.training import StopAt, assert_equal, final_state, preempted_at, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.commit import COMMIT
from trainer_lib.errors import DamagedError, Preempted
from trainer_lib.storage.remote import RemoteBackend

ROWS = classification_rows(22)
GIVEN: dict[str, Any] = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
GIVEN |= {"save_steps": 2, "logging_strategy": "steps", "logging_steps": 1}


def test_each_file_is_read_once_from_a_remote_store(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://read-once/run"
    preempted_at(trainer(url, ROWS, callbacks=[StopAt(5)], **GIVEN))
    opened: Counter[str] = Counter()
    real = RemoteBackend.open_read

    def counted(self: Any, rel: str) -> Any:
        opened[self.path(rel).partition("checkpoint-5/")[2]] += 1
        return real(self, rel)

    monkeypatch.setattr(RemoteBackend, "open_read", counted)
    trainer(url, ROWS, **GIVEN).train("auto")
    opened.pop("", None)  # other folders
    for name in (COMMIT, "WRITING.json"):
        opened.pop(name, None)
    assert {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "rng/rank-00000.json"} <= opened.keys()
    assert {name: count for name, count in opened.items() if count > 1} == {}


class Untouched(Trainer):
    """Says what was loaded into it."""

    loaded: list[str]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.__dict__.setdefault("loaded", []).append(resume_from_checkpoint.rpartition("/")[2])
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["optimizer.safetensors", "rng/rank-00000.json", "scheduler.json"])
def test_damage_is_found_before_anything_is_taken_up(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trainer(tmp_path / "whole", ROWS, **GIVEN)
    whole.train()
    preempted_at(trainer(tmp_path / "cut", ROWS, callbacks=[StopAt(5)], **GIVEN))
    for step in (5, 4):
        flip(tmp_path / "cut" / f"checkpoint-{step}" / file)
    resumed = trainer(tmp_path / "cut", ROWS, cls=Untouched, **GIVEN)
    assert isinstance(resumed, Untouched)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        resumed.train("auto")
    assert resumed.loaded == ["checkpoint-2"]
    for step in (5, 4):
        assert f"checkpoint-{step} is damaged and will not be used: {file}: " in caplog.text
    assert_equal(final_state(whole), final_state(resumed))


def test_one_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    preempted_at(trainer(tmp_path, ROWS, callbacks=[StopAt(5)], **GIVEN))
    flip(tmp_path / "checkpoint-5" / "optimizer.safetensors")
    resumed = trainer(tmp_path, ROWS, cls=Untouched, **GIVEN)
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors"):
        resumed.train(str(tmp_path / "checkpoint-5"))
    assert "loaded" not in resumed.__dict__
    assert (tmp_path / "checkpoint-5" / COMMIT).exists()


class Beginning(TrainerCallback):
    """Notes the step that training begins from."""

    step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def on_ranks(folder: str, stop: int | None) -> tuple[int, dict[str, Any] | None]:
    """One rank: trains from wherever it stands, until `stop` or to the end; where it began, and what it ended with."""
    beginning = Beginning()
    one = trainer(folder, ROWS, callbacks=[beginning, *([StopAt(stop)] if stop else [])], **GIVEN)
    with contextlib.suppress(Preempted):
        one.train("auto")
        return beginning.step, final_state(one)
    return beginning.step, None


def test_what_one_rank_finds_damaged_no_rank_uses(tmp_path: Path) -> None:
    whole = run_distributed(on_ranks, 2, str(tmp_path / "whole"), None)
    assert run_distributed(on_ranks, 2, str(tmp_path / "cut"), 3) == [(0, None), (0, None)]
    steps = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "cut").glob("checkpoint-*"))
    flip(tmp_path / "cut" / f"checkpoint-{steps[-1]}" / "rng" / "rank-00001.json")  # the first rank does not need it
    resumed = run_distributed(on_ranks, 2, str(tmp_path / "cut"), None)
    for (_, before), (first, after) in zip(whole, resumed, strict=True):
        assert first == steps[-2]
        assert before is not None and after is not None
        assert_equal(before, after)
