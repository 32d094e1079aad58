"""Run the worker's code in the calling process: for notebooks, debuggers and the ``memory://`` store."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer_lib.base.restore_process import variables_kept
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.protocol.requests import Request

R = TypeVar("R")

# One thread may launch within a launch; those of several threads (tasks that a flow submits) would mix their variables.
_turn = threading.RLock()


def run_request(
    request: Request[R],
    run_dir: RunDir,
    env: Mapping[str, str],
    on_event: Callable[[dict[str, Any]], None],
) -> R:
    """Carry out the request in this process and return its result. Output goes where this process prints.

    Threads take turns: the process has one environment, one random state and one default device.

    Raises:
        TrainflowError: the failure of the request.
    """
    # Imported by name at the last moment: importing `launch` must not import the worker, and with it torch.
    worker = importlib.import_module("trainer_lib.worker.session")
    with _turn, variables_kept(env):
        result: R = worker.run_here(request, run_dir, on_event)
    return result
