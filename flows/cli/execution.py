"""A pipeline run on the command line: the engine around it, its progress, its summary, its exit code."""

from __future__ import annotations

import contextlib
import importlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console

from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import print_json
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server.api import prefect_api
from trainflow.flows.spec.spec import PipelineSpec


def execute(
    spec: PipelineSpec,
    *,
    title: str,
    again: Sequence[str],
    place: Sequence[str],
    debug: bool,
    quiet: bool,
    as_json: bool,
    **choice: Any,
) -> None:
    """Run a pipeline and show how it goes.

    Args:
        title: the first line.
        again: the command that continues it.
        place: the words that name its MLflow store to `trainflow ui` and `trainflow sync`.
        quiet: whether progress and summary are left out.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.

    Raises:
        typer.Exit: the run failed; with the failure's exit code, after it was shown.
        TrainflowError: it was stopped, or the engine did not start.
    """
    from trainer_lib.launch import require_torch
    from trainer_lib.storage import Store

    # Before an engine starts, which takes seconds.
    require_torch()
    Store.open(spec.storage).ensure_writable()
    out = terminal.console(stderr=as_json, quiet=quiet)
    which = "This" if choice.get("force") else "The same"
    with stoppable(out.print, remedy=f"{which} command continues: {shlex.join(again)}") as stop:
        out.print(title)
        unchanged = _finish_unchanged(spec, out, debug=debug, **choice)
        with contextlib.nullcontext() if unchanged else engine(out):
            result = unchanged or run_and_show(spec, out, debug=debug, on_closing=stop.come_too_late, **choice)
            stop.come_too_late()
            # Inside the block: the engine takes a second to end.
            _show_result(result, place, quiet=quiet, as_json=as_json, limit=spec.limit)
    if result.error is not None:
        terminal.show(presentation.failure(result.error, debug=debug), stderr=True)
        raise typer.Exit(result.error.exit_code)


@contextlib.contextmanager
def engine(out: Console) -> Iterator[None]:
    """Start the workflow engine for the block."""
    with contextlib.ExitStack() as stack:
        with out.status("starting the workflow engine"):
            # The pipeline's imports and the engine's start take seconds each, so they run side by side.
            stack.enter_context(prefect_api(meanwhile=lambda: importlib.import_module("trainflow.flows.pipeline")))
        yield


def _finish_unchanged(spec: PipelineSpec, out: Console, *, debug: bool, **choice: Any) -> PipelineResult | None:
    """Show a run for which nothing is left to do; None if there is something."""
    from trainflow.flows.cached_run import result_if_unchanged

    with terminal.followed(out, debug=debug):
        return result_if_unchanged(spec, debug=debug, **choice)


def run_and_show(spec: PipelineSpec, out: Console, *, debug: bool, **choice: Any) -> PipelineResult:
    """Run a pipeline inside of `engine`, and show its progress."""
    from trainflow.flows.pipeline import run_pipeline

    with terminal.followed(out, debug=debug):
        return run_pipeline(spec, debug=debug, **choice)


def _show_result(
    result: PipelineResult, place: Sequence[str], *, quiet: bool, as_json: bool, limit: int | None
) -> None:
    ui, sync = (["trainflow", command, *place] for command in ("ui", "sync"))
    if not as_json:
        if not quiet:
            terminal.show([*presentation.summary(result, ui, sync), *presentation.check_note(result, limit)])
        return
    code = result.error.exit_code if result.error is not None else 0
    plain = {"ok": result.ok, "exit_code": code, "limit": limit, **result.to_dict()}
    commands = {"ui_command": shlex.join(ui), "sync_command": shlex.join(sync) if result.mlflow_waiting else None}
    print_json({**plain, "places": presentation.where(result), **commands})
