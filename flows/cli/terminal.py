"""Display of a run: live progress on a terminal, plain lines elsewhere.

Nothing here imports an engine, so a bad spec is shown before any is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import to_terminal
from trainer_lib.secrets import mask
from trainflow.tasks.prefect.prefect_internals import set_up_logging
from trainflow.tasks.stage.progress import Event, describe, measured, subscribe

# Seconds between two lines about one stage's progress in plain output.
_PLAIN_EVERY_S = 5.0
# The first steps are slow, so an estimate made from them is far too long.
_WARM_UP_STEPS = 3
# Characters below which a cell is not folded: the whole line is.
_LEAST_CELL = 24
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):[\d:.]+(?:\+00:00|Z)")
STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red", "skipped": "dim"}
_MARKS = {"ran": "✓", "cached": "=", "failed": "✗", "skipped": "-", "interrupted": "✗", "waiting": "…", "retrying": "↻"}


class _SafeConsole(Console):
    """A console on which no text steers the terminal: what a stranger wrote has no control characters."""

    @override
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(to_terminal(segment.text), segment.style)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that never breaks a line: paths and commands are there to be copied. A quiet one shows nothing."""
    return _SafeConsole(stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


@dataclass
class _Stage:
    """The state of one stage, from the events so far."""

    status: str = ""
    since: float | None = None
    """When it started; None if it did not."""
    seconds: float | None = None
    """Seconds that it took; None while it runs, or if it did not run."""
    loss: float | None = None
    step: float = 0.0
    max_steps: float | None = None
    text: str = ""
    """Its progress as text."""
    measured: str = ""
    """The metrics of the last evaluation."""

    def take(self, event: Event) -> None:
        """Update this stage from an event."""
        if event.get("event") == "stage":
            self.status = str(event.get("status"))
            if self.status == "started":
                self.since, self.seconds = time.monotonic(), None
                self.max_steps, self.text, self.measured = None, "", ""
            elif self.since is not None:
                self.seconds = time.monotonic() - self.since
            return
        if event.get("event") == "start":
            return
        if isinstance(event.get("loss"), int | float):
            self.loss = event["loss"]
        self.step = event.get("step") or self.step
        self.max_steps = event.get("max_steps") or self.max_steps
        self.measured = measured(event) or self.measured
        reported = {name: value for name, value in event.items() if value is not None}
        if self.step <= _WARM_UP_STEPS:
            reported = {name: value for name, value in reported.items() if name not in ("eta_s", "samples_per_second")}
        self.text = str(event.get("message") or describe({"loss": self.loss, **reported}) or self.text)


class PlainDisplay:
    """One line per thing worth knowing; a stage's progress every few seconds."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._stages: dict[str, _Stage] = defaultdict(_Stage)
        self._printed: dict[str, tuple[float, str]] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        name, kind = str(event.get("stage", "")), event.get("event")
        if kind == "line":
            self._out.print(f"{name:<13} | {event.get('message', '')}")
        elif kind in ("warning", "begin", "resume", "wait"):
            self._print(name, f"{'warning: ' if kind == 'warning' else ''}{event.get('message', '')}")
        elif kind == "stage":
            self._change(name, event)
        else:
            self._stages[name].take(event)
            if kind == "log" and event.get("step") and (text := measured(event)):
                self._print(name, text)
            elif kind in ("progress", "log"):
                text = self._stages[name].text
                if text and time.monotonic() - self._printed.get(name, (0.0, ""))[0] >= _PLAIN_EVERY_S:
                    self._printed[name] = (time.monotonic(), text)
                    self._print(name, text)

    def say(self, text: str) -> None:
        """Show one line that is not an event."""
        self._write(self._out, text)

    def warn(self, text: str) -> None:
        """Print one warning on standard error: the output may be read by another program."""
        self._write(console(stderr=True), text)

    def _change(self, name: str, event: Event) -> None:
        stage = self._stages[name]
        # The last step may have come within the five seconds in which nothing is printed.
        is_through = stage.max_steps is not None and stage.step >= stage.max_steps
        if is_through and self._printed.get(name, (0.0, ""))[1] != stage.text:
            self._print(name, stage.text)
        stage.take(event)
        self._printed[name] = (time.monotonic(), "")
        if stage.status != "skipped":  # the summary shows it
            self._print(name, stage_sentence(event, stage.seconds))

    def _print(self, name: str, text: str) -> None:
        self._write(self._out, f"{name:<13} {text}")

    def _write(self, out: Console, text: str) -> None:
        for part in fold(Text(text), terminal_width()):
            out.print(part)


def readable(reason: str) -> str:
    """A reason with its times to the minute: ``committed 2026-11-21 08:39 UTC``."""
    return _TIMESTAMP.sub(r"\1 \2 UTC", reason)


def stage_sentence(event: Event, seconds: float | None) -> str:
    """A stage event as a sentence."""
    status, reason = str(event.get("status")), readable(str(event.get("reason") or ""))
    took = f" in {describe_seconds(seconds)}" if seconds is not None else ""
    match status:
        case "started":
            return f"starts: {reason}"
        case "committed":
            return f"done{took}"
        case "cached":
            return f"cached: {reason}"
        case "retrying" | "failed":
            # What follows in further paragraphs stands once, below the summary.
            message = str(event.get("message") or "").partition("\n\n")[0]
            ended = f"failed{took}" + (", is tried again" if status == "retrying" else "")
            return f"{ended}: {message} ({reason})" if reason else f"{ended}: {message}"
        case _:
            return f"{status}: {reason}" if reason else status


class LiveDisplay:
    """The stages with a bar for what is running, redrawn in place; what workers print scrolls by above."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._stages: dict[str, _Stage] = defaultdict(_Stage)
        self.live = Live(console=out, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        name, kind = str(event.get("stage", "")), event.get("event")
        if kind == "line":
            self._above(name, str(event.get("message", "")), "dim")
        elif kind in ("warning", "begin", "resume"):
            self._above(name, str(event.get("message", "")), "yellow" if kind == "warning" else "")
        else:
            self._stages[name].take(event)
            if kind == "stage" and event.get("status") in ("retrying", "waiting"):
                self._above(name, stage_sentence(event, self._stages[name].seconds), "yellow")

    def say(self, text: str) -> None:
        """Show one line that is not an event."""
        self._out.print(text)

    def warn(self, text: str) -> None:
        """Show one warning above the drawing."""
        self._out.print(text)

    def _above(self, name: str, text: str, style: str) -> None:
        self._out.print(Text.assemble((f"{name} │ ", "dim cyan"), (text, style)))

    def _render(self) -> RenderableType:
        if not self._stages:
            return Columns([_SPINNER, Text("looking at what is there", "dim")])
        table = Table.grid(padding=(0, 1))
        # A copy: this is drawn by rich's thread, while events of new stages come in others.
        for name, stage in list(self._stages.items()):
            table.add_row(*(_running_row(name, stage) if stage.status == "started" else _other_row(name, stage)))
        return table


def _running_row(name: str, stage: _Stage) -> list[RenderableType]:
    elapsed = Text(describe_seconds(time.monotonic() - stage.since) if stage.since is not None else "", "dim")
    text = Text(stage.text, no_wrap=True)
    if stage.max_steps is None:
        return [_SPINNER, Text(name, "bold"), elapsed, text]
    bar = ProgressBar(total=stage.max_steps, completed=stage.step, width=24)
    lines = [text, Text(stage.measured, "dim", no_wrap=True)] if stage.measured else [text]
    return [_SPINNER, Text(name, "bold"), bar, Group(*lines)]


def _other_row(name: str, stage: _Stage) -> list[RenderableType]:
    status = {"committed": "ran"}.get(stage.status, stage.status)
    style = STYLES.get(status, "")
    took = describe_seconds(stage.seconds) if stage.seconds is not None else ""
    return [Text(_MARKS.get(status, " "), style), Text(name), Text(status, style), Text(took, "dim")]


Display = PlainDisplay | LiveDisplay
"""Shows the events of `trainflow.tasks.stage.progress` as they come."""
# One for all rows, so that they turn in step.
_SPINNER = Spinner("dots", style="cyan")


@contextlib.contextmanager
def progress(out: Console, *, plain: bool = False) -> Iterator[Display]:
    """The display that fits `out`, for the length of the block; with `plain` lines in any case."""
    if out.is_terminal and not out.is_dumb_terminal and not plain:
        display = LiveDisplay(out)
        with display.live:  # at its end the drawing is removed, and the summary takes its place
            yield display
    else:
        yield PlainDisplay(out)


@contextlib.contextmanager
def reading(out: Console, total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """On a terminal, draw how many of `total` bytes are read and how long the rest takes; yields what counts them."""
    if quiet or not out.is_terminal or out.is_dumb_terminal:
        yield lambda size: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("reading", *columns, console=out, transient=True) as drawn:
        task = drawn.add_task("reading", total=total)
        yield lambda size: drawn.advance(task, size)


class _Warnings(logging.Handler):
    """Shows warnings through the display. Prefect's own log of failures is left out: the summary shows them."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        if record.name.startswith("prefect"):
            return
        # A display that fails must not end the work that logs.
        with contextlib.suppress(Exception):
            label = getattr(record, "label", record.levelname.lower())
            # A quiet command shows neither notes nor progress.
            tell = self._display.say if label == "note" else self._display.warn
            tell(mask(f"{label}: {record.getMessage()}"))


@contextlib.contextmanager
def logs(display: Display, *, debug: bool) -> Iterator[None]:
    """Inside the block warnings go to the display and Prefect's log to its API only; with `debug` it stays visible."""
    if "prefect" in sys.modules:
        # Now, so that Prefect's console handler is among those removed; the flow would install it in mid-run.
        set_up_logging()
    root = logging.getLogger()
    before = list(root.handlers)
    own = _Warnings(display)
    if not debug:
        for handler in before:
            root.removeHandler(handler)
    root.addHandler(own)
    try:
        yield
    finally:
        root.removeHandler(own)
        for handler in before:
            if handler not in root.handlers:
                root.addHandler(handler)


@contextlib.contextmanager
def followed(out: Console, *, debug: bool) -> Iterator[None]:
    """Inside the block the progress of a run, and its warnings, are shown on a console."""
    with progress(out, plain=debug) as display, logs(display, debug=debug), subscribe(display):
        yield


def terminal_width() -> int | None:
    """The columns of the terminal, or those that COLUMNS states; None: a program reads the output."""
    out = console()
    return out.width if out.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def fold(line: Text, width: int | None) -> list[Text]:
    """A line broken at words, the rest below its last cell; whole if that cell is a command, which is there to copy."""
    plain = line.plain
    cells = [match.end() for match in re.finditer(r"(?:^|(?<=\S)) {2,}(?=\S)", plain)]
    first = indent = cells[-1] if cells else 0
    if width is None or len(plain) <= width or "\n" in plain or plain.startswith("trainflow ", first):
        return [line]
    if indent + max(_LEAST_CELL, *map(len, plain[indent:].split())) > width:
        first = len(plain) - len(plain.lstrip())
        indent = first + 4
    breaks, start, room = [], 0, width
    for word in re.finditer(r"\S+", plain):
        if word.end() - start > room and word.start() > max(first, start):
            start, room = word.start(), width - indent
            breaks.append(start)
    parts = line.divide(breaks)
    for part in parts:
        part.rstrip()
    return [parts[0], *(Text(" " * indent) + part for part in parts[1:])]


def show(lines: Sequence[Text], *, stderr: bool = False, bare: bool = False) -> None:
    """Print lines, folded where they are longer than the terminal is wide; bare: without the empty ones."""
    out, width = console(stderr=stderr), terminal_width()
    # Both streams may be one terminal: what was written first has to appear first.
    sys.stdout.flush()
    for line in lines:
        if line.plain or not bare:
            for part in fold(line, width):
                out.print(part)
