"""Doing something on every rank so that all of them fail when one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from trainer_lib.errors import TrainflowError, from_exception

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
