"""The failure of a script among several processes: torchrun receives its class, field, value and remedy."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

_failed = False


def report_failures() -> None:
    """Report what ends this process to torchrun, beside the usual traceback. Later calls change nothing."""
    if getattr(sys.excepthook, "ours", False):
        return
    before = sys.excepthook

    def report(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        # First, so that the traceback is printed even if the report fails.
        before(cls, error, trace)
        _report_to_torchrun(error)

    report.ours = True  # type: ignore[attr-defined]
    sys.excepthook = report


def has_failed() -> bool:
    """Return whether an exception that the program did not catch is ending it."""
    return _failed


def _report_to_torchrun(error: BaseException) -> None:
    """Write what ended this process where torchrun reads it; torchrun otherwise prints only "exitcode 1"."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler records the exception that is being handled
    except BaseException:
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
