"""Doing something on every rank so that all of them fail when one does; and telling that one of them is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from trainer_lib.errors import InfrastructureError, TrainflowError, from_exception

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator

Result = TypeVar("Result")


def together(comm: Communicator, work: Callable[[], Result]) -> Result:
    """This rank's result. When the work failed on any rank, every rank raises the first failing rank's error."""
    failure: TrainflowError | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:
        failure = from_exception(error, rank=comm.rank)
    comm.agree(failure)
    return cast("Result", result)


_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "socket timeout")


def lost_peer(error: BaseException, *, rank: int) -> InfrastructureError | None:
    """The typed failure when `error` is what a collective says after another rank has died; None for anything else."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not any(sign in text for sign in _LOST):
        return None
    return InfrastructureError(
        f"Another process of this job ended or stopped answering: {str(error).splitlines()[0]}",
        rank=rank,
        remedy="Look at the failure of the process that ended first.",
    )
