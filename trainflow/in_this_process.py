"""A pipeline run inside of the caller's process: a script, a notebook, a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from trainer_lib.storage import Store
from trainflow.flows.cached_run import result_if_unchanged
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.flows.spec.spec import PipelineSpec


def run_here(spec: PipelineSpec, *, progress: bool, **choice: Any) -> PipelineResult:
    """Run a pipeline.

    Args:
        progress: show how it goes: drawn on a terminal, lines elsewhere, also in a notebook.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.

    Raises:
        TrainflowError: a stage failed; the run so far is recorded, and the same call goes on with it.
    """
    Store.open(spec.storage).ensure_writable()  # before an engine starts, which takes seconds
    quiet_environment()
    with _shown(progress):
        if (unchanged := result_if_unchanged(spec, **choice)) is not None:
            return unchanged
    with prefect_api():
        from trainflow.flows.pipeline import run_pipeline

        with _shown(progress):
            result = run_pipeline(spec, **choice)
    result.raise_for_error()
    return result


def _shown(progress: bool) -> AbstractContextManager[None]:
    from trainflow.flows.cli import terminal

    return terminal.followed(terminal.console(quiet=not progress), debug=False)
