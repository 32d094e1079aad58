"""Run the worker's code in the calling process: for notebooks, debuggers and the ``memory://`` store."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from trainer_lib.launch.run_dir import RunDir
from trainer_lib.requests import Request

R = TypeVar("R")


def run_request(
    request: Request[R],
    run_dir: RunDir,
    env: Mapping[str, str],
    on_event: Callable[[dict[str, Any]], None],
) -> R:
    """Carry out the request in this process and return its result. Output goes where this process prints.

    Raises:
        TrainflowError: the failure of the request.
    """
    # Imported by name at the last moment: importing `launch` must not import the worker, and with it torch.
    worker = importlib.import_module("trainer_lib.worker.session")
    with set_environment(env):
        result: R = worker.run_here(request, run_dir, on_event)
    return result


@contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while the block runs, and restore the earlier values after it."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
