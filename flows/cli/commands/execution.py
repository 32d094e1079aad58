"""The commands that run a pipeline, or say what would run: `trainflow run`, `why`, `resume` and `join`."""

from __future__ import annotations

import contextlib
import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from trainer_lib.errors import ConfigError
from trainer_lib.launch.settings.config import LaunchConfig
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import Answer, BareForm, Form, Quiet, command
from trainflow.flows.cli.run_choice import SPEC_ENDINGS, SpecWords
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server.api import prefect_api
from trainflow.flows.spec.spec import PipelineSpec, load_spec, storage_here
from trainflow.tasks.keys.resolver import Resolver

if TYPE_CHECKING:
    from trainflow.flows.records.past_runs import PastRun

From = Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Run from this stage on.")]
FromRun = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Take the stages before --from from this earlier run (its id in the storage's runs/, or its MLflow run); "
        "without --from the stage that failed in it is the first.",
    ),
]
_DECIDE_PLACE = ("storage", "tracking", "name", "limit")
"""Keys of the spec that decide where its runs are tracked."""


@command("""
    trainflow run pipeline.yaml
    trainflow run pipeline.yaml train.args.learning_rate=1e-3 storage=s3://bucket/project
    trainflow run pipeline.yaml --limit 50
    trainflow run pipeline.yaml --from-run 3fa9c1 --from evaluate
""")
def run(
    form: Form,
    words: SpecWords,
    only: Annotated[str | None, typer.Option(metavar="STAGE", help="Run this stage alone.")] = None,
    start: From = None,
    force: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Run this stage again even if it is committed; repeatable."),
    ] = None,
    from_run: FromRun = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Check the whole pipeline on N rows of each split, apart from real results."),
    ] = None,
) -> None:
    """Run a pipeline: prepare, train, evaluate, predict, publish. Stages that are committed already are not run again.

    Interrupt it, kill it or pull the plug: the same command continues from the last commit.
    """
    words = replace(words, overrides=[*(words.overrides or []), *([] if limit is None else [f"limit={limit}"])])
    spec, overrides = words.choose()
    parsed = load_spec(spec, overrides, Resolver(), needs_sweep=False)
    if (config := _launch_of(parsed)).follows:  # it starts no engine and writes no record
        _follow_leader(config, form.console())
        return
    from trainflow.flows.planning.plan import Plan
    from trainflow.flows.stages import require_stage

    only, start = require_stage(only, "--only"), require_stage(start, "--from")
    forced = [stage for name in force or [] if (stage := require_stage(name, "--force"))]
    options = {"--only": only, "--from": start, "--from-run": from_run}
    if chosen := [word for name, value in options.items() if value for word in (name, value)]:
        # Refused before an engine starts, where what they need is not there.
        Plan.of(parsed, only=only, start=start, from_run=from_run).require_committed()
    execute(
        parsed,
        title=presentation.title(parsed, spec),
        # Given again, --force would discard the checkpoints of the forced stage; without it the stage may be cached.
        again=["resume", "--storage", parsed.storage] if forced else ["run", str(spec), *overrides, *chosen],
        place=[str(spec), *(text for text in overrides if text.split("=")[0].split(".")[0] in _DECIDE_PLACE)],
        form=form,
        only=only,
        start=start,
        force=forced,
        from_run=from_run,
    )


def _launch_of(spec: PipelineSpec) -> LaunchConfig:
    """This machine's part in the training, by the spec or the launcher (Slurm, torchrun) that started this process."""
    # The resolver keeps both answers: the run that follows asks for them again.
    return spec.resolver.launch(spec.train.launch, use_cpu=spec.resolver.arguments(spec.train.args).use_cpu)


@command("""
    trainflow why pipeline.yaml
    trainflow why pipeline.yaml train.args.learning_rate=1e-3 --json
""")
def why(
    form: BareForm,
    words: SpecWords,
    start: From = None,
    from_run: FromRun = None,
) -> Answer:
    """Show for each stage whether its result is committed and intact, and if not, what differs. Runs nothing."""
    from trainflow.flows.planning.plan import Plan

    parsed = words.load(Resolver())
    plan = Plan.of(parsed, start=start, from_run=from_run)
    plan.require_committed()
    reasons = list(plan.reasons.values())
    warnings = [sentence for sentences in plan.warnings.values() for sentence in sentences]
    record = {"stages": [reason.to_dict() for reason in reasons], "warnings": warnings}
    return Answer(record, lambda: presentation.reasons(reasons, warnings))


@command("""
    trainflow resume
    trainflow resume 3fa9c1
    trainflow resume --storage s3://bucket/project
""")
def resume(
    form: Form,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Id of the run, or the beginning of it; unset: the newest that did not finish.",
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The storage; unset: that of pipeline.yaml here, else .trainflow here."),
    ] = None,
) -> None:
    """Go on with a run that failed, was stopped or died: with its own spec and overrides, on any machine.

    The recipe is the project's, as it is now; where the project is not on this machine, the one that the run kept.
    """
    from trainflow.flows.runs.resumption import prepare_resumption

    out = form.console()
    if (place := storage or storage_here()) is None:
        raise ConfigError(
            "No storage was named, and this folder has neither a single spec nor .trainflow.",
            field="--storage",
            remedy="Name the storage of the run: trainflow resume --storage URL.",
        )
    past = _choose(place, run, out.print)
    ready = prepare_resumption(place, past, out.print)
    spec = ready.spec
    execute(
        spec,
        title=f"{spec.name}: run {past.id} -> {presentation.shown(spec.storage)}",
        again=["resume", *([run] if run else []), *(["--storage", storage] if storage else [])],
        place=["--storage", spec.storage],
        form=form,
        **ready.choice,
    )


def _choose(storage: str, run: str | None, say: Callable[[str], object]) -> PastRun:
    from trainflow.flows.records.past_runs import NEWEST, find_run, newest_unfinished
    from trainflow.flows.runs.resumption import require_unfinished
    from trainflow.flows.runs.run_status import find_statuses

    if run is not None:
        _refuse_other_words(run)
    statuses = find_statuses(storage, lambda count: say(f"Checking the signs of life of {count} run(s) (30 s)"))
    at_work = {status.run.id: status for status in statuses if status.state in ("running", "suspended")}
    if run is None or run == NEWEST:
        return newest_unfinished(storage, at_work=at_work)
    past = find_run(storage, run, field="RUN")
    require_unfinished(past, at_work.get(past.id), named=run)
    return past


def _refuse_other_words(run: str) -> None:
    """Raises ConfigError for what people give in place of a run's id."""
    if "=" in run:
        raise ConfigError(
            "`resume` uses the recorded settings and takes no overrides.",
            field="RUN",
            value=run,
            remedy=f"To change settings: trainflow run SPEC {run} --from-run ID.",
        )
    if run.endswith(SPEC_ENDINGS) and Path(run).is_file():
        raise ConfigError(
            "This is a spec, not the id of a run.",
            field="RUN",
            value=run,
            remedy=f"To resume a spec, run the command that started it: trainflow run {run}.",
        )


@command("trainflow join 10.0.0.1:29500 --processes 4")
def join(
    rendezvous: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The leading machine's rendezvous.")],
    node_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of this machine; in order of arrival if unset.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Workers here; one per GPU, or two, if unset.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per worker; shared out if unset.")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface of the workers' messages.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the leading machine.")] = 600.0,
    quiet: Quiet = False,
) -> None:
    """Take part in a training on several machines, until it is done. Another machine runs the pipeline and leads.

    The recipe and the storage must exist here under the same names.
    """
    config = LaunchConfig(
        rendezvous=rendezvous,
        node_rank=node_rank,
        processes=processes or "auto",
        threads=threads,
        interface=interface,
        join_timeout_s=timeout,
    )
    _follow_leader(config, terminal.console(quiet=quiet))


def _follow_leader(config: LaunchConfig, out: Console) -> None:
    """Take part in what the leading machine trains, to the end.

    Raises:
        TrainflowError: the failure that ended the training, or no machine led within the timeout.
    """
    # Here, because it brings the guard and the arguments, which `trainflow --help` does not need.
    from trainer_lib.launch import follow, require_torch

    require_torch()
    with stoppable(out.print, remedy="The same command takes part again."):
        out.print(f"taking part in what {config.rendezvous} leads")
        follow(config, on_line=lambda line: out.print(line, markup=False, highlight=False))
        out.print("done")


# -- execution --------------------------------------------------------------------------------------------------------


def execute(
    spec: PipelineSpec,
    *,
    title: str,
    again: Sequence[str],
    place: Sequence[str],
    form: Form,
    **choice: Any,
) -> None:
    """Run a pipeline and show how it goes.

    Args:
        title: the first line.
        again: the words of the command that continues it.
        place: the words that name its MLflow store to `trainflow ui` and `trainflow sync`.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.

    Raises:
        typer.Exit: the run failed; with the failure's exit code, after it was shown.
        TrainflowError: it failed or was stopped, or the engine did not start.
    """
    from trainer_lib.launch import require_torch
    from trainer_lib.storage import Store
    from trainflow.flows.run_stages import result_if_unchanged

    # Before an engine starts, which takes seconds.
    require_torch()
    Store.open(spec.storage).ensure_writable()
    out = form.console()
    remedy = f"{'This' if choice.get('force') else 'The same'} command continues: {shlex.join(['trainflow', *again])}"
    with stoppable(out.print, remedy=remedy) as stop:
        out.print(title)
        with terminal.followed(out, debug=form.debug):
            unchanged = result_if_unchanged(spec, debug=form.debug, **choice)
        with contextlib.nullcontext() if unchanged else engine(out):
            result = unchanged or run_and_show(spec, out, debug=form.debug, on_closing=stop.come_too_late, **choice)
            stop.come_too_late()
            answer = _answer(result, place, spec.limit)
            # Inside the block: the engine takes a second to end.
            answer.show(form)
    answer.end(form)


@contextlib.contextmanager
def engine(out: Console) -> Iterator[None]:
    """Start the workflow engine for the block."""
    with contextlib.ExitStack() as stack:
        with out.status("starting the workflow engine"):
            # The pipeline's imports and the engine's start take seconds, so they run side by side.
            stack.enter_context(prefect_api(meanwhile=lambda: importlib.import_module("trainflow.flows.pipeline")))
        yield


def run_and_show(spec: PipelineSpec, out: Console, *, debug: bool, **choice: Any) -> PipelineResult:
    """Run a pipeline inside of `engine`, and show its progress."""
    from trainflow.flows.pipeline import run_pipeline

    with terminal.followed(out, debug=debug):
        return run_pipeline(spec, debug=debug, **choice)


def _answer(result: PipelineResult, place: Sequence[str], limit: int | None) -> Answer:
    ui, sync = (["trainflow", name, *place] for name in ("ui", "sync"))
    record = {
        "limit": limit,
        **result.to_dict(),
        "places": presentation.where(result),
        "ui_command": shlex.join(ui),
        "sync_command": shlex.join(sync) if result.mlflow_waiting else None,
    }
    lines = [*presentation.summary(result, ui, sync), *presentation.check_note(result, limit)]
    return Answer(record, lambda: lines, result.error)
