"""hyperparameter_search: what is refused, before or at the first trial, leaving the arguments as they were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.searching import fresh, rate, search_trainer
from trainer_lib.errors import ConfigError, MissingExtraError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"direction": "up"}, "direction = up: The direction is unknown"),
        ({"backend": "sigopt"}, r"backend = sigopt: SigOpt has been discontinued. Use backend=\"optuna\""),
        ({"backend": "wandb"}, r"backend = wandb: A sweep of Weights & Biases needs its vendor's server"),
        ({"backend": "optun"}, r'backend = optun: This backend does not exist\. Did you mean "optuna"'),
        ({"n_trials": 0}, r"n_trials = 0: A search needs at least one trial"),
        ({"n_trials": None}, r"n_trials = none: The search would never end"),
        ({"n_jobs": 2}, r"n_jobs = 2: One Trainer trains one trial at a time"),
        ({"storge": "x"}, r'storge: This option does not exist\. Did you mean "storage"'),
        ({"storage": "nowhere"}, r"storage = ArgumentError: The study cannot be opened"),
        ({"hp_space": lambda trial: {"learning_rte": 1.0}}, r'hp_space.learning_rte = 1.0: .*Did you mean "learning_r'),
        ({"hp_space": lambda trial: {"learning_rate": -1.0}}, r"learning_rate = -1.0: The number must be at least 0"),
        (
            {"hp_space": lambda trial: {"output_dir": "x"}},
            r"hp_space.output_dir = x: This argument cannot change from trial to trial",
        ),
        ({"hp_space": lambda trial: None}, r"hp_space = NoneType: The function did not return a mapping"),
        (
            {"hp_space": lambda trial: {"optim_args": object()}},
            r"hp_space: The function returned a value that is not JSON",
        ),
        (
            {"compute_objective": lambda metrics: "good"},
            r"compute_objective = good: The function did not return a number",
        ),
        (
            {"compute_objective": lambda metrics: (1, 2)},
            r"compute_objective = \(1, 2\): The function did not return a number",
        ),
        ({"direction": ["minimize", "maximize"]}, r"did not return 2 numbers, one per direction"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, given: Any, expected: str) -> None:
    trainer = search_trainer(tmp_path)
    args = dict(vars(trainer.args))
    with pytest.raises(ConfigError, match=expected):
        trainer.hyperparameter_search(**{"hp_space": rate, "n_trials": 1, **given})
    assert vars(trainer.args) == args


def test_a_search_needs_fresh_models_and_something_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_init: Every trial trains a fresh model"):
        search_trainer(tmp_path, model=fresh(), model_init=None).hyperparameter_search(rate)
    with pytest.raises(ConfigError, match=r"eval_dataset: Trials are compared by their evaluation"):
        search_trainer(tmp_path, eval_dataset=None, eval_strategy="no").hyperparameter_search(rate)


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r'pip install "trainflow\[search\]"'):
        search_trainer(tmp_path).hyperparameter_search(rate)
