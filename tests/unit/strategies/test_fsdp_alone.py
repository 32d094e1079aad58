"""FSDP on the one process that a launcher started: served, for a machine with one device, and said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store

ROWS = classification_rows(8)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield
    distributed.shutdown()


def test_one_process_trains_and_says_that_nothing_is_divided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = trainer(tmp_path, ROWS, fsdp="full_shard", max_steps=1)
    one.train()
    assert all(isinstance(each, DTensor) for each in one.model.parameters())
    assert "FSDP runs with one process, so nothing is sharded" in caplog.text


def test_blocks_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, fsdp="full_shard", max_steps=1, save_strategy="steps", save_steps=1).train()
    other = trainer(tmp_path, ROWS, model=Classifier(classes=4), fsdp="full_shard", max_steps=2)
    with pytest.raises(ConfigError, match=r"has another shape for head\.bias, head\.weight"):
        other.train(resume_from_checkpoint=True)


def test_a_checkpoint_in_blocks_is_pushed_as_one_file(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    given = {"push_to_hub": True, "hub_model_id": hub.as_uri(), "hub_strategy": "every_save"}
    torch.manual_seed(0)
    saved = {"save_strategy": "steps", "save_steps": 1}
    one = trainer(tmp_path / "out", ROWS, fsdp="full_shard", max_steps=2, **given, **saved)  # type: ignore[arg-type]
    one.train()
    at_first = load_checkpoint(Store.open(tmp_path / "out"), "checkpoint-1", SingleProcess()).read_model()
    at_last = one._trainflow.engine.strategy.model_state(one.model)
    pushed = [load_file(path) for path in hub.rglob("model.safetensors")]
    for state in (at_first, at_last):
        assert any(all(torch.equal(value, file[name]) for name, value in state.items()) for file in pushed)
    assert not list(hub.rglob("shards*"))
