"""The commands about recorded runs: `trainflow runs | show | compare | tag`, then `status` and `logs` of running ones.

Nothing is run; `status` marks those that died as ended.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import number_words, require_known, suggestion, to_cell
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.trackers.names import with_intervals
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, BareForm, Chosen, Form, PlaceWords, Run, StorageUrl, choose, command
from trainflow.flows.cli.presentation import shown, table
from trainflow.flows.cli.signals import until_stopped
from trainflow.flows.records.past_runs import PastRun, read_tags, tag_run, untag_run
from trainflow.flows.server.api import prefect_api
from trainflow.flows.server.schedule import read_interval
from trainflow.flows.stages import find_stage, stage_names
from trainflow.tasks.settings import Requirement, parse_requirement
from trainflow.tasks.tracking.mlflow_run import deliver_waiting

if TYPE_CHECKING:
    from trainflow.flows.records.run_logs import Attempt, LogLine
    from trainflow.flows.runs.run_details import RunComparison, RunDetails, StageDetails
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
SHORT_ID = 8
_CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*([<>=].*)")
_FIELDS = ("started", "name", "state", "seconds")


def parse_filter(text: str) -> tuple[str, Requirement]:
    """The metric and the condition that a text like ``test_accuracy>=0.9`` states. Raises ConfigError for another."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is not None:
            return match[1], parse_requirement(match[2])
    except ValueError:
        pass
    what = "A condition is a metric, a comparison and a number."
    remedy = 'Write for example --metric "test_accuracy>=0.9"; <, <=, >, >= and == are known.'
    raise ConfigError(what, field="--metric", value=text, remedy=remedy)


def sort_key(text: str, runs: Sequence[PastRun]) -> tuple[Callable[[RunStatus], Any], bool]:
    """The column of ``--sort``, and whether it is descending; runs without a value come last. Raises ConfigError."""
    reverse, name = text.startswith("-"), text.removeprefix("-")
    metrics = sorted({metric for run in runs for metric in run.metrics})
    if name not in _FIELDS and name not in metrics:
        # A metric is known by the runs that have it.
        why = "Runs cannot be sorted by this." if metrics else "There is no run with a metric to sort by."
        raise ConfigError(why, field="--sort", value=text, remedy=suggestion(name, [*_FIELDS, *metrics]))

    def key(status: RunStatus) -> Any:
        run = status.run
        match name:
            case "started":
                return (run.started, run.id)
            case "name":
                return (run.run_name or run.name, run.started)
            case "state":
                return (status.state, run.started)
        value = (run.seconds or 0.0) if name == "seconds" else run.metrics.get(name, math.nan)
        missing = math.isnan(value)
        # The missing ones last, whichever way round.
        return (missing != reverse, 0.0 if missing else value)

    return key, reverse


_STATES = ("running", "suspended", "silent", "finished", "failed", "stopped", "pruned", "died")
_MOST_METRICS = 3
_UNSET = object()
# Characters to which a run's name may be cut where the terminal is narrow.
_SHORT_NAME = 20
_DIGEST = 12


@command("""
    trainflow runs --sort -test_accuracy -n 5
    trainflow runs --since 7d --state failed
    trainflow runs --metric "test_accuracy>=0.9" --json
""")
def runs(
    form: BareForm,
    place: PlaceWords,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Runs whose name or pipeline holds TEXT.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Runs in this state (finished, failed, …); repeatable.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Runs started within this time: 12h, 7d, 2w.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help='Runs with such a metric: "test_accuracy>=0.9"; repeatable.'),
    ] = None,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="The trials of this sweep.")] = None,
    sort: Annotated[
        str, typer.Option(metavar="WHAT", help="started, name, state, seconds or a metric; -WHAT: the other way round.")
    ] = "-started",
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, metavar="N", help="The first N of them.")] = None,
) -> Answer:
    """List the runs of a storage: id, name, state, time, metrics. Reads their records only."""
    _require_states(state or [])
    filters = [parse_filter(text) for text in metric or []]
    age_s = read_interval(since, option="--since")
    oldest = None if age_s is None else datetime.now(UTC) - timedelta(seconds=age_s)
    chosen = place.choose("runs")
    from trainflow.flows.runs.run_status import look

    statuses = look(chosen.storage)
    listed = [
        status
        for status in statuses
        if (name is None or name in status.run.name or name in status.run.run_name)
        and (not state or status.state in state)
        and (sweep is None or status.run.sweep == sweep)
        and (oldest is None or _started(status.run) >= oldest)
        and all(required.is_met(status.run.metrics.get(metric, math.nan)) for metric, required in filters)
    ]
    key, reverse = sort_key(sort, [status.run for status in statuses])
    listed = sorted(listed, key=key, reverse=reverse)[:limit]
    if not listed:
        none = f"No run is recorded in {shown(chosen.storage)}."
        why = f"No run matches; there are {len(statuses):,}." if statuses else none
        return Answer({"storage": chosen.storage, "runs": []}, lambda: [] if form.quiet else [Text(why)])
    wanted = [*(metric for metric, _ in filters), sort.lstrip("-")]
    return _list(chosen.storage, listed, wanted, bare=form.quiet)


def _list(storage: str, listed: Sequence[RunStatus], wanted: Sequence[str], *, bare: bool) -> Answer:
    tags = {status.run.id: read_tags(storage, status.run) for status in listed}
    plain = [{**status.to_dict(), **_listed(status.run), "tags": tags[status.run.id]} for status in listed]
    return Answer({"storage": storage, "runs": plain}, lambda: _run_lines(listed, tags, wanted)[1 if bare else 0 :])


@command("""
    trainflow show last
    trainflow show 3fa9c1 --all
""")
def show(
    form: BareForm,
    run: Run,
    place: PlaceWords,
    everything: Annotated[
        bool, typer.Option("--all", help="Also settings and arguments that have their default.")
    ] = False,
) -> Answer:
    """Show a run: its stages, settings, code, data, versions, arguments, metrics, places, attempts."""
    chosen = place.choose("show")
    from trainflow.flows.runs.run_details import read_details
    from trainflow.flows.runs.run_status import read_status

    past = chosen.run(run)
    status = read_status(chosen.storage, past)
    details = read_details(chosen.storage, past, is_at_work=status.is_at_work)
    return Answer({"state": status.state, **details.to_dict()}, lambda: _detail_lines(details, status, everything))


@command("trainflow compare 3fa9c1 last")
def compare(form: BareForm, old: Run, new: Run, place: PlaceWords) -> Answer:
    """Show how the second run differs from the first: settings, code, data, versions, arguments, then the metrics."""
    chosen = place.choose("compare")
    from trainflow.flows.runs.run_details import compare_runs, read_details

    comparison = compare_runs(*(read_details(chosen.storage, chosen.run(text)) for text in (old, new)))
    return Answer(comparison.to_dict(), lambda: comparison_lines(comparison))


@command("trainflow tag last baseline")
def tag(
    form: Form,
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '.', '_', '-'.", show_default=False)],
    place: PlaceWords,
    remove: Annotated[bool, typer.Option("--remove", help="Take the name from the run.")] = False,
) -> Answer:
    """Give a run a name: it is found by it, and `trainflow gc` keeps it."""
    chosen = place.choose("tag")
    past = chosen.run(run)
    if remove:
        untag_run(chosen.storage, past, name)
    else:
        tag_run(chosen.storage, past, name)
    tags = read_tags(chosen.storage, past)
    line = Text(f"{past.id} ({past.title}): {', '.join(tags) or 'no tags'}")
    return Answer({"id": past.id, "tags": tags}, lambda: [line])


def _require_states(names: Iterable[str]) -> None:
    """Raises ConfigError for a word that is not the state of a run."""
    for name in names:
        what = f"This is not the state of a run; there are {', '.join(_STATES)}."
        require_known(name, _STATES, what, field="--state")


def _started(run: PastRun) -> datetime:
    try:
        return datetime.fromisoformat(run.started)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def _listed(run: PastRun) -> dict[str, Any]:
    return {"run_name": run.run_name, "metrics": dict(run.metrics), "seconds": run.seconds, "failed": run.failed} | {
        name: run.record.get(name) for name in ("sweep", "trial")
    }


# -- words ------------------------------------------------------------------------------------------------------------


def _run_lines(listed: Sequence[RunStatus], tags: Mapping[str, Sequence[str]], wanted: Sequence[str]) -> list[Text]:
    columns: dict[str, list[str]] = {
        "run": [status.run.id[:SHORT_ID] for status in listed],
        "name": [status.run.run_name or status.run.name for status in listed],
        "state": [status.state for status in listed],
        "started": [status.run.started[:16].replace("T", " ") for status in listed],
        "took": ["" if status.run.seconds is None else describe_seconds(status.run.seconds) for status in listed],
    }
    metrics = _metric_columns([status.run for status in listed], wanted)
    columns |= {name: [number_words(status.run.metrics.get(name)) for status in listed] for name in metrics}
    columns[""] = []
    for status in listed:
        run = status.run
        trial = "" if run.sweep is None else f"trial {run.record.get('trial')} of sweep {run.sweep}"
        columns[""].append(", ".join(filter(None, (*(f"#{tag}" for tag in tags[run.id]), trial, status.where))))
    # On a narrow terminal the metric that is asked for first is worth more than the times and the other metrics.
    room = (terminal.terminal_width() or 1000) - 2 * len(columns)
    for name in [*reversed(metrics[1:]), "took", "started"]:
        widths = {title: max(len(title), *map(len, cells)) for title, cells in columns.items() if title}
        if sum(widths.values()) - max(0, widths["name"] - _SHORT_NAME) > room:
            del columns[name]
            room += 2
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    styles = [("", "", COLOURS.get(status.state, "")) for status in listed]
    return table(rows, styles, right=frozenset(index for index, name in enumerate(columns) if name in metrics))


def _metric_columns(runs: Iterable[PastRun], wanted: Sequence[str]) -> list[str]:
    """The metrics that are asked for, then those that the most recent runs have and that tell good runs from bad."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    first = [name for name in dict.fromkeys(wanted) if name in names]
    telling = [name for name in names if not name.startswith(("train_", "total_")) and not name.endswith("_rows")]
    return [*first, *(name for name in telling if name not in first)][: max(_MOST_METRICS, len(first))]


def _detail_lines(details: RunDetails, status: RunStatus, everything: bool) -> list[Text]:
    run = details.run
    tags = "".join(f" #{tag}" for tag in details.tags)
    head = f"{run.id}  {run.title}{tags}  {status.state}"
    lines = [
        Text(head, "bold"),
        Text(terminal.readable(f"started {run.started}, ended {run.record.get('ended') or '-'}"), "dim"),
    ]
    if status.where:
        lines.append(Text(status.where, "dim"))
    lines += [Text(), *_stage_lines(details.stages)]
    if details.metrics:
        lines += [Text(), *_facts(with_intervals(details.metrics))]
    lines += [Text(), *_facts({name: shown(place) for name, place in details.places.items()})]
    for title, values in _chosen_settings(details, everything).items():
        lines += _section(title, values)
    lines += _section("code", {name: digest[:_DIGEST] for name, digest in run.sources.items()})
    data = details.stage("prepare-data")
    if data is not None and data.digest:
        lines += _section(
            "data", {"content": data.digest[:_DIGEST], **{f"rows of {k}": v for k, v in data.rows.items()}}
        )
    lines += _section("versions", details.versions)
    return [*lines, *_attempt_lines(details)]


def _stage_lines(stages: Sequence[StageDetails]) -> list[Text]:
    rows = [("stage", "state", "took", "key", "why")]
    for stage in stages:
        took = describe_seconds(stage.seconds) if stage.seconds and stage.seconds >= 0.5 else ""
        rows.append((stage.stage, stage.state, took, (stage.key or "-")[:16], terminal.readable(stage.reason)))
    return table(rows, [("bold", COLOURS.get(stage.state, ""), "", "dim", "dim") for stage in stages])


def _attempt_lines(details: RunDetails) -> list[Text]:
    """The attempts that failed or were not the only ones."""
    of_stage = [attempt.stage for attempt in details.attempts]
    lines: list[Text] = []
    for attempt in details.attempts:
        if attempt.outcome == "committed" and of_stage.count(attempt.stage) == 1:
            continue
        style = {"committed": "", "failed": COLOURS["failed"]}.get(attempt.outcome, COLOURS["interrupted"])
        times = f"  {attempt.started} - {attempt.ended or 'without an end'}, {attempt.where}"
        lines.append(Text.assemble(f"  {attempt.stage} {attempt.number}  ", (attempt.outcome, style), (times, "dim")))
        if message := attempt.error.get("message"):
            lines.append(Text(f"    {attempt.error.get('class')}{attempt.place}: {message}"))
        if attempt.decision:
            lines.append(Text(f"    {attempt.decision}", "dim"))
    return [Text(), Text("attempts", "bold"), *lines] if lines else []


def _chosen_settings(details: RunDetails, everything: bool) -> dict[str, dict[str, Any]]:
    """The settings of the spec and the arguments of train, without those that have their default."""
    from trainer_lib.arguments import TrainingArguments
    from trainflow.flows.records.run_names import flat_settings
    from trainflow.flows.spec.spec import PipelineSpec

    found = {"settings": flat_settings(details.spec), "arguments": dict(details.arguments.get("train") or {})}
    if everything:
        return found
    plain = flat_settings(PipelineSpec(name="plain", recipe="recipe.py").to_record())
    defaults = {"settings": plain, "arguments": TrainingArguments(output_dir="unset").to_dict()}
    return {
        title: {name: value for name, value in values.items() if defaults[title].get(name, _UNSET) != value}
        for title, values in found.items()
    }


def _section(title: str, facts: Mapping[str, Any]) -> list[Text]:
    return [Text(), Text(title, "bold"), *_facts({name: str(value) for name, value in facts.items()})] if facts else []


def _facts(facts: Mapping[str, str]) -> list[Text]:
    return table([("", ""), *facts.items()], [("dim",)] * len(facts), bare=True, indent="  ")


def comparison_lines(comparison: RunComparison) -> list[Text]:
    """The differences of two runs, and their metrics next to each other."""
    sides = [(to_cell(side.run.run_name), side.run.id[:SHORT_ID]) for side in (comparison.old, comparison.new)]
    lines = [Text(" -> ".join(f"{name} ({short})" if name else short for name, short in sides), "bold")]
    parts: dict[str, Sequence[object]] = {
        "settings": comparison.spec,
        "code": comparison.code,
        "data": comparison.data,
        "versions": comparison.versions,
        "arguments": comparison.arguments,
    }
    for title, differences in parts.items():
        if differences:
            lines += [Text(), Text(title, "bold"), *(Text(f"  {difference}") for difference in differences)]
    if comparison.is_equal:
        lines += [Text(), Text("Settings, code, data, versions and arguments are the same.")]
    if comparison.metrics:
        rows = [("metric", *(short for _, short in sides), "difference")]
        of_intervals = {f"{pair['name']}_{end}" for pair in comparison.metrics for end in ("low", "high")}
        for pair in comparison.metrics:
            if pair["name"] not in of_intervals:
                delta = "" if pair["delta"] is None else number_words(pair["delta"], sign="+")
                rows.append((pair["name"], number_words(pair["old"]), number_words(pair["new"]), delta))
        lines += [Text(), *table(rows, right=frozenset({1, 2, 3}))]
    return lines


# -- running runs ------------------------------------------------------------------------------------------------------

_LINES = {"warning": "yellow", "stage": "bold", "progress": "dim", "resume": "cyan", "save": "dim", "wait": "yellow"}
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
