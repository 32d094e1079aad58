"""A search of several processes: rank 0 asks, all train the same trials, pruning and failures are agreed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import loaded, run_distributed
from tests.support.searching import rate, search_trainer
from tests.support.toys import Classifier
from trainer_lib import TrainerCallback
from trainer_lib.errors import CodeError, ConfigError


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("optuna", "sqlalchemy"):
        yield


class Runs(TrainerCallback):
    """Keeps (rate, folder, steps) of each training."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, str, int]] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept.append((args.learning_rate, Path(args.output_dir).name, state.global_step))


def searched(folder: str, world: int = 2, model_init: Any = None, **settings: Any) -> tuple[Any, list[Any]]:
    runs = Runs()
    init = {} if model_init is None else {"model_init": model_init}
    trainer = search_trainer(folder, callbacks=[runs], per_device_train_batch_size=6 // world, **init)
    args = dict(vars(trainer.args))
    best = trainer.hyperparameter_search(**{"hp_space": rate, "n_trials": 3, **settings})
    assert vars(trainer.args) == args
    return best, runs.kept


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(in_one_group, 2, str(tmp_path_factory.mktemp("two")), timeout_s=120)


def in_one_group(folder: str) -> dict[str, Any]:
    refused(f"{folder}/refused")
    kinds = {"searched": searched, "pruned": pruned, "widened": widened, "diverging": diverging}
    return {name: find(f"{folder}/{name}") for name, find in kinds.items()}


def states(best: Any) -> list[str]:
    return [trial["state"] for trial in best.run_summary]


def test_two_processes_search_like_one(two: list[dict[str, Any]], tmp_path: Path) -> None:
    alone, alone_runs = searched(str(tmp_path), 1)
    first, second = (rank["searched"] for rank in two)
    assert first == second
    best, runs = first
    assert [run[1:] for run in runs] == [("run-0", 4), ("run-1", 4), ("run-2", 4)]
    assert [run[0] for run in runs] == [run[0] for run in alone_runs]  # the seed's own suggestions
    assert best.run_id == alone.run_id
    assert best.objective == pytest.approx(alone.objective, rel=1e-4)


def pruned(folder: str) -> Any:
    import optuna

    class Second(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1)

    return searched(folder, pruner=Second(), storage=f"sqlite:///{folder}.db", study_name="s")


def test_pruning_is_agreed(two: list[dict[str, Any]]) -> None:
    first, second = (rank["pruned"] for rank in two)
    assert first == second
    assert [run[2] for run in first[1]] == [4, 2, 4]
    assert states(first[0]) == ["complete", "pruned", "complete"]


class Wide(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__(dropout=0.0)
        self.wide = torch.nn.Linear(6, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"] + self.wide(x).square().mean()} if labels is not None else out


def widened(folder: str) -> tuple[list[int], list[int], int]:
    widths: list[int] = []

    def init(trial: Any) -> Wide:
        width = 1 if trial is None else trial.suggest_int("width", 2, 9)
        assert trial is None or trial.params["width"] == width
        widths.append(width)
        return Wide(width)

    def objective(metrics: dict[str, float]) -> list[float]:
        return [metrics["eval_loss"], -metrics["eval_loss"]]

    best, _ = searched(f"{folder}/widths", model_init=init)
    both, _ = searched(f"{folder}/both", compute_objective=objective, direction=["minimize", "minimize"])
    return widths[1:], [trial["hyperparameters"]["width"] for trial in best.run_summary], len(both)


def test_what_model_init_suggests_and_several_objectives_are_the_same_on_every_process(
    two: list[dict[str, Any]],
) -> None:
    first, second = (rank["widened"] for rank in two)
    assert first == second
    widths, suggested, best = first
    assert widths == suggested
    assert best == 3  # none is better in both


class Diverging(Classifier):
    diverge = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"] / 0.0} if self.diverge and self.training else out


def diverging(folder: str) -> Any:
    def init(trial: Any) -> Diverging:
        model = Diverging(0.0)
        model.diverge = trial is not None and trial.number == 0
        return model

    def space(trial: Any) -> dict[str, Any]:
        return {**rate(trial), "max_nonfinite_steps": 1}

    return searched(folder, model_init=init, hp_space=space, n_trials=2)[0]


def test_a_trial_that_diverges_fails_on_every_process_and_the_search_goes_on(two: list[dict[str, Any]]) -> None:
    first, second = (rank["diverging"] for rank in two)
    assert states(first) == ["fail", "complete"]
    assert first == second


def raising(_: Any) -> Any:
    raise RuntimeError("mine")


MINE: Any = (RuntimeError, CodeError)
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"hp_space": raising}, MINE, "mine"),
    ({"hp_space": lambda trial: {"learning_rte": 0.1}}, ConfigError, r"hp_space.learning_rte"),
    ({"compute_objective": raising}, MINE, "mine"),
    ({"catch": (ValueError,)}, ConfigError, "catch: An error of one process cannot be caught"),
]


def refused(folder: str) -> None:
    """An error ends the search on every process."""
    for number, (settings, error, text) in enumerate(REFUSED):
        with pytest.raises(error, match=text):
            searched(f"{folder}/{number}", **settings)
