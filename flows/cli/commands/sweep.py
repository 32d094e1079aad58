"""`trainflow sweep`: many trainings of one spec, and the best of them."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import number_words
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, Form, SpecWords, command
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.spec.sweep_settings import SweepSettings
from trainflow.flows.sweeps.sweep_result import count_words, reached_text
from trainflow.tasks.keys.resolver import Resolver

if TYPE_CHECKING:
    from trainflow.flows.sweeps.sweep_result import SweepResult

_STYLES = {"complete": "green", "pruned": "dim", "failed": "bold red"}


@command("""
    trainflow sweep pipeline.yaml
    trainflow sweep pipeline.yaml sweep.trials=40 sweep.parallel=2
""")
def sweep(form: Form, words: SpecWords) -> Answer:
    """Run the trials that the spec's section `sweep` describes, and write out the spec of the best one.

    Interrupt it, kill it or pull the plug: the same command continues, and no trial runs twice.
    """
    spec, overrides = words.choose()
    parsed = load_spec(spec, overrides, Resolver())
    from trainflow.flows.sweeps.sweeping import run_sweep
    from trainflow.flows.sweeps.trial_specs import sweep_of

    settings = sweep_of(parsed)
    out = terminal.console(stderr=form.as_json)
    again = shlex.join(["trainflow", "sweep", str(spec), *overrides])
    with stoppable(out.print, remedy=f"The same command continues: {again}"):
        if not form.quiet:
            out.print(title(parsed, settings, spec))
        display = SweepDisplay(out, settings, quiet=form.quiet)
        with display.status():
            result = run_sweep(parsed, listener=display, debug=form.debug)
    return Answer(result.to_dict(), lambda: summary(result, ["trainflow", "ui", str(spec)]), result.error)


def title(spec: PipelineSpec, settings: SweepSettings, path: Path) -> str:
    """The first line."""
    aims = ", ".join(f"{way} {name}" for name, way in zip(settings.objective, settings.direction, strict=True))
    return f"{spec.name}: {aims} over {', '.join(settings.space)}: {shown(str(path))} -> {shown(spec.storage)}"


class SweepDisplay:
    """Lines for trials that end; on a terminal, below them, the running trials."""

    def __init__(self, out: Console, settings: SweepSettings, *, quiet: bool) -> None:
        self._out = out
        self._settings = settings
        self._quiet = quiet
        self._values: dict[int, Mapping[str, Any]] = {}
        self._at_work: dict[int, str] = {}
        self._ended = 0
        self._missing: int | None = None
        self._began = time.monotonic()
        self._best: list[float] | None = None
        self._status = out.status("starting")

    def status(self) -> Any:
        """Draw running trials in place until the block ends."""
        return contextlib.nullcontext() if self._quiet or not self._out.is_terminal else self._status

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        kind, number = event.get("event"), int(event.get("trial") or 0)
        if kind == "planned":
            self._missing = int(event["missing"])
        elif kind == "warning":
            terminal.console(stderr=True).print(f"warning: {event.get('message')}")
        elif kind == "began":
            self._values[number] = event["values"]
            self._at_work[number] = "goes on" if event.get("resumed") else "begins"
            if event.get("resumed") and not self._quiet:
                self._out.print(Text(f"trial {number:<4} goes on: {values_text(event['values'])}", "dim"))
        elif kind == "progress" and event.get("max_steps"):
            self._at_work[number] = f"step {event['step']}/{event['max_steps']}"
        elif kind == "ended":
            self._end(number, event)
        self._status.update(self.work())

    def _end(self, number: int, event: Mapping[str, Any]) -> None:
        self._at_work.pop(number, None)
        self._ended += 1
        if self._quiet:
            return
        state = str(event["state"])
        reached = event.get("objective")
        words = reached_text(self._settings.objective, reached) if reached else str(event.get("reason") or "")
        mark = "  best so far" if reached and self._is_best(list(reached)) else ""
        values = values_text(self._values.get(number, {}))
        self._out.print(
            Text.assemble(f"trial {number:<4} ", (f"{state:<9}", _STYLES.get(state, "")), f"{words}  ", (values, "dim"))
            + Text(mark, "green")
        )

    def _is_best(self, reached: list[float]) -> bool:
        if len(reached) > 1:
            return False
        sign = 1 if self._settings.direction[0] == "maximize" else -1
        if self._best is None or sign * reached[0] > sign * self._best[0]:
            self._best = reached
            return True
        return False

    def work(self) -> str:
        """Ended trials, the time left, and running trials."""
        work = ", ".join(f"trial {number} {what}" for number, what in sorted(self._at_work.items()))
        took = describe_seconds(time.monotonic() - self._began)
        return f"{self._ended} ended in {took}{self._left()}; {work or 'starting'}"

    def _left(self) -> str:
        """Estimate the time left from the trials that have ended."""
        if not self._ended or self._missing is None or self._missing <= self._ended:
            return ""
        seconds = (time.monotonic() - self._began) / self._ended
        return f", {describe_seconds(seconds * (self._missing - self._ended))} left"


def values_text(values: Mapping[str, Any]) -> str:
    """``learning_rate=0.01 width=64``."""
    numbers = {key: number_words(value) for key, value in values.items() if isinstance(value, float)}
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in {**values, **numbers}.items())


def summary(result: SweepResult, ui: list[str]) -> list[Text]:
    """The number of trials, the best one, and what to do with it."""
    saved = "" if result.saved_share is None else f"; pruning saved {100 * result.saved_share:.0f} % of the steps"
    lines = [Text(), Text(f"  {count_words(result)}{saved}")]
    for number in result.best:
        best = result.trial(number)
        reached = reached_text(result.objective, best.objective or ())
        label = "best" if len(result.best) == 1 else "not beaten"
        lines.append(Text.assemble((f"  {label:<12} ", "dim"), (f"trial {number}  {reached}", "bold")))
        lines += [Text.assemble((f"  {'':<12} ", "dim"), f"{key} = {value}") for key, value in best.values.items()]
        if number in result.best_specs:
            command = shlex.join(["trainflow", "run", shown(result.best_specs[number])])
            lines.append(Text.assemble(("  run it       ", "dim"), (command, "bold")))
    if result.report_url:
        lines.append(Text.assemble(("  report       ", "dim"), shown(result.report_url)))
    if result.mlflow_run_id or result.best:
        lines.append(Text.assemble(("  browse it    ", "dim"), (shlex.join(ui), "bold")))
    return [*lines, Text()]
