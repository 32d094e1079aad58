"""A search of several processes: rank 0 asks, all train the same trials, pruning and failures are agreed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.searching import rate, search_trainer
from tests.support.toys import Classifier
from trainer_lib import TrainerCallback
from trainer_lib.errors import CodeError, ConfigError


class Began(TrainerCallback):
    def __init__(self) -> None:
        self.runs: list[tuple[float, str, int]] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.runs.append((args.learning_rate, Path(args.output_dir).name, state.global_step))


def _searched(folder: str, world: int, **given: Any) -> dict[str, Any]:
    began = Began()
    own = {name: given.pop(name) for name in ("model_init",) if name in given}
    trainer = search_trainer(folder, callbacks=[began], per_device_train_batch_size=6 // world, **own)
    args = dict(vars(trainer.args))
    best = trainer.hyperparameter_search(**{"hp_space": rate, "n_trials": 3, **given})
    assert vars(trainer.args) == args
    return {"best": best, "runs": began.runs, "weights": None}


def searched(folder: str, world: int) -> dict[str, Any]:
    return _searched(folder, world)


def test_two_processes_search_like_one(tmp_path: Path) -> None:
    alone = searched(str(tmp_path / "one"), 1)
    first, second = run_distributed(searched, 2, str(tmp_path / "two"), 2)
    assert first == second
    assert len(first["runs"]) == 3
    assert [run[1:] for run in first["runs"]] == [("run-0", 4), ("run-1", 4), ("run-2", 4)]
    assert [run[0] for run in first["runs"]] == [run[0] for run in alone["runs"]]  # the seed's own suggestions
    assert first["best"].run_id == alone["best"].run_id
    assert first["best"].objective == pytest.approx(alone["best"].objective, rel=1e-4)


def pruned(folder: str) -> dict[str, Any]:
    import optuna

    class Second(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1)

    return _searched(folder, 2, pruner=Second(), storage=f"sqlite:///{folder}.db", study_name="s")


def test_pruning_is_agreed(tmp_path: Path) -> None:
    first, second = run_distributed(pruned, 2, str(tmp_path / "out"))
    assert first["runs"] == second["runs"]
    assert [run[2] for run in first["runs"]] == [4, 2, 4]
    assert [each["state"] for each in first["best"].run_summary] == ["complete", "pruned", "complete"]
    assert first["best"] == second["best"]


class Wide(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__(dropout=0.0)
        self.wide = torch.nn.Linear(6, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"] + self.wide(x).square().mean()} if labels is not None else out


def widened(folder: str) -> dict[str, Any]:
    widths: list[int] = []

    def init(trial: Any) -> Wide:
        width = 1 if trial is None else trial.suggest_int("width", 2, 9)
        assert trial is None or trial.params["width"] == width
        widths.append(width)
        return Wide(width)

    return {**_searched(folder, 2, model_init=init), "widths": widths}


def test_what_model_init_suggests_is_the_same_on_every_process(tmp_path: Path) -> None:
    first, second = run_distributed(widened, 2, str(tmp_path))
    assert first["widths"] == second["widths"]
    assert first["widths"][1:] == [each["hyperparameters"]["width"] for each in first["best"].run_summary]


def several(folder: str) -> Any:
    def objective(metrics: dict[str, float]) -> list[float]:
        return [metrics["eval_loss"], -metrics["eval_loss"]]

    return _searched(folder, 2, compute_objective=objective, direction=["minimize", "minimize"])["best"]


def test_several_objectives(tmp_path: Path) -> None:
    first, second = run_distributed(several, 2, str(tmp_path))
    assert first == second
    assert len(first) == 3  # none is better in both


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

    return _searched(folder, 2, model_init=init, hp_space=space, n_trials=2)


def test_a_trial_that_diverges_fails_on_every_process_and_the_search_goes_on(tmp_path: Path) -> None:
    first, second = run_distributed(diverging, 2, str(tmp_path))
    assert [each["state"] for each in first["best"].run_summary] == ["fail", "complete"]
    assert first["best"] == second["best"]


def bad_space(folder: str) -> None:
    def space(trial: Any) -> dict[str, Any]:
        raise RuntimeError("mine")

    with pytest.raises((RuntimeError, CodeError), match="mine"):
        _searched(folder, 2, hp_space=space)


def bad_name(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"hp_space.learning_rte"):
        _searched(folder, 2, hp_space=lambda trial: {"learning_rte": 0.1})


def bad_objective(folder: str) -> None:
    def objective(metrics: dict[str, float]) -> float:
        raise RuntimeError("mine")

    with pytest.raises((RuntimeError, CodeError), match="mine"):
        _searched(folder, 2, compute_objective=objective)


def caught(folder: str) -> None:
    with pytest.raises(ConfigError, match="catch: An error of one process cannot be caught"):
        _searched(folder, 2, catch=(ValueError,))


@pytest.mark.parametrize("case", [bad_space, bad_name, bad_objective, caught])
def test_an_error_ends_the_search_on_every_process(tmp_path: Path, case: Any) -> None:
    run_distributed(case, 2, str(tmp_path))
