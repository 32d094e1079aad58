"""The end of a process that trains with others: what its launcher is told, and how the group is left."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType

_failed = False


def prepare(leave_group: Callable[[], None]) -> None:
    """Have an orderly end leave the group, and a failure tell torchrun why. Later calls change nothing.

    A process that just ends with its group formed may be aborted by it, after all its work is done. One that fails
    leaves nothing: its peers may be gone, and leaving would wait for them.

    Args:
        leave_group: ends the process group; harmless when there is none.
    """
    if getattr(sys.excepthook, "ours", False):
        return
    before = sys.excepthook

    def tell(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        before(cls, error, trace)
        _tell_torchrun(error)

    tell.ours = True  # type: ignore[attr-defined]
    sys.excepthook = tell
    atexit.register(lambda: None if _failed else leave_group())


def _tell_torchrun(error: BaseException) -> None:
    """What ended this process becomes what torchrun prints of it: class, field, value and remedy, not "exitcode 1"."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # it records the exception that is being handled
    except BaseException:
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
