"""The setting `train.stop_early`, and the training arguments that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import PydanticCustomError

from trainer_lib.base.metric_names import LESS_IS_BETTER
from trainer_lib.protocol.requests import StopEarly
from trainflow.tasks.settings.keyed_settings import Settings

_ENDINGS = ("loss", "error", "rmse", "mae", "mase", "perplexity", "nats_per_token")
_INTERVALS = ("steps", "epoch")


class StopEarlySettings(Settings):
    """train.stop_early: the training ends when evaluations no longer improve, with the best weights."""

    metric: str = Field(
        default="loss", min_length=1, description="Metric of the evaluations while training: loss, or its name."
    )
    patience: int = Field(default=3, ge=1, description="Evaluations in a row without improvement that end it.")
    threshold: float = Field(default=0.0, ge=0, description="Least improvement that counts, in the metric's unit.")
    greater_is_better: bool | None = Field(
        default=None, description="Whether a greater metric is better; unset: not of losses and errors."
    )

    def to_request(self) -> StopEarly:
        """These settings as the worker takes them."""
        return StopEarly(self.patience, self.threshold)

    @property
    def wants_greater(self) -> bool:
        """Whether a greater metric is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        name = self.metric.removeprefix("eval_")
        return name not in LESS_IS_BETTER and not name.endswith(_ENDINGS)


def fill_arguments(section: Any) -> Any:
    """The section `train` with what early stopping needs: evaluations, checkpoints as often, and the best one loaded.

    What the section says itself stays, so a section that is filled in already comes back as it is.

    Raises:
        PydanticCustomError: `args` names another metric, or no evaluations.
    """
    if not isinstance(section, Mapping) or section.get("stop_early") is None:
        return section
    given, args = section["stop_early"], section.get("args") or {}
    if not isinstance(args, Mapping):
        return section
    try:
        chosen = given if isinstance(given, StopEarlySettings) else StopEarlySettings.model_validate(given)
    except ValidationError:  # the field itself says what is wrong, and where
        return section
    named, intervals = args.get("metric_for_best_model"), [args.get(f"{name}_strategy") for name in ("eval", "save")]
    if named is not None and str(named).removeprefix("eval_") != chosen.metric.removeprefix("eval_"):
        what = f"train.args.metric_for_best_model names another metric ({named}): remove it there."
        raise PydanticCustomError("another_metric", "{what}", {"what": what})
    if intervals[0] not in (None, *_INTERVALS):
        what = "it needs evaluations while training: set train.args.eval_strategy to steps or epoch, or remove it."
        raise PydanticCustomError("no_evaluations", "{what}", {"what": what})
    interval = next((each for each in intervals if each in _INTERVALS), "epoch")
    wanted: dict[str, Any] = {
        "eval_strategy": interval,
        "save_strategy": interval,
        "metric_for_best_model": chosen.metric,
        "greater_is_better": chosen.wants_greater,
        "load_best_model_at_end": True,
        "save_total_limit": 2,  # the best and the last
    }
    if interval == "steps":
        steps = args.get("eval_steps", args.get("save_steps"))
        wanted |= {} if steps is None else {"eval_steps": steps, "save_steps": steps}
    split = section.get("eval_split")
    filled = {name: value for name, value in wanted.items() if args.get(name) is None}
    return {**section, "eval_split": "validation" if split is None else split, "args": {**args, **filled}}
