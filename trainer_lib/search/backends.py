"""The libraries that propose hyperparameters."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.enums import HPSearchBackend
from trainer_lib.base.restore_process import variables_kept
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.search.base import SearchBackend, SearchSettings
from trainer_lib.search.optuna import OptunaSearch

if TYPE_CHECKING:
    from trainer_lib.search.trials import TrialRunner
_WHY_NOT = {
    "sigopt": "SigOpt has been discontinued.",
    "wandb": "A sweep of Weights & Biases needs its vendor's server, which proposes the values.",
}


def create_backend(name: Any, runner: TrialRunner, settings: SearchSettings) -> SearchBackend:
    """The backend of that name; None = optuna. Raises ConfigError for any other name."""
    wanted = "optuna" if name is None else str(getattr(name, "value", name)).lower()
    if wanted == "optuna":
        return OptunaSearch(runner, settings)
    if wanted == "ray":
        search: SearchBackend = _ray().RaySearch(runner, settings)
        return search
    remedy = 'Use backend="optuna"; several processes may work on one storage at the same time.'
    raise ConfigError(
        _WHY_NOT.get(wanted, "This backend does not exist."),
        field="backend",
        value=wanted,
        remedy=remedy if wanted in _WHY_NOT else suggestion(wanted, list(HPSearchBackend)),
    )


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    """Spaces of `ray.tune`: learning rate, epochs, seed and micro-batch. Raises MissingExtraError without ray."""
    space: dict[str, Any] = _ray().default_space(trial)
    return space


def _ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "A search with Ray Tune needs the package ray.", field="backend", value="ray", extra="ray"
        )
    with variables_kept({}, "RAY_CLIENT_MODE"):  # set by an import of Ray, and read by that alone
        return importlib.import_module("trainer_lib.search.ray_tune")
