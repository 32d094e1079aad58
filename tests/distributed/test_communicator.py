"""What ranks say to each other arrives whole, and a failure on one is a failure on all."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.support.chaos_services import free_port
from tests.support.distributed import RemoteFailure, run_distributed
from trainer_lib import TrainingArguments, distributed
from trainer_lib.errors import ConfigError, DataError

SETTINGS = TrainingArguments("out", use_cpu=True, ddp_timeout=30)


def conversation() -> dict[str, object]:
    comm = distributed.init(SETTINGS)
    assert distributed.init(SETTINGS) is comm
    comm.barrier()
    heard = {
        "rank": comm.rank,
        "gathered": comm.gather_json({"rank": comm.rank, "text": "é" * comm.rank}),
        "bytes": comm.gather_bytes(b"x" * (comm.rank * 3)),
        "broadcast": comm.broadcast_json({"from": comm.rank}),
        "any": [comm.any(comm.rank == 1), comm.any(False), comm.any_later(comm.rank == 0).result()],
        "ints": comm.sum_ints([1, comm.rank]),
        "tensor": comm.sum_tensor(torch.tensor([1.5, comm.rank])).tolist(),
        "tensors": [each.tolist() for each in comm.gather_tensor(torch.tensor([[comm.rank], [7]]).T)],
    }
    comm.agree(None)
    return heard


def test_every_message_reaches_every_rank() -> None:
    zero, one = run_distributed(conversation, 2)
    assert zero["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
    assert one["gathered"] is None
    assert zero["bytes"] == [b"", b"xxx"]
    for heard in (zero, one):
        assert heard["broadcast"] == {"from": 0}
        assert heard["any"] == [True, False, True]
        assert heard["ints"] == [2, 1]
        assert heard["tensor"] == [3.0, 1.0]
        assert heard["tensors"] == [[[0, 7]], [[1, 7]]]


def within_a_group_of_devices_alone() -> dict[str, object]:
    torch.distributed.init_process_group("cuda:gloo")  # as accelerate forms one on GPUs: without a side for the CPU
    return conversation()


def test_messages_have_a_group_of_their_own_where_the_callers_does_not_serve_the_cpu() -> None:
    zero, one = run_distributed(within_a_group_of_devices_alone, 2)
    assert (zero["ints"], one["ints"]) == ([2, 1], [2, 1])
    assert zero["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]


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
    comm = distributed.SingleProcess()
    assert comm.gather_json((1, 2)) == [[1, 2]]
    assert comm.broadcast_json({"a": 1}) == {"a": 1}
    assert comm.any_later(True).result()
    with pytest.raises(DataError):
        comm.agree(DataError("no rows"))


@pytest.mark.parametrize(("name", "value"), [("RANK", "two"), ("RANK", "4"), ("WORLD_SIZE", "0")])
def test_a_contradictory_environment_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        distributed.ranks_from_environment()
