"""Tensors of collectives that a thread of gloo may still hold.

A thread of gloo that has finished a collective drops its tensors a moment after the caller went on, and a tensor that
Python has seen is dropped under the interpreter's lock. A thread that is late, on a busy machine, asks for that lock
when the interpreter is already ending, and the process is aborted ("terminate called without an active exception")
after all its work is done. Ending the process group does not help while `DistributedDataParallel` keeps it alive.
So a program waits, as the last thing it does, until the threads have dropped what they held.

Nor may the group end while a thread holds something: `DistributedDataParallel` ends the group that it is the last to
hold under the interpreter's lock, which the thread waits for, while the end waits for the thread. So a group is ended
after this wait.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_MAX_BYTES = 65_536  # larger tensors are not kept alive for this: a later small one follows every large one
_PAUSE_S = 0.02
_LATE_S = 0.05

# A thread holds the tensors of one collective at a time, so those that it may hold are among the newest.
_recent: deque[torch.Tensor] = deque(maxlen=64)
_any_collective = False


def remember(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` `[...]`, which is about to take part in a collective; the caller keeps no reference to it."""
    global _any_collective
    _any_collective = True
    if tensor.nbytes <= _MAX_BYTES:
        _recent.append(tensor)
    return tensor


def share(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a remembered tensor `[...]` over the memory of `array`, in its shape."""
    return remember(torch.from_numpy(array))


def wait_until_released(timeout_s: float) -> bool:
    """Wait until no thread holds a remembered tensor, at most `timeout_s` seconds; return whether that is so."""
    if not _any_collective:
        return True
    # The collectives of other libraries are not known here: their threads get the interpreter's lock meanwhile.
    time.sleep(_PAUSE_S)
    began = time.monotonic()
    is_collected = False
    while _recent:
        # Two references: that of `_recent` and the argument. A thread that holds the tensor in C++ has a third.
        if sys.getrefcount(_recent[-1]) <= 2:
            _recent.pop()
        elif time.monotonic() >= began + timeout_s:
            return False
        elif not is_collected and time.monotonic() >= began + _LATE_S and dist.is_available() and dist.is_initialized():
            # The frames of an error that is over may hold it in a cycle. No group ends here: it is still initialized.
            is_collected = True
            gc.collect()
        else:
            time.sleep(0.001)
    return True
