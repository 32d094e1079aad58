"""Work on every rank, and how a failed collective is told from the failure that caused it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainer_lib.agreement import is_lost_peer, lost_peer_error, run_on_all_ranks
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import CodeError, DataError, InfrastructureError


def test_the_result_is_returned_and_a_failure_is_typed() -> None:
    assert run_on_all_ranks(SingleProcess(), lambda: 3) == 3
    with pytest.raises(CodeError, match="KeyError: 'x'"):
        run_on_all_ranks(SingleProcess(), lambda: dict[str, int]()["x"])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("Broken pipe"),
        RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
        RuntimeError("NCCL Error 6: remote process exited"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1"),
        dist.DistNetworkError("The client socket has timed out after 300s"),
        dist.DistStoreError("wait timeout"),
    ],
)
def test_a_lost_peer_is_recognized_by_class_or_text(error: RuntimeError) -> None:
    assert is_lost_peer(error)
    typed = lost_peer_error(error, rank=2)
    assert isinstance(typed, InfrastructureError) and typed.rank == 2
    typed.__cause__ = error
    assert is_lost_peer(typed)  # as the Trainer raises it: still a consequence
    assert lost_peer_error(typed, rank=2) is None  # typed already


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("Connection closed by peer"),
        dist.DistBackendError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"),
        InfrastructureError("A worker could not be started."),
        DataError("It is empty."),
    ],
)
def test_a_cause_is_not_taken_for_a_lost_peer(error: Exception) -> None:
    assert not is_lost_peer(error)
    assert lost_peer_error(error, rank=0) is None
