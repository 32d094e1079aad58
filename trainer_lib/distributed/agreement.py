"""Run work on every rank so that all ranks fail when one does; recognise the loss of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from trainer_lib.errors import InfrastructureError, TrainflowError, first_line, from_exception, is_out_of_memory

if TYPE_CHECKING:
    from trainer_lib.distributed.communicator import Communicator

Result = TypeVar("Result")


def run_on_all_ranks(comm: Communicator, work: Callable[[], Result]) -> Result:
    """Run `work` on every rank, and return its result or raise the error of the lowest rank that failed. Collective."""
    failure: TrainflowError | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:
        failure = from_exception(error, rank=comm.rank)
    # Every rank comes here, also one whose work failed: none waits for a message that never arrives.
    comm.agree(failure)
    return cast("Result", result)


# Classes of torch.distributed by name (no torch is imported here), and what gloo and NCCL write into a RuntimeError.
_LOST_CLASSES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TIMEOUT_TEXTS = ("timed out waiting", "application timeout caused pair closure", "collective operation timeout")
_LOST_TEXTS = (
    *_TIMEOUT_TEXTS,
    *("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout"),
    *("gloo/transport", "gloo/rendezvous", "nccl error"),
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective raised `error`, or what it was raised from, because another rank is gone: not a cause."""
    if isinstance(error, TrainflowError):
        cause = error.__cause__
        return isinstance(error, InfrastructureError) and cause is not None and is_lost_peer(cause)
    if is_out_of_memory(error):  # NCCL reports it as an error of its own
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _LOST_CLASSES) or ("RuntimeError" in names and any(sign in text for sign in _LOST_TEXTS))


def is_collective_timeout(error: BaseException) -> bool:
    """Return whether a collective waited in vain for a rank that is still there, as far as its error says."""
    if isinstance(error, TrainflowError):
        cause = error.__cause__
        return is_lost_peer(error) and cause is not None and is_collective_timeout(cause)
    return is_lost_peer(error) and any(sign in str(error).lower() for sign in _TIMEOUT_TEXTS)


def lost_peer_error(error: BaseException, *, rank: int) -> InfrastructureError | None:
    """Return the typed failure when a collective raised `error` because another rank is gone; None otherwise."""
    if isinstance(error, TrainflowError) or not is_lost_peer(error):
        return None
    what = f"Another process of this job ended or stopped answering: {first_line(error)}"
    return InfrastructureError(what, rank=rank, remedy="Look at the failure of the process that ended first.")
