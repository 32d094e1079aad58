"""What ranks say to each other arrives whole, and a failure on one is a failure on all."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.support.distributed import RemoteFailure, run_distributed
from tests.support.machine import free_port
from trainer_lib import TrainingArguments
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError, DataError

SETTINGS = TrainingArguments("out", use_cpu=True, ddp_timeout=30)


def conversation(of_devices: bool) -> None:
    if of_devices:  # as accelerate forms a group on GPUs: without a side for the CPU
        torch.distributed.init_process_group("cuda:gloo")
    comm = distributed.init(SETTINGS)
    rank = comm.rank
    assert distributed.init(SETTINGS) is comm
    comm.barrier()
    texts = comm.gather_json({"rank": rank, "text": "é" * rank})
    assert texts == (None if rank else [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}])
    parts = comm.gather_bytes(b"x" * (rank * 3))
    assert rank == 1 or parts == [b"", b"xxx"]
    assert comm.broadcast_json({"from": rank}) == {"from": 0}
    assert [comm.any(rank == 1), comm.any(False), comm.any_later(rank == 0)()] == [True, False, True]
    assert comm.sum_ints([1, rank]) == [2, 1]
    assert comm.sum_tensor(torch.tensor([1.5, rank])).tolist() == [3.0, 1.0]
    gathered = comm.gather_tensor(torch.tensor([[rank], [7]]).T)
    assert [part.tolist() for part in gathered] == [[[0, 7]], [[1, 7]]]
    comm.agree(None)


@pytest.mark.parametrize("of_devices", [False, True])
def test_every_message_reaches_every_rank_also_where_the_callers_group_does_not_serve_the_cpu(of_devices: bool) -> None:
    run_distributed(conversation, 2, of_devices)


def several_groups(port: int | None) -> list[object]:
    if port is not None:  # without torchrun: the first rank is the host
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
    sums: list[object] = []
    for number in range(3):
        comm = distributed.init(SETTINGS)
        sums.append(comm.sum_ints([number + comm.rank]))
        distributed.shutdown()
    return sums


@pytest.mark.parametrize("is_torchruns", [True, False])
def test_a_group_may_follow_one_that_was_ended(is_torchruns: bool) -> None:
    """The ranks of a second group found the addresses of the first, and waited for ever."""
    port = None if is_torchruns else free_port()
    assert run_distributed(several_groups, 2, port, timeout_s=30.0) == [[[1], [3], [5]]] * 2


def one_fails() -> str:
    comm = distributed.init(SETTINGS)
    try:
        comm.agree(DataError("row 7 is empty", field="train") if comm.rank == 1 else None)
    except DataError as error:
        return f"{error.rank}: {error}"
    return "nothing was raised"


def test_a_failure_on_one_rank_is_raised_on_all_with_its_rank() -> None:
    assert run_distributed(one_fails, 2) == ["1: train: row 7 is empty"] * 2


def raises_typed() -> None:
    raise ConfigError("is wrong", field="seed", value=-1)


def dies() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(60)


def test_the_helper_brings_typed_exceptions_back_and_leaves_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="seed = -1: is wrong"):
        run_distributed(raises_typed, 2)
    with pytest.raises(RemoteFailure, match="rank 1 died with exit code 3"):
        run_distributed(dies, 2)


def test_a_world_of_one_answers_without_a_message() -> None:
    comm, messages = distributed.SingleProcess(), {name for name in vars(distributed.Communicator) if name[0] != "_"}
    assert messages <= vars(distributed.ProcessGroup).keys()  # none of these answers is inherited
    assert (comm.gather_json((1, 2)), comm.broadcast_json({"a": 1})) == ([[1, 2]], {"a": 1})
    assert comm.any_later(True)()
    with pytest.raises(DataError):
        comm.agree(DataError("no rows"))


@pytest.mark.parametrize(("name", "value"), [("RANK", "two"), ("RANK", "4"), ("WORLD_SIZE", "0")])
def test_a_contradictory_environment_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        distributed.ranks_from_environment()
