"""The commands `trainflow runs | show | compare | tag`: what is recorded about runs. Nothing is run or changed."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainer_lib.base.durations import UNITS
from trainer_lib.base.foreign_text import to_cell
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Bare, Debug, Json, Quiet, print_json
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.run_choice import Chosen, Place, Run, StorageUrl, choose_place
from trainflow.flows.cli.tables import table
from trainflow.flows.records.past_runs import PastRun, read_tags, tag_run, untag_run
from trainflow.tasks.stage.progress import duration

if TYPE_CHECKING:
    from trainflow.flows.runs.run_comparison import Comparison
    from trainflow.flows.runs.run_details import RunDetails, StageDetails
    from trainflow.flows.runs.run_status import RunStatus

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*(>=|<=|==|!=|>|<|=)\s*(\S+)\s*")
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_FIELDS = ("started", "name", "state", "seconds")


@dataclass(frozen=True)
class Filter:
    """A condition on one metric; a run without the metric does not fit."""

    name: str
    comparison: str
    value: float

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run with these metrics fits."""
        return self.name in metrics and _COMPARISONS[self.comparison](metrics[self.name], self.value)


def parse_filter(text: str) -> Filter:
    """The condition that a text like ``test_accuracy>=0.9`` states.

    Raises:
        ConfigError: it states none.
    """
    match = _CONDITION.fullmatch(text)
    try:
        if match is not None:
            return Filter(match[1], match[2], float(match[3]))
    except ValueError:
        pass
    raise ConfigError(
        "A condition is a metric, a comparison and a number.",
        field="--metric",
        value=text,
        remedy='Write for example --metric "test_accuracy>=0.9"; <, <=, >, >=, == and != are known.',
    )


def parse_age(text: str, *, field: str) -> timedelta:
    """The time that a text like ``12h`` or ``7d`` states.

    Raises:
        ConfigError: it states none.
    """
    match = _AGE.fullmatch(text.strip())
    try:
        if match is not None:
            return timedelta(seconds=float(match[1]) * UNITS[match[2]])
    except OverflowError:
        pass
    raise ConfigError(
        "A time is a number and a unit: s, m, h, d or w.",
        field=field,
        value=text,
        remedy="Write for example 12h or 7d.",
    )


def sort_key(text: str, runs: Sequence[PastRun]) -> tuple[Callable[[RunStatus], Any], bool]:
    """What ``--sort`` sorts by, and whether the other way round. Runs without that metric come last.

    Raises:
        ConfigError: it is neither a known word nor a metric of any run.
    """
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
_STATES = ("running", "suspended", "silent", "finished", "failed", "stopped", "pruned", "died")
_SHORT_ID = 8
_MOST_METRICS = 3
_DIGEST = 12

_Sweep = Annotated[
    str | None, typer.Option(metavar="NAME", help="The trials of this sweep, each in a line of its own.")
]


def runs(
    place: Place = None,
    storage: StorageUrl = None,
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
    sweep: _Sweep = None,
    sort: Annotated[
        str, typer.Option(metavar="WHAT", help="started, name, state, seconds or a metric; -WHAT: the other way round.")
    ] = "-started",
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, metavar="N", help="The first N of them.")] = None,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs of a storage: id, name, state, time, metrics. Reads their records only."""
    _require_states(state or [])
    filters = [parse_filter(text) for text in metric or []]
    oldest = None if since is None else datetime.now(UTC) - parse_age(since, field="--since")
    chosen = choose_place(place, storage, command="runs")
    from trainflow.flows.runs.run_status import look

    found = look(chosen.storage)
    listed = [
        each
        for each in found
        if (name is None or name in each.run.name or name in each.run.run_name)
        and (not state or each.state in state)
        and (sweep is None or each.run.sweep == sweep)
        and (oldest is None or _started(each.run) >= oldest)
        and all(one.accepts(each.run.metrics) for one in filters)
    ]
    key, reverse = sort_key(sort, [each.run for each in found])
    listed = sorted(listed, key=key, reverse=reverse)[:limit]
    tags = {each.run.id: read_tags(chosen.storage, each.run) for each in listed}
    if as_json:
        plain = [{**each.to_dict(), **_listed(each.run), "tags": tags[each.run.id]} for each in listed]
        print_json({"ok": True, "exit_code": 0, "storage": chosen.storage, "runs": plain})
        return
    shown_ones, trials = (listed, {}) if sweep or state or filters else _grouped(listed)
    lines = _run_lines(shown_ones, tags, filters, sort, chosen.storage, len(found), trials)
    terminal.show(lines[1 if bare else 0 :])


def show(
    run: Run,
    place: Place = None,
    storage: StorageUrl = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also settings and arguments that have their default.")
    ] = False,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run: its stages, settings, code, data, versions, arguments, metrics, places, attempts."""
    chosen = choose_place(place, storage, command="show")
    details, status = _read(chosen, run)
    if as_json:
        print_json({"ok": True, "exit_code": 0, "state": status.state, **details.to_dict()})
        return
    terminal.show(_detail_lines(details, status, everything), bare=bare)


def compare(
    old: Run,
    new: Run,
    place: Place = None,
    storage: StorageUrl = None,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how the second run differs from the first: settings, code, data, versions, arguments, then the metrics."""
    chosen = choose_place(place, storage, command="compare")
    from trainflow.flows.runs.run_comparison import compare_runs
    from trainflow.flows.runs.run_details import read_details

    first, second = (read_details(chosen.storage, chosen.run(text)) for text in (old, new))
    found = compare_runs(first, second)
    if as_json:
        print_json({"ok": True, "exit_code": 0, **found.to_dict()})
        return
    terminal.show(_comparison_lines(found), bare=bare)


def tag(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '.', '_', '-'.", show_default=False)],
    place: Place = None,
    storage: StorageUrl = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the name from the run.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Give a run a name: it is found by it, and `trainflow gc` keeps it."""
    chosen = choose_place(place, storage, command="tag")
    found = chosen.run(run)
    if remove:
        untag_run(chosen.storage, found, name)
    else:
        tag_run(chosen.storage, found, name)
    tags = read_tags(chosen.storage, found)
    if as_json:
        print_json({"ok": True, "exit_code": 0, "id": found.id, "tags": tags})
    else:
        terminal.console(quiet=quiet).print(f"{found.id} ({found.title}): {', '.join(tags) or 'no tags'}")


def _require_states(names: Iterable[str]) -> None:
    """Raises ConfigError for a word that is not the state of a run."""
    for name in names:
        if name not in _STATES:
            raise ConfigError(
                f"This is not the state of a run; there are {', '.join(_STATES)}.",
                field="--state",
                value=name,
                remedy=suggestion(name, _STATES),
            )


def _read(chosen: Chosen, text: str) -> tuple[RunDetails, RunStatus]:
    from trainflow.flows.runs.run_details import read_details
    from trainflow.flows.runs.run_status import read_status

    run = chosen.run(text)
    status = read_status(chosen.storage, run)
    return read_details(chosen.storage, run, is_at_work=status.is_at_work), status


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


def number(value: float | None) -> str:
    """A metric as people write it."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _grouped(listed: Sequence[RunStatus]) -> tuple[list[RunStatus], dict[str, int]]:
    """The runs without all trials of a sweep but the first one listed; how many there are, by the id of that one."""
    first: dict[tuple[str, str], str] = {}
    trials: dict[str, int] = {}
    kept = []
    for each in listed:
        if each.run.sweep is None:
            kept.append(each)
            continue
        one = first.setdefault((each.run.name, each.run.sweep), each.run.id)
        trials[one] = trials.get(one, 0) + 1
        if one == each.run.id:
            kept.append(each)
    return kept, trials


def _run_lines(
    listed: Sequence[RunStatus],
    tags: Mapping[str, Sequence[str]],
    filters: Sequence[Filter],
    sort: str,
    storage: str,
    total: int,
    trials: Mapping[str, int],
) -> list[Text]:
    if not listed:
        return [Text(f"No run of {total} fits." if total else f"No run is recorded in {shown(storage)}.")]
    columns = _metric_columns([each.run for each in listed], [*(one.name for one in filters), sort.lstrip("-")])
    rows = [("run", "name", "state", "started", "took", *columns, "")]
    for each in listed:
        seconds = each.run.seconds
        rows.append(
            (
                each.run.id[:_SHORT_ID],
                each.run.run_name or each.run.name,
                each.state,
                each.run.started[:16].replace("T", " "),
                "" if seconds is None else duration(seconds),
                *(number(each.run.metrics.get(name)) for name in columns),
                ", ".join(
                    filter(None, (*(f"#{tag}" for tag in tags[each.run.id]), *_of_sweep(each.run, trials), each.where))
                ),
            )
        )
    styles = [("", "", COLOURS.get(each.state, "")) for each in listed]
    return table(rows, styles, right=frozenset(range(5, 5 + len(columns))))


def _of_sweep(run: PastRun, trials: Mapping[str, int]) -> list[str]:
    """What to say of a trial; of one that stands for others, how many there are."""
    if run.sweep is None:
        return []
    number = f"trial {run.record.get('trial')} of sweep {run.sweep}"
    count = trials.get(run.id, 1)
    return [number if count == 1 else f"{number}, and {count - 1} more: trainflow runs --sweep {run.sweep}"]


def _metric_columns(found: Iterable[PastRun], asked: Sequence[str]) -> list[str]:
    """The metrics that are asked for, then those that the most recent runs have; no losses of training."""
    names: dict[str, None] = {}
    for run in found:
        names |= dict.fromkeys(run.metrics)
    first = [name for name in asked if name in names]
    telling = [name for name in names if not _is_of_no_use(name) and name not in first]
    return [*dict.fromkeys(first), *telling][: max(_MOST_METRICS, len(first))]


def _is_of_no_use(name: str) -> bool:
    """Whether a metric does not tell a good run from a bad one."""
    return name.startswith(("train_", "total_")) or name.endswith("_rows")


def _detail_lines(details: RunDetails, status: RunStatus, everything: bool) -> list[Text]:
    run = details.run
    tags = "".join(f" #{tag}" for tag in details.tags)
    head = f"{run.id}  {run.title}{tags}  {status.state}"
    lines = [Text(head, "bold"), Text(f"started {run.started}, ended {run.record.get('ended') or '-'}", "dim")]
    if status.where:
        lines.append(Text(status.where, "dim"))
    lines += [Text(), *_stage_lines(details.stages)]
    if details.metrics:
        lines += [Text(), *(_fact(name, number(value)) for name, value in details.metrics.items())]
    lines += [Text(), *(_fact(name, shown(place)) for name, place in details.places.items())]
    lines += _compared_lines(details)
    lines += _section("settings", _shown_settings(details, everything))
    lines += _section("arguments", _shown_arguments(details, everything))
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
    for each in stages:
        took = duration(each.seconds) if each.seconds and each.seconds >= 0.5 else ""
        rows.append((each.stage, each.state, took, (each.key or "-")[:16], terminal.readable(each.reason)))
    return table(rows, [("bold", COLOURS.get(each.state, ""), "", "dim", "dim") for each in stages])


def _compared_lines(details: RunDetails) -> list[Text]:
    """What was planned beside what came of it."""
    rows = [tuple(each.in_words().values()) for each in details.compared]
    head = ("stage", "of what", "planned", "came", "difference")
    return [Text(), Text("plan and outcome", "bold"), *table([head, *rows], right=frozenset({2, 3, 4}))] if rows else []


def _attempt_lines(details: RunDetails) -> list[Text]:
    """Every attempt that failed or was not the only one."""
    of_stage = [each.stage for each in details.attempts]
    telling = [each for each in details.attempts if each.outcome != "committed" or of_stage.count(each.stage) > 1]
    lines = [Text(), Text("attempts", "bold")] if telling else []
    for each in telling:
        style = COLOURS.get("failed" if each.outcome == "failed" else "interrupted", "")
        ended = each.ended or "without an end"
        lines.append(
            Text.assemble(
                f"  {each.stage} {each.number}  ", (each.outcome, style if each.outcome != "committed" else "")
            )
            + Text(f"  {each.started} - {ended}, {each.where}", "dim")
        )
        if message := each.error.get("message"):
            place = "".join(f", {key} {each.error[key]}" for key in ("rank", "step") if each.error.get(key) is not None)
            lines.append(Text(f"    {each.error.get('class')}{place}: {message}"))
        if each.decision:
            lines.append(Text(f"    {each.decision}", "dim"))
    return lines


def _shown_settings(details: RunDetails, everything: bool) -> dict[str, Any]:
    from trainflow.flows.records.run_names import flat_settings
    from trainflow.flows.spec.spec import PipelineSpec

    plain = PipelineSpec(name="plain", recipe="recipe.py").to_record()
    default = {} if everything else flat_settings(plain)
    found = flat_settings(details.spec)
    return {name: value for name, value in found.items() if name not in default or default[name] != value}


def _shown_arguments(details: RunDetails, everything: bool) -> dict[str, Any]:
    """The arguments of train; without those that have their default."""
    from trainer_lib.arguments import TrainingArguments

    found = details.arguments.get("train") or {}
    default = {} if everything else TrainingArguments(output_dir="unset").to_dict()
    return {name: value for name, value in found.items() if name not in default or default[name] != value}


def _section(title: str, facts: Mapping[str, Any]) -> list[Text]:
    return [Text(), Text(title, "bold"), *(_fact(name, str(value)) for name, value in facts.items())] if facts else []


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"  {to_cell(name):<34} ", "dim"), value)


def _comparison_lines(found: Comparison) -> list[Text]:
    names = [to_cell(each.run.run_name) or each.run.id[:_SHORT_ID] for each in (found.old, found.new)]
    lines = [Text(f"{names[0]} -> {names[1]}", "bold")]
    parts = {
        "settings": [str(each) for each in found.spec],
        "code": found.code,
        "data": found.data,
        "versions": [str(each) for each in found.versions],
        "arguments": [str(each) for each in found.arguments],
    }
    for title, sentences in parts.items():
        if sentences:
            lines += [Text(), Text(title, "bold"), *(Text(f"  {sentence}") for sentence in sentences)]
    if found.is_equal:
        lines += [Text(), Text("Settings, code, data, versions and arguments are the same.")]
    if found.metrics:
        rows = [("metric", *names, "difference")]
        for each in found.metrics:
            delta = "" if each.delta is None else f"{each.delta:+.4g}" if each.delta else "0"
            rows.append((each.name, number(each.old), number(each.new), delta))
        lines += [Text(), *table(rows, right=frozenset({1, 2, 3}))]
    return lines
