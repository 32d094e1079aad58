"""Run work on every rank so that all ranks fail when one does; recognise the loss of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from trainer_lib.errors import InfrastructureError, TrainflowError, from_exception

if TYPE_CHECKING:
    from trainer_lib.distributed import Communicator

Result = TypeVar("Result")


def run_on_all_ranks(comm: Communicator, work: Callable[[], Result]) -> Result:
    """Run `work` on every rank and return this rank's result. Collective.

    Raises:
        TrainflowError: on every rank, the error of the lowest rank whose work failed.
    """
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
    """Return the typed failure when `error` is what a collective raises after another rank died; None otherwise."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not any(sign in text for sign in _LOST):
        return None
    return InfrastructureError(
        f"Another process of this job ended or stopped answering: {str(error).splitlines()[0]}",
        rank=rank,
        remedy="Look at the failure of the process that ended first.",
    )
