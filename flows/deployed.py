"""The entrypoint of runs that Prefect starts in a process of their own: ``flows.deployed.pipeline``.

Prefect servers keep this name with every deployment, so it stays the same wherever the code behind it moves.
"""

from __future__ import annotations

import functools
from typing import Any

from prefect import flow

from flows import pipeline as _plain
from flows.server.run_process import prepare_run_process


# The wrapped function lends its signature and docstring: both flows offer one form in Prefect's UI.
@flow(name="pipeline", flow_run_name="{spec.name}", persist_result=False)
@functools.wraps(_plain.pipeline.fn)
def pipeline(*args: Any, **kwargs: Any) -> Any:
    """Prepare this process for a run that Prefect started, then run the pipeline."""
    prepare_run_process()
    return _plain.pipeline.fn(*args, **kwargs)
