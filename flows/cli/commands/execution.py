"""The commands that run a pipeline, or say what would run: `trainflow run`, `why`, `resume`, `join` and `plan`."""

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
from rich.text import Text

from trainer_lib.base.durations import describe_bytes, describe_seconds
from trainer_lib.base.suggestions import counted, number_words
from trainer_lib.errors import ConfigError
from trainer_lib.launch.settings.config import LaunchConfig
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import SPEC_ENDINGS, Answer, BareForm, Form, Quiet, SpecWords, command
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server.api import prefect_api
from trainflow.flows.spec.spec import PipelineSpec, load_spec, storage_here
from trainflow.tasks.keys.resolver import Resolver

if TYPE_CHECKING:
    from trainer_lib.protocol.footprint import Footprint
    from trainflow.flows.planning.full_plan import Forecast, FullPlan, Obstacle
    from trainflow.flows.planning.plan import Plan
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
_NAMES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "zero-1": "ZeRO 1",
    "zero-2": "ZeRO 2",
    "zero-3": "ZeRO 3",
    "layout": "the layout",
}
_PARTS = ("parameters", "gradients", "optimizer", "activations", "exchange", "total")
_WRITES = "writes"
_SHOWN_LINES = 12  # of a conversation
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
    resolver = Resolver()  # keeps its answers: the run that follows asks for them again
    parsed = load_spec(spec, overrides, resolver, needs_sweep=False)
    # This machine's part in the training, by the spec or the launcher (Slurm, torchrun) that started this process.
    config = resolver.launch(parsed.train.launch, use_cpu=resolver.arguments(parsed.train.args).use_cpu)
    if config.follows:  # it starts no engine and writes no record
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


@command("""
    trainflow why pipeline.yaml
    trainflow why pipeline.yaml train.args.learning_rate=1e-3 --json
""")
def why(form: BareForm, words: SpecWords, start: From = None, from_run: FromRun = None) -> Answer:
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
    from trainflow.flows.runs.run_status import prepare_resumption

    out = form.console()
    if (place := storage or storage_here()) is None:
        what = "No storage was named, and this folder has neither a single spec nor .trainflow."
        remedy = "Name the storage of the run: trainflow resume --storage URL."
        raise ConfigError(what, field="--storage", remedy=remedy)
    past = _choose_unfinished(place, run, out.print)
    spec, stages = prepare_resumption(place, past, out.print)
    execute(
        spec,
        title=f"{spec.name}: run {past.id} -> {presentation.shown(spec.storage)}",
        again=["resume", *([run] if run else []), *(["--storage", storage] if storage else [])],
        place=["--storage", spec.storage],
        form=form,
        **stages,
    )


def _choose_unfinished(storage: str, run: str | None, say: Callable[[str], object]) -> PastRun:
    """The run to resume. Raises ConfigError, also for what people give in place of a run's id."""
    from trainflow.flows.records.past_runs import NEWEST, find_run, newest_unfinished
    from trainflow.flows.runs.run_status import find_statuses, require_unfinished

    if run is not None and "=" in run:
        what = "`resume` uses the recorded settings and takes no overrides."
        remedy = f"To change settings: trainflow run SPEC {run} --from-run ID."
        raise ConfigError(what, field="RUN", value=run, remedy=remedy)
    if run is not None and run.endswith(SPEC_ENDINGS) and Path(run).is_file():
        remedy = f"To resume a spec, run the command that started it: trainflow run {run}."
        raise ConfigError("This is a spec, not the id of a run.", field="RUN", value=run, remedy=remedy)
    statuses = find_statuses(storage, lambda count: say(f"Checking the signs of life of {count} run(s) (30 s)"))
    at_work = {status.run.id: status for status in statuses if status.state in ("running", "suspended")}
    if run is None or run == NEWEST:
        return newest_unfinished(storage, at_work=at_work)
    past = find_run(storage, run, field="RUN")
    require_unfinished(past, at_work.get(past.id), named=run)
    return past


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
    """Take part in what the leading machine trains, to the end. Raises TrainflowError if no machine leads in time."""
    # Here, because it brings the guard and the arguments, which `trainflow --help` does not need.
    from trainer_lib.launch.base import follow
    from trainer_lib.launch.settings.config import require_torch

    require_torch()
    with stoppable(out.print, remedy="The same command takes part again."):
        out.print(f"taking part in what {config.rendezvous} leads")
        follow(config, on_line=lambda line: out.print(line, markup=False, highlight=False))
        out.print("done")


# -- execution --------------------------------------------------------------------------------------------------------


def execute(
    spec: PipelineSpec, *, title: str, again: Sequence[str], place: Sequence[str], form: Form, **choice: Any
) -> None:
    """Run a pipeline and show how it goes; a failure is shown, and ends the process with its exit code.

    Args:
        again: the words of the command that continues it.
        place: the words that name its MLflow store to `trainflow ui` and `trainflow sync`.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.
    """
    from trainer_lib.launch.settings.config import require_torch
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


# -- plan --------------------------------------------------------------------------------------------------------------


def describe_plan(plan: Plan, found: Forecast, obstacles: Sequence[Obstacle]) -> list[Text]:
    """The costs of the training by section, then what is missing and what cannot work."""
    lines = [*_arguments(plan), *_length(found), *_memory(found), *_room(found)]
    if found.length is not None:
        unknown = "not known: --probe measures a few steps"
        about = f"about {describe_seconds(found.seconds or 0.0)} for train, from a probe of a few steps"
        lines.append(_row("time", unknown if found.seconds is None else about))
    lines += [_row("missing", sentence, "yellow") for sentence in found.missing]
    for obstacle in obstacles:
        place = " = ".join(text for text in (obstacle.field, obstacle.value) if text)
        what = f"{place}: {obstacle.what}" if place else obstacle.what
        lines.append(Text.assemble(("  cannot work  ", "bold red"), what))
        if obstacle.remedy:
            lines.append(_row("", obstacle.remedy))
    return [*lines, Text()]


def _data(full: FullPlan) -> Iterator[Text]:
    """Sentences of the recipe about the prepared data, and conversations, trained parts coloured, or in ⟦⟧."""
    for number, sentence in enumerate(full.summary):
        yield _row("" if number else "data", sentence)
    out = terminal.console()
    has_colour = out.color_system is not None and not out.no_color
    for shown in full.conversations:
        yield _row("trained", shown["place"])
        marks = [
            (text if has_colour or not is_trained else f"⟦{text}⟧", is_trained) for text, is_trained in shown["parts"]
        ]
        lines = Text.assemble(*((text, "green" if is_trained else "dim") for text, is_trained in marks)).split("\n")
        yield from (Text.assemble("    ", line) for line in lines[:_SHOWN_LINES])
        if len(lines) > _SHOWN_LINES:
            yield Text(f"    and {len(lines) - _SHOWN_LINES:,} more lines", "dim")


def _arguments(plan: Plan) -> Iterator[Text]:
    from trainer_lib.arguments import TrainingArguments
    from trainflow.flows.planning.full_plan import effective_arguments

    values, defaults = effective_arguments(plan), TrainingArguments().to_dict()
    differ = [f"{name} {value}" for name, value in values.items() if value != defaults.get(name)]
    rest = len(values) - len(differ)
    note = f"the other {rest} have their defaults (--json lists them)"
    yield _row("arguments", "; ".join([*differ, note]))


def _length(found: Forecast) -> Iterator[Text]:
    length = found.length
    if length is None:
        return
    tokens = "" if found.tokens is None else f", {found.tokens:,} tokens"
    yield _row("training", f"{counted(length.steps, 'step')}, {length.samples:,} samples{tokens}")
    yield _row("", length.step)
    evaluated = f"{counted(length.evaluations, 'evaluation')} of {counted(length.evaluated_rows, 'row')}"
    often = f"{evaluated if length.evaluations else 'no evaluation'}, {counted(length.saves, 'save')}"
    yield _row("", f"{number_words(length.epochs)} passes over the data, {often}")


def _memory(found: Forecast) -> list[Text]:
    if found.estimate is None:
        return []
    size = found.estimate.size
    frozen = "" if size.trainable == size.parameters else f", {size.trainable:,} of them trained"
    lines = [_row("model", f"{size.parameters:,} parameters{frozen}")]
    ranks = found.footprints()
    processes = max(rank.processes for rank in ranks)
    heading = f"of a rank on {counted(processes, 'process', 'processes')} ({found.estimate.device}); * is the spec's"
    lines.append(_row("memory", f"{heading} strategy"))
    columns = [_cells(rank, mark="* " if rank.strategy == found.strategy else "") for rank in ranks]
    rows = list(zip(("", *_PARTS, _WRITES), *columns, strict=True))
    lines += presentation.table(rows, right=frozenset(range(1, len(rows[0]))), indent="    ")
    lines.append(_row("", f"{_WRITES}: rank 0, into one checkpoint; with ×N each of N ranks"))
    if found.peak_bytes is not None:
        peak = f"peak of a process{', measured' if found.probe else ''}: {describe_bytes(found.peak_bytes)}"
        if found.probe is None and found.estimate.device == "cpu":
            peak += f", of which the interpreter and its libraries take {describe_bytes(found.estimate.process_bytes)}"
        lines.append(_row("", peak))
    return lines + [_row("", note, "yellow") for note in found.estimate.notes]


def _cells(rank: Footprint, mark: str) -> tuple[str, ...]:
    def text(value: int | None) -> str:
        return "?" if value is None else describe_bytes(value)

    writers = f" ×{rank.writers}" if rank.writers > 1 and rank.checkpoint is not None else ""
    values = [text(getattr(rank, name)) for name in _PARTS]
    return (mark + _NAMES[rank.strategy], *values, text(rank.checkpoint) + writers)


def _room(found: Forecast) -> Iterator[Text]:
    room = found.room
    if room is None:
        return
    if room.checkpoint_bytes is None or room.needed_bytes is None:
        size = "the size of a checkpoint is not known"
    else:
        kept = f"{room.kept} at most" if room.kept != 1 else "one"
        size = f"a checkpoint {describe_bytes(room.checkpoint_bytes)}, {kept} at a time; with the model "
        size += f"{describe_bytes(room.needed_bytes)}"
    free = "the store does not say what is free"
    if room.free_bytes is not None:
        free = f"free are {describe_bytes(room.free_bytes)}"
    yield _row("storage", f"{size}; {free}")


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<12} ", "dim"), (text, style))


@command("""
    trainflow plan pipeline.yaml
    trainflow plan pipeline.yaml train.launch.processes=4 --probe
""")
def plan(
    form: BareForm,
    words: SpecWords,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Prepare the data if it is not, train a few real steps, and measure time and memory."
        ),
    ] = False,
) -> None:
    """Show what a run will do and take: stages, steps, memory of a rank, time, room; and what of it cannot work.

    The exit code is 2 if something cannot work.
    """
    parsed = words.load(Resolver())
    from trainflow.flows.planning.full_plan import plan_in_full
    from trainflow.flows.planning.plan import Plan

    during = terminal.console(stderr=True, quiet=form.quiet).status
    full = plan_in_full(Plan.of(parsed, debug=form.debug), probe=probe, during=during)
    reasons = list(full.plan.reasons.values())
    lines = [*presentation.reasons(reasons, full.warnings), *_data(full)]
    lines += describe_plan(full.plan, full.forecast, full.obstacles)
    Answer(full.to_dict(), lambda: lines).show(form)
    if not full.can_work:
        raise typer.Exit(2)
