"""The result of a sweep: its trials, the best of them, and their addresses. No engine is imported."""

from __future__ import annotations

import base64
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.suggestions import counted, number_words
from trainer_lib.errors import TrainflowError, first_line
from trainflow.flows.reports.report import Panel, Section, number_text, render_report
from trainflow.flows.sweeps.ledger import TrialState


@dataclass
class SweepResult:
    """A sweep, as its ledger has it when a command on it ends."""

    name: str
    pipeline: str
    storage: str
    # objective, direction: the metrics, and what is wanted of them.
    objective: Sequence[str]
    direction: Sequence[str]
    wanted: int  # how many trials there are to be
    trials: Sequence[TrialState] = ()
    best: Sequence[int] = ()  # the number of the best trial; several: those that no other beats in everything
    # Trial -> the spec that runs it, with everything else that the sweep's spec has on.
    best_specs: dict[int, str] = field(default_factory=dict)
    report_url: str | None = None
    mlflow_run_id: str | None = None
    run_url: str | None = None
    seconds: float = 0.0
    error: TrainflowError | None = None  # the failure that ended the command; the trials that had ended stay

    @property
    def ok(self) -> bool:
        """Whether the command was not ended by a failure."""
        return self.error is None

    def count(self, state: str) -> int:
        """The number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def saved_share(self) -> float | None:
        """The share of all optimizer steps that was not trained because trials were ended early; None: none was."""
        ended = [trial.notes for trial in self.trials if trial.state in ("complete", "pruned")]
        planned = sum(int(notes.get("max_steps") or 0) for notes in ended)
        trained = sum(int(notes.get("steps") or 0) for notes in ended)
        return 1 - trained / planned if planned and self.count("pruned") else None

    def trial(self, number: int) -> TrialState:
        """One trial."""
        return next(trial for trial in self.trials if trial.number == number)

    def raise_for_error(self) -> None:
        """Raise the failure that ended the command, if there is one."""
        if self.error is not None:
            raise self.error

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **vars(self),
            "best_specs": {str(number): url for number, url in self.best_specs.items()},
            "saved_share": self.saved_share,
            "trials": [
                {**trial.notes, "number": trial.number, "state": trial.state, "values": dict(trial.values)}
                | {"objective": None if trial.objective is None else list(trial.objective)}
                for trial in self.trials
            ],
            "error": None if self.error is None else self.error.to_record(),
        }


def reached_text(names: Sequence[str], values: Sequence[float]) -> str:
    """``test_error 0.1013``."""
    return "  ".join(f"{name} {number_words(value)}" for name, value in zip(names, values, strict=False))


SWEEP_REPORT = "report.html"
_LEAST = 2  # complete trials that a picture needs
_log = logging.getLogger(__name__)


def draw_study(study: Any, objectives: Sequence[str], pruned_by: str | None) -> list[tuple[str, bytes]]:
    """Titles and SVG files of the pictures that the trials of Optuna's study allow; `pruned_by`: a metric, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these functions are experimental by Optuna's word
        from optuna.visualization import matplotlib as plots

        complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
        wanted: list[tuple[str, Callable[[], Any]]] = []
        if len(complete) >= _LEAST:
            for index, name in enumerate(objectives):
                wanted += _of_objective(plots, study, index, name, several=len(objectives) > 1)
            if len(objectives) in (2, 3):
                names = list(objectives)
                wanted.append(("Best compromises", lambda: plots.plot_pareto_front(study, target_names=names)))
        if pruned_by is not None and any(trial.intermediate_values for trial in study.trials):
            wanted.append((f"{pruned_by} by evaluation", lambda: plots.plot_intermediate_values(study)))
        return [(title, image) for title, draw in wanted if (image := _draw(title, draw)) is not None]


def _of_objective(
    plots: Any, study: Any, index: int, name: str, *, several: bool
) -> list[tuple[str, Callable[[], Any]]]:
    from optuna.importance import FanovaImportanceEvaluator

    options: dict[str, Any] = {"target_name": name}
    if several:
        options["target"] = lambda trial: trial.values[index]
    evaluator = FanovaImportanceEvaluator(seed=0)
    return [
        (f"History of {name}", lambda: plots.plot_optimization_history(study, **options)),
        (f"Importance for {name}", lambda: plots.plot_param_importances(study, evaluator=evaluator, **options)),
        (f"Values and {name}", lambda: plots.plot_parallel_coordinate(study, **options)),
    ]


def _draw(title: str, draw: Callable[[], Any]) -> bytes | None:
    import matplotlib as mpl
    from matplotlib import pyplot

    try:
        with mpl.rc_context({"svg.fonttype": "none", "figure.figsize": (8, 4.5), "font.size": 9}):
            axes = draw()
            figure = (axes if not hasattr(axes, "flat") else axes.flat[0]).figure
            axes.set_title("")  # the page has it
            drawn = io.BytesIO()
            figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
            return drawn.getvalue()
    except (ValueError, RuntimeError, ZeroDivisionError) as error:  # all trials reached the same, for example
        _log.debug("No picture %s: %s", title, first_line(error))
        return None
    finally:
        pyplot.close("all")


def render_sweep(result: SweepResult, pictures: Sequence[tuple[str, bytes]]) -> str:
    """The report as HTML text, on the page of a run, with pictures: titles and SVG files."""
    shown = Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">')
    panels = [Panel(title, content=shown.format(base64.b64encode(svg).decode(), title)) for title, svg in pictures]
    saved = "" if result.saved_share is None else f"; pruning saved {100 * result.saved_share:.0f} % of the steps"
    sections = [
        *(_best(result, number) for number in result.best),
        Section("Pictures", panels),
        Section("Trials", [_trials(result)], f"{count_words(result)}{saved}"),
    ]
    page = {"name": f"{result.pipeline} · {result.name}", "error": None if result.ok else result.to_dict()["error"]}
    page |= {name: getattr(result, name) for name in ("seconds", "storage", "report_url")}
    return render_report(page, sections=sections)


def count_words(result: SweepResult) -> str:
    """``20 trials: 12 complete, 8 pruned``; with how many there are to be, while they are fewer."""
    states = ("complete", "pruned", "failed", "running", "waiting")
    parts = [f"{count} {state}" for state in states if (count := result.count(state))]
    there = len(result.trials)
    of = "" if there == result.wanted else f"{there} of "
    return of + counted(result.wanted if of else there, "trial") + (f": {', '.join(parts)}" if parts else "")


def _best(result: SweepResult, number: int) -> Section:
    best = result.trial(number)
    names = [f"{name} ({way})" for name, way in zip(result.objective, result.direction, strict=True)]
    rows = [*zip(names, map(number_text, best.objective or ()), strict=False)]
    rows += [(name, _value_text(value)) for name, value in best.values.items()]
    spec = result.best_specs.get(number)
    note = f"Run it with everything that the spec has on: trainflow run {spec}" if spec else ""
    title = "Best trial" if len(result.best) == 1 else "Not beaten"
    return Section(f"{title}: {number}", [Panel(note=note, rows=rows)])


def _trials(result: SweepResult) -> Panel:
    axes = list(dict.fromkeys(name for trial in result.trials for name in trial.values))
    shown = (*result.objective, *(name.rpartition(".")[2] for name in axes))
    return Panel(
        columns=("trial", "state", *shown, "steps", "time", "run", "why"),
        rows=[_row(result, axes, trial) for trial in result.trials],
    )


def _row(result: SweepResult, axes: Sequence[str], trial: TrialState) -> list[Any]:
    notes = trial.notes
    steps, most, seconds, run = (notes.get(name) for name in ("steps", "max_steps", "seconds", "run"))
    title = notes.get("run_name") or run or ""
    return [
        trial.number,
        f"{trial.state}, best" if trial.number in result.best else trial.state,
        *map(number_text, trial.objective or [None] * len(result.objective)),
        *(_value_text(trial.values[name]) if name in trial.values else "" for name in axes),
        "" if steps is None else f"{steps}/{most}" if most not in (None, steps) else str(steps),
        "" if seconds is None else describe_seconds(float(seconds)),
        Markup('<a href="{}">{}</a>').format(f"../../runs/{run}/report.html", title) if run else title,
        notes.get("reason") or "",
    ]


def _value_text(value: Any) -> str:
    return number_words(value) if isinstance(value, float) else str(value)
