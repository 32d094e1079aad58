"""A copy of the state that training cannot change any more; generators that go on where they were."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import Net, untrained
from trainer_lib.checkpoint.snapshot import HostCopy, freeze_snapshot
from trainer_lib.checkpoint.values import capture_rng, restore_rng
from trainer_lib.checkpoint.writer import BackgroundSaver
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError, OutOfMemoryError
from trainer_lib.storage import Store


def test_values_are_kept_whatever_happens_to_the_tensors() -> None:
    memory = HostCopy()
    weights = torch.arange(6.0).reshape(2, 3)
    live = {
        "plain": weights,
        "transposed": weights.t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "spread": torch.ones(1).expand(4),
        "empty": torch.empty(0, 3),
        "learned": torch.nn.Parameter(torch.ones(2)),
    }
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    taken = memory.copy_tensors(live)
    for tensor in live.values():
        tensor.detach().fill_(1) if tensor.dtype == torch.bool else tensor.detach().zero_()
    for name, tensor in taken.items():
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (live[name].dtype, live[name].shape, False)
        assert torch.equal(tensor, before[name]), name


def test_the_memory_is_one_copy_and_is_used_again() -> None:
    memory = HostCopy()
    first = memory.copy_tensors({"a": torch.ones(1000), "b": torch.ones(500)})["a"]
    size, where = first.untyped_storage().nbytes(), first.data_ptr()
    assert 6000 <= size < 6200
    assert memory.copy_tensors({"a": torch.zeros(1000), "b": torch.ones(500)})["a"].data_ptr() == where
    assert first.sum() == 0  # the same memory: the earlier copy is overwritten
    assert memory.copy_tensors({"a": torch.ones(10)})["a"].data_ptr() == where
    larger = memory.copy_tensors({"a": torch.ones(2000)})["a"]
    assert 8000 <= larger.untyped_storage().nbytes() < 8200 and larger.sum() == 2000
    net = Net()
    taken = memory.copy_tensors(net.state_dict())
    assert taken["embed.weight"].data_ptr() == taken["head.weight"].data_ptr(), "tied weights stay one"
    assert taken["norm.weight"].data_ptr() != taken["norm.bias"].data_ptr()
    memory.close()
    assert memory.copy_tensors({"a": torch.ones(10)})["a"].untyped_storage().nbytes() < 200, "it was given back"


def test_more_than_there_is_is_an_error_that_says_how_much() -> None:
    memory = HostCopy()
    huge = torch.empty(1).expand(2**58)
    with pytest.raises(OutOfMemoryError, match=rf"no {2**60:,} bytes free.*save_async=False"):
        memory.copy_tensors({"a": huge})
    assert memory.copy_tensors({"a": torch.ones(2)})["a"].sum() == 2  # the next may fit


def test_the_rest_of_a_snapshot_is_kept_too_and_a_rank_keeps_what_it_writes() -> None:
    live, memory = untrained(2), HostCopy()
    other = freeze_snapshot(live, 1, memory)
    assert (other.rng, other.step) == (live.rng, 2)
    assert other.optimizer is None and not other.model
    live.data, live.trainer_state = {"source": {"at": [1]}}, {"log_history": [{"loss": 1.0}]}
    live.scheduler = {"base_lrs": [0.1], "betas": (0.9, 0.99)}
    frozen = freeze_snapshot(live, 0, memory)
    live.data["source"]["at"].append(2)
    live.trainer_state["log_history"].append({"loss": 2.0})
    live.scheduler["base_lrs"].append(0.2)
    assert frozen.data == {"source": {"at": [1]}} and frozen.trainer_state == {"log_history": [{"loss": 1.0}]}
    assert frozen.scheduler == {"base_lrs": [0.1], "betas": (0.9, 0.99)}


def test_what_cannot_be_written_is_refused_before_anything_runs_in_the_background(tmp_path: Path) -> None:
    comm = SingleProcess()
    saver = BackgroundSaver(comm, comm, timeout_s=1)
    with pytest.raises(ConfigError, match=r"data\.json: This part of the state cannot be written as JSON"):
        saver.start(Store.open(tmp_path), replace(untrained(2), data={"x": object()}), after_commit=lambda: None)
    assert not saver.is_busy
    assert list(tmp_path.iterdir()) == []


def test_whatever_ends_the_thread_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = SingleProcess()
    saver = BackgroundSaver(comm, comm, timeout_s=1)

    def fail() -> None:
        raise SystemExit(3)

    saver.start(Store.open(tmp_path), untrained(2), after_commit=fail)
    with pytest.raises(SystemExit):
        saver.finish()
    assert not saver.is_busy
    with pytest.raises(RuntimeError, match="No save is under way"):
        saver.finish()


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def draw() -> list[Any]:
    numbers = [random.random(), random.gauss(), random.randrange(10**12)]
    numbers += [np.random.rand(), np.random.randn(), int(np.random.randint(1 << 30))]
    return [
        *numbers,
        *torch.randn(5).tolist(),
        *torch.randperm(7).tolist(),
        torch.nn.functional.dropout(torch.ones(9)).tolist(),
    ]


def test_all_generators_go_on_where_they_were() -> None:
    random.gauss()  # Python and NumPy make normal numbers in pairs and keep the second: that is state as well
    np.random.randn()
    state = json.loads(json.dumps(capture_rng()))
    assert json.loads(json.dumps(capture_rng())) == state, "capturing draws nothing"
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != expected[0]

    restore_rng(state)

    assert [draw() for _ in range(3)] == expected
    restore_rng(state)
    assert draw() == expected[0]


@pytest.mark.parametrize(
    "change",
    [
        {"python": [1]},
        {"python": [3, [1, 2], None]},
        {"python": None},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]},
        {"numpy": ["Other", [1] * 624, 0, 0, 0.0]},
        {"numpy": ["MT19937", [-1] * 624, 0, 0, 0.0]},
        {"torch": "!!"},
        {"torch": ""},
        {"torch": "AAAA"},
        *("python", "numpy", "torch"),
    ],
)
def test_a_malformed_or_missing_state_is_damage(change: dict[str, Any] | str) -> None:
    state = capture_rng()
    if isinstance(change, str):
        del state[change]
    else:
        state |= change
    with pytest.raises(DamagedError) as caught:
        restore_rng(state)
    assert caught.value.field == "rng"
