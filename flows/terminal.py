"""How a run is followed: live progress on a terminal, plain lines elsewhere.

Nothing here imports an engine, so a bad spec is shown before any is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tasks._progress import Event, describe, duration, measured

# Seconds between two lines about one stage's progress in plain output.
_PLAIN_EVERY_S = 5.0
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):[\d:.]+(?:\+00:00|Z)")
STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red", "skipped": "dim"}
_MARKS = {"ran": "✓", "cached": "=", "failed": "✗", "skipped": "-", "interrupted": "✗", "waiting": "…", "retrying": "↻"}


def console(*, stderr: bool = False) -> Console:
    """A console that never breaks a line: paths and commands are there to be copied."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


class Display(Protocol):
    """Shows the events of `tasks._progress` as they come."""

    def __call__(self, event: Event) -> None:
        """Take one event."""

    def say(self, text: str) -> None:
        """Show one line of our own."""


class PlainDisplay:
    """One line per thing worth knowing; a stage's progress every few seconds."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._started: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._last: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        stage, kind = str(event.get("stage", "")), event.get("event")
        if kind == "stage":
            self._stage(stage, event)
        elif kind == "line":
            self._print(stage, f"| {event.get('message', '')}")
        elif kind in ("warning", "resume") and event.get("message"):
            self._print(stage, f"{'warning: ' if kind == 'warning' else ''}{event['message']}")
        elif kind == "log" and (text := measured(event)):
            self._print(stage, text)
        elif kind in ("progress", "log"):
            self._progress(stage, event)

    def say(self, text: str) -> None:
        """Show one line of our own."""
        self._out.print(text)

    def _stage(self, stage: str, event: Event) -> None:
        status = str(event.get("status"))
        if status == "skipped":
            return  # the summary says so
        if status == "started":
            self._started[stage] = self._shown[stage] = time.monotonic()
        elif stage in self._started and (last := self._last.pop(stage, "")):
            self._print(stage, last)  # where it stood when it ended
        self._print(stage, stage_sentence(event, self._seconds(stage)))

    def _progress(self, stage: str, event: Event) -> None:
        text = describe(event) if event.get("max_steps") else str(event.get("message") or "")
        if not text:
            return
        if time.monotonic() - self._shown.get(stage, 0.0) < _PLAIN_EVERY_S:
            self._last[stage] = text
            return
        self._shown[stage] = time.monotonic()
        self._last.pop(stage, None)
        self._print(stage, text)

    def _seconds(self, stage: str) -> float | None:
        return time.monotonic() - self._started[stage] if stage in self._started else None

    def _print(self, stage: str, text: str) -> None:
        self._out.print(f"{stage:<13} {text}")


def readable(reason: str) -> str:
    """A reason with its times to the minute: ``committed 2026-11-21 08:39 UTC``."""
    return _TIMESTAMP.sub(r"\1 \2 UTC", reason)


def stage_sentence(event: Event, seconds: float | None) -> str:
    """What a stage event says, in words."""
    status, reason = str(event.get("status")), readable(str(event.get("reason") or ""))
    took = f" in {duration(seconds)}" if seconds is not None else ""
    match status:
        case "started":
            return f"starts: {reason}"
        case "committed":
            return f"done{took}"
        case "cached":
            return f"cached: {reason}"
        case "retrying" | "failed":
            message = str(event.get("message") or "")
            return f"failed{took}: {message} ({reason})" if reason else f"failed{took}: {message}"
        case _:
            return f"{status}: {reason}" if reason else status


class LiveDisplay:
    """The stages with a bar for what is running, redrawn in place; what workers print scrolls by above."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._stages: dict[str, Event] = {}
        self._live = Live(console=out, get_renderable=self._render, refresh_per_second=8, transient=True)

    @contextlib.contextmanager
    def shown(self) -> Iterator[LiveDisplay]:
        """Draw inside the block; at its end the drawing is removed, and the summary takes its place."""
        with self._live:
            yield self

    def __call__(self, event: Event) -> None:
        """Take one event."""
        stage, kind = str(event.get("stage", "")), event.get("event")
        known = self._stages.setdefault(stage, {"status": "", "since": time.monotonic()})
        if kind == "stage":
            known.update(event)
            if event.get("status") == "started":
                self._stages[stage] = {**event, "since": time.monotonic()}
            elif event.get("status") in ("retrying", "waiting"):
                self.say(f"{stage}: {stage_sentence(event, None)}")
            elif event.get("status") in ("committed", "failed", "interrupted"):
                known["seconds"] = time.monotonic() - known["since"]
        elif kind == "line":
            self._above(stage, str(event.get("message", "")), "dim")
        elif kind in ("warning", "resume") and event.get("message"):
            self._above(stage, str(event["message"]), "yellow" if kind == "warning" else "")
        else:
            known.update({name: value for name, value in event.items() if value is not None and name != "stage"})
            if kind == "log" and (text := measured(event)):
                known["measured"] = text

    def say(self, text: str) -> None:
        """Show one line of our own."""
        self._out.print(text)

    def _above(self, stage: str, text: str, style: str) -> None:
        self._out.print(Text.assemble((f"{stage} │ ", "dim cyan"), (text, style)))

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for stage, state in self._stages.items():
            if stage:
                table.add_row(*_live_row(stage, state))
        return Group(table)


def _live_row(stage: str, state: Mapping[str, Any]) -> list[RenderableType]:
    status = str(state.get("status"))
    if status != "started":
        mark = _MARKS.get({"committed": "ran"}.get(status, status), " ")
        style = STYLES.get({"committed": "ran"}.get(status, status), "")
        seconds = state.get("seconds")
        words = {"committed": "done"}.get(status, status)
        return [Text(mark, style), Text(stage), Text(words, style), Text(duration(seconds) if seconds else "", "dim")]
    elapsed = Text(duration(time.monotonic() - float(state["since"])), "dim")
    total, step = state.get("max_steps"), state.get("step")
    if total:
        bar = ProgressBar(total=float(total), completed=float(step or 0), width=24)
        measurement = Text(str(state.get("measured", "")), "dim", no_wrap=True)
        return [
            _SPINNER,
            Text(stage, "bold"),
            bar,
            Group(Text(describe(state)), *([measurement] if measurement else [])),
        ]
    return [_SPINNER, Text(stage, "bold"), elapsed, Text(str(state.get("message") or ""), "dim", no_wrap=True)]


_SPINNER = Spinner("dots", style="cyan")


@contextlib.contextmanager
def progress(out: Console) -> Iterator[Display]:
    """The display that fits `out`, for the length of the block."""
    if out.is_terminal and not out.is_dumb_terminal:
        with LiveDisplay(out).shown() as display:
            yield display
    else:
        yield PlainDisplay(out)


class _Warnings(logging.Handler):
    """Shows warnings through the display. Prefect's own accounts of failures are left out: the summary tells them."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        if record.name.startswith("prefect"):
            return
        with contextlib.suppress(Exception):
            self._display.say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def logs(display: Display, *, debug: bool) -> Iterator[None]:
    """Inside the block warnings go to the display and Prefect's log to its API only; with `debug` it stays visible."""
    from prefect.logging.configuration import PROCESS_LOGGING_CONFIG, setup_logging

    if not PROCESS_LOGGING_CONFIG:
        setup_logging()
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


def show(lines: Sequence[Text], *, stderr: bool = False) -> None:
    """Print lines, unbroken."""
    out = console(stderr=stderr)
    sys.stdout.flush()
    for line in lines:
        out.print(line)
