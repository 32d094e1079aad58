"""The commands about running runs: `trainflow status`, which marks those that died as ended, and `trainflow logs`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, TrainflowError
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, BareForm, Chosen, PlaceWords, Run, StorageUrl, choose, command
from trainflow.flows.cli.presentation import shown, table
from trainflow.flows.cli.signals import until_stopped
from trainflow.flows.server.api import prefect_api
from trainflow.flows.stages import find_stage, stage_names
from trainflow.tasks.tracking.mlflow_run import deliver_waiting

if TYPE_CHECKING:
    from trainflow.flows.records.run_logs import Attempt, LogLine
    from trainflow.flows.runs.run_status import RunStatus

COLOURS = {
    "running": "green",
    "ran": "green",
    "finished": "",
    "cached": "cyan",
    "suspended": "yellow",
    "silent": "yellow",
    "stopped": "yellow",
    "pruned": "dim",
    "interrupted": "yellow",
    "failed": "bold red",
    "died": "bold red",
}
"""Of the states of runs and stages."""
_LINES = {"warning": "yellow", "stage": "bold", "progress": "dim", "resume": "cyan", "save": "dim", "wait": "yellow"}
SHORT_ID = 8
_BAR = 20
_WATCH_EVERY_S = 2.0
# Seconds that MLflow's server gets.
_PATIENCE_S = 10


@command("""
    trainflow status
    trainflow status --storage s3://bucket/project --json
    trainflow status --watch
""")
def status(
    form: BareForm,
    place: PlaceWords,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow running runs, stage by stage, until they end.")
    ] = False,
) -> Answer:
    """Show the runs of a storage and how each is; mark those whose process died as ended, in Prefect too."""
    from trainflow.flows.runs.run_status import describe_progress, find_statuses

    if watch and form.as_json:
        raise ConfigError("--json prints one object, so it cannot watch.", field="--watch", remedy="Drop one.")
    chosen = place.choose("status")
    root = chosen.storage
    out = terminal.console(stderr=True, quiet=form.quiet)
    if watch:
        _watch(root)

    def say_wait(count: int) -> None:
        who = "a process on another machine is" if count == 1 else f"{count} processes on other machines are"
        out.print(f"Checking whether {who} still alive (30 s)")

    statuses = find_statuses(root, say_wait)
    warnings: list[str] = []
    if any(not run.is_swept for run in statuses):
        with out.status("marking runs that died"):
            warnings = [*_mark(root, statuses), *_deliver(chosen)]
    if not form.as_json:
        terminal.show([Text(f"warning: {warning}", "yellow") for warning in warnings], stderr=True)
    runs = [run.to_dict() for run in statuses]
    for run, found in zip(runs, statuses, strict=True):
        run |= {"stage_progress": [vars(stage) for stage in describe_progress(found)]} if found.is_at_work else {}
    record = {"storage": root, "warnings": warnings, "runs": runs}
    return Answer(
        record, lambda: [*_lines(statuses, root, bare=form.quiet), *([] if form.quiet else _stages(statuses))]
    )


def _mark(root: str, statuses: Sequence[RunStatus]) -> list[str]:
    """Mark what died, in Prefect and on the storage; returns what could not be done, and why."""
    import httpx

    from trainflow.flows.runs.run_status import sweep

    try:
        with prefect_api():
            return sweep(root, list(statuses))
    except (TrainflowError, httpx.HTTPError) as error:
        why = error.message if isinstance(error, TrainflowError) else f"its server does not answer ({error})."
        return [f"Prefect's runs of dead processes are not marked: {why}"]


def _deliver(chosen: Chosen) -> list[str]:
    """End the MLflow runs of what died, with all that they had logged; returns why it could not be done."""
    delivery = deliver_waiting(chosen.tracking, chosen.place)
    if delivery is None or delivery.close(stages=_PATIENCE_S):
        return []
    return ["MLflow did not take yet what waits for it: trainflow sync delivers the rest."]


def _watch(root: str) -> None:
    """Draw the running runs again and again, until none is left or Ctrl-C."""
    from rich.live import Live

    from trainflow.flows.runs.run_status import look

    with until_stopped(), Live(console=terminal.console(), auto_refresh=False, transient=True) as live:
        statuses = look(root)
        while at_work := [run for run in statuses if run.is_at_work]:
            live.update(Group(*_lines(at_work, root), *_stages(statuses)), refresh=True)
            time.sleep(_WATCH_EVERY_S)
            # What is drawn last and the list below it are of one moment.
            statuses = look(root, closely={run.run.id for run in at_work})


def _stages(statuses: Sequence[RunStatus]) -> list[Text]:
    """The stages of running runs: a bar, how long they took or take, and when they are likely to end."""
    from trainflow.flows.runs.run_status import describe_progress

    lines: list[Text] = []
    for status in statuses:
        if not status.is_at_work:
            continue
        stages = describe_progress(status)
        lines += [Text(), Text(f"{status.run.id[:SHORT_ID]} {status.run.title}", "bold")]
        rows = [("stage", "state", "", "time", "left", "")]
        for stage in stages:
            took, eta = ("" if number is None else describe_seconds(number) for number in (stage.seconds, stage.eta_s))
            rows.append((stage.stage, stage.state, _bar(stage.share), took, eta, stage.text))
        lines += table(rows, [("", COLOURS.get(stage.state, "dim")) for stage in stages], right=frozenset({3, 4}))
    return lines


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    full = round(share * _BAR)
    return f"{'━' * full}{'╌' * (_BAR - full)} {share:4.0%}"


def _lines(statuses: Sequence[RunStatus], root: str, *, bare: bool = False) -> list[Text]:
    if not statuses:
        return [] if bare else [Text(f"No run is recorded in {shown(root)}.")]
    rows = [("run", "pipeline", "state", "started", "")]
    for status in statuses:
        run = status.run
        rows.append((run.id[:SHORT_ID], run.name, status.state, run.started[:16].replace("T", " "), status.where))
    return table(rows, [("", "", COLOURS.get(status.state, "")) for status in statuses], bare=bare)


@command("""
    trainflow logs last
    trainflow logs last train --rank 1 --follow
""")
def logs(
    form: BareForm,
    run: Run,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE] [SPEC]", help="A stage; a spec, unset: what is in this folder."),
    ] = None,
    storage: StorageUrl = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue while the run does.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="What this rank wrote, alone.")] = None,
) -> Answer:
    """Show what a run's workers wrote, how its attempts ended, and the stacks of those that failed."""
    if follow and form.as_json:
        raise ConfigError("--json prints one object, so it cannot follow a run.", field="--follow", remedy="Drop one.")
    chosen = choose(words, storage, command="logs")
    stages = _stages_of(chosen)
    from trainflow.flows.records.run_logs import LogReader, follow_lines, read_attempts

    past = chosen.run(run)
    reader = LogReader(chosen.storage, past, stages=stages, rank=rank)
    lines = []
    if follow:
        from trainflow.flows.runs.run_status import read_status

        with until_stopped():
            for line in follow_lines(reader, lambda: not read_status(chosen.storage, chosen.run(past.id)).is_at_work):
                terminal.show([_line(line)])
                lines.append(line)
    else:
        lines = reader.read()
    attempts = [attempt for attempt in read_attempts(chosen.storage, past) if stages is None or attempt.stage in stages]
    failed = _failures(attempts) if rank is None else []
    if not (lines or failed or form.quiet or form.as_json):
        terminal.console(stderr=True).print("Nothing is kept of what this run's workers wrote.")
    record = {
        "id": past.id,
        "lines": [vars(line) for line in lines],
        "attempts": [vars(attempt) for attempt in attempts],
    }
    return Answer(record, lambda: [*([] if follow else map(_line, lines)), *failed])


def _stages_of(chosen: Chosen) -> list[str] | None:
    """The stages that are named; None: all. Raises ConfigError for a word that names none."""
    names = []
    for word in chosen.words:
        if (row := find_stage(word)) is None:
            raise ConfigError(
                "This is neither a stage nor a spec.", field="STAGE", value=word, remedy=suggestion(word, stage_names())
            )
        names.append(row.name)
    return names or None


def _line(line: LogLine) -> Text:
    rank = f"[rank {line.rank}] " if line.rank else ""
    return Text.assemble(
        (f"{line.at[11:19]} ", "dim"),
        (f"{line.stage} │ ", "dim cyan"),
        (f"{rank}{line.text}", _LINES.get(line.kind, "")),
    )


def _failures(attempts: Sequence[Attempt]) -> list[Text]:
    """The attempts that failed, with the details that they left: the stacks of a rank that hung, a traceback."""
    lines: list[Text] = []
    for attempt in attempts:
        error = attempt.error
        if attempt.outcome in ("committed", "open") and not error:
            continue
        head = f"{attempt.stage}: attempt {attempt.number} {attempt.outcome} {attempt.ended or ''}{attempt.place}"
        lines += [Text(), Text(head, "bold red"), Text(str(error.get("message") or ""))]
        lines += [Text(str(detail).rstrip(), "dim") for detail in (error.get("details"), attempt.decision) if detail]
    return lines
