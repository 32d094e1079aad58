"""The pictures of a study, as Optuna draws them: history, importance, parallel coordinates, learning curves."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_lib.errors import first_line

_log = logging.getLogger(__name__)
_LEAST = 2
"""Complete trials that a picture needs."""


def draw_study(study: Any, objectives: Sequence[str], pruned_by: str | None) -> list[tuple[str, bytes]]:
    """Title and SVG file of each picture that the trials so far allow.

    Args:
        study: Optuna's study.
        objectives: the names of its objectives.
        pruned_by: the metric that trials report while they train; None: none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these functions are experimental by Optuna's word
        from optuna.visualization import matplotlib as plots

        study = _with_short_names(study)
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
        (
            f"Importance for {name}",
            lambda: plots.plot_param_importances(study, evaluator=evaluator, **options),
        ),
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


def _with_short_names(study: Any) -> Any:
    """A copy of the study whose parameters have the last part of their names, where that is enough."""
    import optuna

    names = {name for trial in study.trials for name in trial.params}
    short: Mapping[str, str] = {
        name: name.rpartition(".")[2]
        if sum(each.rpartition(".")[2] == name.rpartition(".")[2] for each in names) == 1
        else name
        for name in names
    }
    copy = optuna.create_study(directions=study.directions)
    for trial in study.trials:
        if trial.state.is_finished():
            copy.add_trial(
                optuna.trial.create_trial(
                    state=trial.state,
                    values=trial.values,
                    params={short[name]: value for name, value in trial.params.items()},
                    distributions={short[name]: each for name, each in trial.distributions.items()},
                    intermediate_values=trial.intermediate_values,
                )
            )
    return copy
