"""The libraries that propose hyperparameters."""

from __future__ import annotations

from typing import Any

from trainer_lib.errors import ConfigError
from trainer_lib.search.base import SearchBackend, SearchHooks, SearchSettings
from trainer_lib.search.optuna import OptunaSearch
from trainer_lib.suggestions import suggestion

_WHY_NOT = {
    "ray": "Searching with Ray Tune is not supported.",
    "sigopt": "SigOpt has been discontinued.",
    "wandb": "A sweep of Weights & Biases needs its vendor's server, which proposes the values.",
}


def create_backend(name: Any, hooks: SearchHooks, settings: SearchSettings) -> SearchBackend:
    """The backend of that name; None = optuna. Raises ConfigError for any other name."""
    wanted = "optuna" if name is None else str(getattr(name, "value", name)).lower()
    if wanted != "optuna":
        remedy = 'Use backend="optuna"; several processes may work on one storage at the same time.'
        raise ConfigError(
            _WHY_NOT.get(wanted, "This backend does not exist."),
            field="backend",
            value=wanted,
            remedy=remedy if wanted in _WHY_NOT else suggestion(wanted, ["optuna"]),
        )
    return OptunaSearch(hooks, settings)
