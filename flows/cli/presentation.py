"""The words around a run: its closing summary, why a stage would run, failures as what, where, why and what to do."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rich.text import Text

from trainer_lib.base.paths import state_folder
from trainer_lib.base.suggestions import counted, number_words, to_cell, to_terminal
from trainer_lib.errors import TrainflowError, first_line
from trainer_lib.secrets import mask
from trainer_lib.trackers.names import is_measurement, with_intervals
from trainflow.flows.cli.terminal import STYLES, readable, terminal_width
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, evaluation_warnings

if TYPE_CHECKING:
    from trainflow.flows.planning.plan import StageReason
    from trainflow.flows.spec.spec import PipelineSpec

_KEPT_FAILURES = 50
_WIDEST = 120  # characters of a cell, but for those of the last column
_METRICS_WIDTH = 80 - 2 - 2 * 2  # characters of the widest names and texts of metrics that stand side by side
_NARROWEST = 16  # characters below which no cell is cut on a narrow terminal


def summary(result: PipelineResult, ui_command: Sequence[str], sync_command: Sequence[str] = ()) -> list[Text]:
    """The stages (what ran and why), the measured quality, where everything is, and what MLflow does not have yet."""
    if not result.stages:  # refused before the first stage
        return []
    rows = [("stage", "", "time", "why")]
    for outcome in result.stages:
        why = "see below" if outcome.status == "failed" else readable(outcome.reason)
        rows.append((outcome.stage, outcome.status, outcome.took, why))
    styles = [("bold", STYLES.get(outcome.status, ""), "", "dim") for outcome in result.stages]
    lines = [Text(), *table(rows, styles, right=frozenset({2}), indent="  ")]
    for part in (_metrics(result), _gates(result)):
        lines += [Text(), *part] if part else []
    lines += [Text(f"  warning      {mask(to_cell(text))}", "yellow") for text in evaluation_warnings(result)]
    places = where(result)
    if places:
        lines.append(Text())
        lines += [Text.assemble((f"  {name:<12} ", "dim"), place) for name, place in places.items()]
    if result.pipeline_key:
        name = f" ({to_cell(result.run_name)})" if result.run_name else ""
        lines.append(Text.assemble(("  run          ", "dim"), result.pipeline_key[:RUN_ID_CHARS], (name, "dim")))
    if result.tracking_uri:
        lines.append(Text.assemble(("  browse it    ", "dim"), (shlex.join(ui_command), "bold")))
    if result.mlflow_waiting:
        lines.append(Text.assemble(("  MLflow waits ", "yellow"), f"for {result.mlflow_waiting}"))
        lines.append(Text.assemble(("  deliver it   ", "dim"), (shlex.join(sync_command), "bold")))
    return [*lines, Text()]


def title(spec: PipelineSpec, path: Path) -> str:
    """The first line of a run; of a check on a few rows, it says so."""
    what = "" if spec.limit is None else f"a check on {_rows(spec.limit)}: "
    return f"{spec.name}: {what}{shown(str(path))} -> {shown(spec.storage)}"


def check_note(result: PipelineResult, limit: int | None) -> list[Text]:
    """The last lines of a check on a few rows: what it showed, and that nothing of it counts; none of a real run."""
    if limit is None or not result.stages:
        return []
    done = "went through every stage" if result.ok else "did not go through"
    note = f"This was a check on {_rows(limit)}: it {done}. A run without --limit uses nothing of it."
    return [Text(f"  {note}", "bold"), Text()]


def _rows(limit: int) -> str:
    return f"{counted(limit, 'row')} of each split"


def _metrics(result: PipelineResult) -> list[Text]:
    """A table of two measured splits, side by side where they fit; then one of the next ones."""
    splits = {}
    for split, values in result.measured():
        numbers = {
            name.removeprefix(f"{split}_"): value
            for name, value in values.items()
            if isinstance(value, int | float) and is_measurement(name)
        }
        splits[split] = with_intervals(numbers)
    lines: list[Text] = []
    while splits:
        pair = dict(list(splits.items())[:2])
        names = dict.fromkeys(name for texts in pair.values() for name in texts)
        widths = [max(map(len, (split, *texts.values()))) for split, texts in pair.items()]
        if sum(widths) + max(map(len, names), default=0) > _METRICS_WIDTH:
            pair = dict(list(pair.items())[:1])
            names = dict.fromkeys(*pair.values())
        rows = [(name, *(texts.get(name, "") for texts in pair.values())) for name in names]
        lines += table([("metric", *pair), *rows], indent="  ")
        for split in pair:
            del splits[split]
    return lines


def _gates(result: PipelineResult) -> list[Text]:
    """One line per requirement of the spec: what was measured, what it must be, and whether it is."""
    return [
        Text.assemble(
            ("  gate         ", "dim"),
            f"{to_cell(gate['metric'])} {'not measured' if gate['value'] is None else number_words(gate['value'])}  ",
            ("passed" if gate["passed"] else "failed", STYLES["ran" if gate["passed"] else "failed"]),
            (f"  {gate['requirement']}", "dim"),
        )
        for gate in result.gates
    ]


def where(result: PipelineResult) -> dict[str, str]:
    """`PipelineResult.places` as people write them."""
    return {label: shown(place) for label, place in result.places.items()}


def same_command(*more: str) -> str:
    """Return the words with which this command was called, and more: without them it would do something else."""
    return shlex.join(["trainflow", *sys.argv[1:], *more])


def shown(place: str) -> str:
    """A place as people write it: relative below the working directory, an absolute path elsewhere, a URL as it is."""
    text = unquote(urlsplit(place).path) if place.startswith("file://") else place
    if not text.startswith("/"):
        return text
    relative = os.path.relpath(text)
    return relative if not relative.startswith("..") and len(relative) < len(text) else text


def table(
    rows: Sequence[Sequence[str]],
    styles: Sequence[Sequence[str]] = (),
    *,
    right: frozenset[int] = frozenset(),
    bare: bool = False,
    indent: str = "",
) -> list[Text]:
    """Lines of a table whose first row is its head; the last column is not padded.

    On a terminal that is too narrow the widest cells are cut in their middle; `show` folds the last one.

    Args:
        styles: of the cells of the rows after the head; missing ones are plain.
        right: columns whose cells stand at the right.
        bare: leave the head out.
    """
    # A name of a stranger neither breaks a line nor widens a column without end.
    rows = [[*(to_cell(cell, _WIDEST) for cell in row[:-1]), to_cell(row[-1])] for row in rows]
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last + 1)]
    room = (terminal_width() or sum(widths) + 1000) - len(indent) - 2 * last
    kept = widths[last] if last in right else min(widths[last], _NARROWEST)
    while sum(widths[:last]) + kept > room and max(widths[:last], default=0) > _NARROWEST:
        widths[widths.index(max(widths[:last]))] -= 1
    lines = []
    for place, row in enumerate(rows):
        of_row = styles[place - 1] if 0 < place <= len(styles) else ()
        cells: list[tuple[str, str]] = [(indent, "")]
        for column, cell in enumerate(row):
            is_last = column == last
            text = cell if is_last else _cut_middle(cell, widths[column])
            padded = text.rjust(widths[column]) if column in right else text if is_last else text.ljust(widths[column])
            style = "dim" if place == 0 else of_row[column] if column < len(of_row) else ""
            cells.append((padded if is_last else f"{padded}  ", style))
        lines.append(Text.assemble(*cells))
        lines[-1].rstrip()
    return lines[1:] if bare else lines


def _cut_middle(text: str, width: int) -> str:
    """A text of at most `width` characters: names of runs differ at both ends."""
    if len(text) <= width:
        return text
    return f"{text[: (width - 1) // 2]}…{text[len(text) - width // 2 :]}"


def failure(error: TrainflowError, *, debug: bool) -> list[Text]:
    """A failure as text: place, reason and remedy; the details only with `debug`, else a file that holds them."""
    place = error.field or ""
    if error.value is not None:
        place = f"{place} = {error.value}" if place else error.value
    who = [f"{name} {value}" for name, value in (("rank", error.rank), ("step", error.step)) if value is not None]
    rows = {"where": ", ".join(filter(None, [place, *who])), "why": error.message, "do": error.remedy or ""}
    # Bad input (exit code 2) is explained by the lines themselves.
    if error.details and not debug and error.exit_code != 2:
        saved = _save_details(error.details)
        rows["more"] = f"{saved} (or run again with --debug)" if saved else "Run again with --debug."
    lines = [Text(f"✗ {error.title}", "bold red")]
    # A value that breaks the line begins no line of ours.
    lines += [
        Text.assemble((f"  {name:<6} ", "dim"), to_terminal(text).replace("\n", "\n" + 9 * " "))
        for name, text in rows.items()
        if text
    ]
    if error.details and debug:
        lines += [Text(), Text(error.details.rstrip(), "dim")]
    return lines


def unexpected(error: BaseException, details: str, *, debug: bool) -> list[Text]:
    """A failure of trainflow itself: one line, where the details are, how to report it."""
    lines = [Text(f"✗ unexpected failure: {type(error).__name__}: {first_line(error)}", "bold red")]
    if debug:
        return [*lines, Text(details.rstrip(), "dim")]
    saved = _save_details(details)
    more = str(saved) if saved else "Run again with --debug."
    lines.append(Text.assemble(("  more   ", "dim"), more))
    do = "This is a bug in trainflow. Please report it, with that file, where you got trainflow from."
    return [*lines, Text.assemble(("  do     ", "dim"), do)]


def _save_details(details: str) -> Path | None:
    """Keep a failure's details in this user's state folder; None when it cannot be written."""
    try:
        # Private: a traceback may quote the user's data.
        folder = state_folder("failures")
        path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.txt"
        # The names begin with the time, so sorted is oldest first.
        for old in sorted(folder.glob("*.txt"))[: -_KEPT_FAILURES + 1]:
            old.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{_versions()}\n\n{details.rstrip()}\n")
    except OSError:
        return None
    return path


def _versions() -> str:
    from importlib import metadata

    versions = [f"Python {platform.python_version()} on {platform.platform()}"]
    for package in ("trainflow", "prefect", "mlflow", "torch", "fsspec"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def reasons(stages: Sequence[StageReason], warnings: Sequence[str] = ()) -> list[Text]:
    """By stage: kept or run, and why: the one field that differs, or all of them below; then the warnings."""
    lines: list[Text] = [Text()]
    width = max((len(reason.stage) for reason in stages), default=0)
    for reason in stages:
        word = "held" if reason.held_back else "kept" if reason.hit else "runs" if reason.certain else "may run"
        style = "failed" if reason.held_back else "cached" if reason.hit else "ran"
        styled = (word.ljust(7), STYLES[style])
        # A result that is taken from another run names its differences in a warning.
        several = reason.differences if len(reason.differences) > 1 and not reason.hit else ()
        why = f"{len(several)} fields differ from its nearest earlier run" if several else readable(reason.reason)
        lines.append(Text.assemble((f"  {reason.stage.ljust(width)}  ", "bold"), styled, (f"  {why}", "dim")))
        lines += [Text.assemble(" " * (width + 13), str(change)) for change in several]
    lines += [Text(f"  warning: {sentence}", "yellow") for sentence in warnings]
    return [*lines, Text()]
