"""hyperparameter_search: what each trial trains with, what is reported, pruned, told and kept, and what is refused."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from tests.support.searching import fresh, rate, search_trainer
from tests.support.toys import Classifier
from tests.support.training import StopAt
from trainer_lib import BestRun, EarlyStoppingCallback, Trainer, TrainerCallback, default_hp_space_ray
from trainer_lib.arguments.enums import HPSearchBackend
from trainer_lib.errors import ConfigError, MissingExtraError, Preempted
from trainer_lib.search.base import TrialRun, default_compute_objective, default_hp_space_optuna
from trainer_lib.search.trial_process import find_place, put_together, sent_as_reference, take_apart
from trainer_lib.trainer.checkpoints.restore import keep_hyperparameters


class Notes(TrainerCallback):
    """What every training of a search began and ended with."""

    def __init__(self) -> None:
        self.began: list[dict[str, Any]] = []
        self.ended: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        names = ("learning_rate", "num_train_epochs", "seed", "output_dir", "run_name", "per_device_train_batch_size")
        noted = {name: getattr(args, name) for name in names}
        told = {"search": state.is_hyper_param_search, "trial": state.trial_name, "params": state.trial_params}
        self.began.append({**noted, **told, "max_steps": state.max_steps})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(state.global_step)


def _fixed(*rates: float) -> Any:
    """A sampler that tries these learning rates in turn."""
    return optuna.samplers.GridSampler({"learning_rate": list(rates)}, seed=0)


def _tried(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.0, 100.0)}


def test_the_best_run_is_the_one_with_the_lowest_loss(tmp_path: Path) -> None:
    trainer = search_trainer(tmp_path)
    best = trainer.hyperparameter_search(hp_space=_tried, n_trials=3, sampler=_fixed(1e-5, 5e-2, 1e-4))
    assert isinstance(best, BestRun)
    assert best.hyperparameters == {"learning_rate": 5e-2}
    losses = {each["hyperparameters"]["learning_rate"]: each["objective"] for each in best.run_summary}
    assert set(losses) == {1e-5, 5e-2, 1e-4}
    assert best.objective == min(losses.values()) == losses[5e-2]
    assert best.run_id == next(each["run_id"] for each in best.run_summary if each["objective"] == best.objective)


def test_a_trial_is_exactly_a_training_with_its_arguments(tmp_path: Path) -> None:
    best = search_trainer(tmp_path / "search").hyperparameter_search(
        lambda trial: {**_tried(trial), "seed": 7, "label_smoothing_factor": 0.1}, n_trials=1, sampler=_fixed(0.05)
    )
    alone = search_trainer(tmp_path / "alone", learning_rate=0.05, seed=7, label_smoothing_factor=0.1)
    alone.train()
    assert best.objective == alone.evaluate()["eval_loss"]
    other = search_trainer(tmp_path / "other", learning_rate=0.05, seed=7)
    other.train()
    assert best.objective != other.evaluate()["eval_loss"]


def test_the_default_objective_leaves_out_what_is_no_metric(tmp_path: Path) -> None:
    other: dict[str, Any] = dict.fromkeys(("epoch", "eval_runtime", "eval_samples_per_second"), 9.0)
    other |= {"eval_mem_cpu_alloc_delta": 5, "num_input_tokens_seen": 7}
    assert default_compute_objective({**other, "eval_loss": 0.5}) == 0.5
    assert default_compute_objective({**other, "eval_loss": 0.5, "eval_f1": 0.25, "eval_em": 0.5}) == 0.75
    with pytest.raises(ConfigError, match="neither a loss nor a metric"):
        default_compute_objective(other)
    scores = iter([0.2, 0.2, 0.9, 0.9, 0.5, 0.5])
    trainer = search_trainer(tmp_path, compute_metrics=lambda p: {"a": next(scores), "b": 0.05})
    best = trainer.hyperparameter_search(rate, n_trials=3, direction="maximize")
    assert (best.run_id, best.objective) == ("1", pytest.approx(0.95))


def test_the_references_defaults_can_be_given_by_name(tmp_path: Path) -> None:
    notes = Notes()
    trainer = search_trainer(tmp_path, max_steps=-1, eval_strategy="no", callbacks=[notes])
    for arguments in ((), (default_hp_space_optuna, default_compute_objective)):
        best = trainer.hyperparameter_search(*arguments, n_trials=1, backend=HPSearchBackend.OPTUNA)
        assert set(best.hyperparameters) == {"learning_rate", "num_train_epochs", "seed", "per_device_train_batch_size"}
    for began in notes.began:
        assert 1e-6 <= began["learning_rate"] <= 1e-4
        assert isinstance(began["num_train_epochs"], float)
        assert began["max_steps"] == began["num_train_epochs"] * -(-24 // began["per_device_train_batch_size"])
    assert HPSearchBackend("ray") is HPSearchBackend.RAY


def test_several_objectives_give_the_runs_that_none_beats(tmp_path: Path) -> None:
    values = iter([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0)])  # smaller first, larger second: trial 2 is beaten by trial 0
    best = search_trainer(tmp_path, eval_strategy="no").hyperparameter_search(
        rate, lambda metrics: next(values), n_trials=3, direction=["minimize", "maximize"]
    )
    assert sorted((run.run_id, run.objective) for run in best) == [("0", [1.0, 5.0]), ("1", [2.0, 9.0])]
    assert all(set(run.hyperparameters) == {"learning_rate"} for run in best)


def test_every_trial_has_its_own_folder_and_says_which_it_is(tmp_path: Path) -> None:
    notes = Notes()
    trainer = search_trainer(tmp_path, callbacks=[notes], save_strategy="steps", save_steps=4)
    trainer.hyperparameter_search(rate, n_trials=2)
    assert [began["output_dir"] for began in notes.began] == [str(tmp_path / "run-0"), str(tmp_path / "run-1")]
    assert [began["run_name"] for began in notes.began] == ["run-0", "run-1"]
    assert [set(began["params"]) for began in notes.began] == [{"learning_rate"}] * 2
    assert all(began["search"] for began in notes.began)
    assert sorted(path.parent.name for path in tmp_path.glob("run-*/checkpoint-4")) == ["run-0", "run-1"]
    state = json.loads((tmp_path / "run-1" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["trial_params"] == notes.began[1]["params"]


def test_a_name_of_ones_own_names_folder_and_run(tmp_path: Path) -> None:
    notes = Notes()
    trainer = search_trainer(tmp_path, callbacks=[notes], report_to="jsonl")
    trainer.hyperparameter_search(rate, n_trials=2, hp_name=lambda trial: "same")
    assert [began["run_name"] for began in notes.began] == ["same", "same-1"]
    assert [began["trial"] for began in notes.began] == ["same", "same"]
    for name in ("same", "same-1"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert not (tmp_path / "metrics.jsonl").exists()
    trainer.evaluate()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match=r"hp_name = a/b: The name cannot be used for a folder"):
        trainer.hyperparameter_search(rate, n_trials=1, hp_name=lambda trial: "a/b")


def test_the_trainer_is_meanwhile_and_afterwards_as_it_was(tmp_path: Path) -> None:
    seen: list[tuple[bool, dict[str, Any]]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((args is given, dict(vars(given))))

    trainer = search_trainer(tmp_path, max_steps=2, seed=3)
    trainer.train()
    trainer.add_callback(Watch())
    given, model, state, args = trainer.args, trainer.model, trainer.state, dict(vars(trainer.args))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.hyperparameter_search(lambda trial: {**rate(trial), "max_steps": 4, "fp16": False}, n_trials=2)
    assert seen and all(values == args and not is_given for is_given, values in seen)
    assert trainer.args is given
    assert vars(trainer.args) == args
    assert trainer.model is model
    assert trainer.state is state
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert trainer.hp_name is None
    assert trainer.callback_handler.model is model
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train()
    assert trainer.state.max_steps == 2
    assert not trainer.state.is_hyper_param_search


def test_the_model_may_depend_on_the_trial_which_may_be_given_to_train_directly(tmp_path: Path) -> None:
    widths = []

    class Wide(Classifier):
        def __init__(self, width: int) -> None:
            super().__init__(dropout=0.0)
            self.extra = torch.nn.Linear(6, width)

    def init(trial: Any) -> torch.nn.Module:
        is_mapping = isinstance(trial, dict)
        width = 1 if trial is None else trial["width"] if is_mapping else trial.suggest_int("width", 2, 5)
        widths.append(width)
        return Wide(width)

    trainer = search_trainer(tmp_path, model_init=init, ddp_find_unused_parameters=True)
    best = trainer.hyperparameter_search(lambda trial: {**rate(trial), "not_an_argument": 1}, n_trials=3)
    assert widths[0] == 1  # the constructor's
    assert set(best.hyperparameters) == {"learning_rate", "width"}
    assert widths[1:] == [each["hyperparameters"]["width"] for each in best.run_summary]
    trainer.train(trial={"width": 7})
    assert widths[4:] == [7]
    assert trainer.state.trial_params == {"width": 7}
    assert not trainer.state.is_hyper_param_search


def test_every_evaluation_is_reported_and_may_prune(tmp_path: Path) -> None:
    class After(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1 and trial.last_step >= 2)

    notes = Notes()
    trainer = search_trainer(tmp_path, callbacks=[notes])
    study_file = f"sqlite:///{tmp_path}/study.db"
    best = trainer.hyperparameter_search(rate, n_trials=3, pruner=After(), storage=study_file, study_name="s")
    assert [each["state"] for each in best.run_summary] == ["complete", "pruned", "complete"]
    assert notes.ended == [4, 2, 4]  # the pruned one was ended properly, at its first evaluation
    study = optuna.load_study(study_name="s", storage=study_file)
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[2, 4], [2], [2, 4]]
    assert study.trials[0].value == study.trials[0].intermediate_values[4]
    study._storage.remove_session()
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]


def test_early_stopping_starts_anew_with_every_trial(tmp_path: Path) -> None:
    notes = Notes()
    losses = iter([1.0, 2.0, 1.5, 1.4, 1.3])  # trial 0 stops at its second evaluation; trial 1 must not
    trainer = search_trainer(
        tmp_path,
        callbacks=[EarlyStoppingCallback(1), notes],
        compute_metrics=lambda p: {"x": next(losses)},
        metric_for_best_model="x",
        greater_is_better=False,
        max_steps=6,
    )
    with pytest.raises(StopIteration):
        trainer.hyperparameter_search(rate, n_trials=3)
    assert notes.ended == [4, 6]


def test_a_search_in_a_storage_goes_on_and_counts_on(tmp_path: Path) -> None:
    given: dict[str, Any] = {"storage": f"sqlite:///{tmp_path}/s.db", "study_name": "mine"}
    first = search_trainer(tmp_path / "out").hyperparameter_search(rate, n_trials=2, **given)
    with pytest.raises(ConfigError, match=r"study_name = mine: A study of this name is in the storage.*load_if_exists"):
        search_trainer(tmp_path / "out").hyperparameter_search(rate, n_trials=1, **given)
    notes = Notes()
    trainer = search_trainer(tmp_path / "out", callbacks=[notes])
    second = trainer.hyperparameter_search(rate, n_trials=2, load_if_exists=True, **given)
    assert [each["run_id"] for each in second.run_summary] == ["0", "1", "2", "3"]
    assert second.run_summary[:2] == first.run_summary
    assert [Path(began["output_dir"]).name for began in notes.began] == ["run-2", "run-3"]
    tried = [each["hyperparameters"]["learning_rate"] for each in second.run_summary]
    assert len(set(tried)) == 4  # a continued study does not draw the same again


def test_searches_are_repeatable_by_the_seed(tmp_path: Path) -> None:
    def tried(folder: str, seed: int) -> list[float]:
        best = search_trainer(tmp_path / folder, seed=seed).hyperparameter_search(rate, n_trials=2)
        return [each["hyperparameters"]["learning_rate"] for each in best.run_summary]

    assert tried("a", 1) == tried("b", 1) != tried("c", 2)


def test_a_preempted_trial_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    given: dict[str, Any] = {"storage": f"sqlite:///{tmp_path}/s.db", "study_name": "s"}
    stopped = search_trainer(tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Preempted):
        stopped.hyperparameter_search(rate, n_trials=2, **given)
    assert (tmp_path / "run-0" / "checkpoint-3").is_dir()
    notes = Notes()
    trainer = search_trainer(tmp_path, callbacks=[notes])
    best = trainer.hyperparameter_search(rate, n_trials=1, load_if_exists=True, **given)
    assert [each["state"] for each in best.run_summary] == ["fail", "complete"]
    assert best.run_summary[0]["hyperparameters"] == best.run_summary[1]["hyperparameters"]
    assert Path(notes.began[0]["output_dir"]).name == "run-0"
    whole = search_trainer(tmp_path / "whole", learning_rate=best.hyperparameters["learning_rate"])
    whole.train()
    assert best.objective == whole.evaluate()["eval_loss"]


def test_an_objective_that_is_not_finite_counts_as_failed(tmp_path: Path) -> None:
    values = iter([float("nan"), 1.0])
    trainer = search_trainer(tmp_path, eval_strategy="no")
    best = trainer.hyperparameter_search(rate, lambda metrics: next(values), n_trials=2)
    assert [each["state"] for each in best.run_summary] == ["fail", "complete"]
    with pytest.raises(ConfigError, match=r"None of 1 trials was completed"):
        trainer.hyperparameter_search(rate, lambda metrics: float("inf"), n_trials=1, hp_name=lambda trial: "b")


def test_an_error_ends_the_search_unless_it_is_to_be_caught(tmp_path: Path) -> None:
    def metrics(given: Any) -> dict[str, float]:
        raise RuntimeError("mine")

    storage: dict[str, Any] = {"storage": f"sqlite:///{tmp_path}/s.db", "study_name": "s", "load_if_exists": True}
    trainer = search_trainer(tmp_path, compute_metrics=metrics)
    args = dict(vars(trainer.args))
    with pytest.raises(RuntimeError, match="mine"):
        trainer.hyperparameter_search(rate, n_trials=2, **storage)
    assert vars(trainer.args) == args
    with pytest.raises(ConfigError, match="None of 3 trials"):
        trainer.hyperparameter_search(rate, n_trials=2, catch=(RuntimeError,), **storage)


def test_timeout_ends_the_search_between_trials(tmp_path: Path) -> None:
    best = search_trainer(tmp_path).hyperparameter_search(rate, n_trials=None, timeout=0.2, gc_after_trial=True)
    assert len(best.run_summary) >= 1


def test_overridden_methods_are_used_by_trials(tmp_path: Path) -> None:
    calls: list[str] = []

    class Mine(Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("optimizer")
            return super().create_optimizer(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("evaluate")
            return super().evaluate(*args, **kwargs)

    search_trainer(tmp_path, cls=Mine).hyperparameter_search(rate, n_trials=2)
    assert calls == ["optimizer", "evaluate", "evaluate"] * 2


def test_a_trials_checkpoints_never_replace_those_of_an_earlier_search(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    search_trainer(tmp_path, **given).hyperparameter_search(rate, n_trials=2)
    (tmp_path / "run-0").rename(tmp_path / "run-9")
    with pytest.raises(ConfigError, match=r"run-1: The folder holds checkpoints of an earlier run"):
        search_trainer(tmp_path, **given).hyperparameter_search(rate, n_trials=2)
    assert (tmp_path / "run-1" / "checkpoint-4").is_dir()


def test_a_trial_without_memory_leaves_the_next_one_as_it_is(tmp_path: Path) -> None:
    class Full(TrainerCallback):
        """Memory runs out inside the first optimizer step of all, after fp16 gradients were unscaled."""

        raised = False

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.raised:
                self.raised = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    best = search_trainer(tmp_path / "a", fp16=True, callbacks=[Full()]).hyperparameter_search(
        _tried, n_trials=2, sampler=_fixed(0.01, 0.05)
    )
    alone = search_trainer(tmp_path / "b", fp16=True, learning_rate=best.hyperparameters["learning_rate"])
    alone.train()
    assert best.run_id == "1" and best.objective == alone.evaluate()["eval_loss"]


# -- what is refused --------------------------------------------------------------------------------------------------
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
        ({"hp_space": lambda trial: {"output_dir": "x"}}, r"hp_space.output_dir = x: This argument cannot change from"),
        ({"hp_space": lambda trial: None}, r"hp_space = NoneType: The function did not return a mapping"),
        ({"hp_space": lambda trial: {"optim_args": object()}}, r"hp_space: The function returned a value that is not"),
        ({"compute_objective": lambda metrics: "good"}, r"compute_objective = good: The function did not return a"),
        ({"compute_objective": lambda metrics: (1, 2)}, r"compute_objective = \(1, 2\): The function did not return"),
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


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "trainflow\[ray\]"'):
        search_trainer(tmp_path).hyperparameter_search(backend="ray", n_trials=1)
    with pytest.raises(MissingExtraError, match="ray"):
        default_hp_space_ray(None)
    assert "ray" not in sys.modules


def test_where_a_trial_goes_on(tmp_path: Path) -> None:
    trainer = search_trainer(tmp_path / "run-a", save_strategy="steps", save_steps=2)
    trainer.train()
    pointer = {"trial": "a", "folder": "run-a", "step": 2, "values": {"seed": 1}}
    output = str(tmp_path)
    assert find_place(output, "a", "run-a", {"seed": 1}, None).origin is None
    assert find_place(output, "a", "run-a", {"seed": 1}, pointer).folder == "run-a"
    taken = find_place(output, "b", "run-b", {"seed": 1}, pointer)
    assert taken.folder.startswith("run-b-")
    assert taken.origin is not None and taken.origin.endswith("run-a/checkpoint-2")
    # Started again, it finds its folder; with other values it is another training.
    assert find_place(output, "b", "run-b", {"seed": 1}, pointer) == taken
    assert find_place(output, "b", "run-b", {"seed": 2}, pointer).folder != taken.folder
    assert find_place(output, "a", "run-a", {"seed": 2}, pointer).origin is not None
    # The one that it points to was removed: the next one is what that trial had right after.
    later = find_place(output, "b", "run-b", {"seed": 1}, {**pointer, "step": 3}).origin
    assert later is not None and later.endswith("checkpoint-4")
    with pytest.raises(ConfigError, match="Keep more checkpoints"):
        find_place(output, "b", "run-b", {"seed": 1}, {**pointer, "step": 5})
    # It trains from there with its own rate.
    rates: list[float] = []

    def judge(metrics: Any, step: int | None) -> tuple[list[float], bool]:
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return [0.0], False

    values = {"learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer._trainflow.trials.run_trial(TrialRun("run-b", values, None, False, judge, taken.origin))
    assert rates == [0.5]


class Weighted(Trainer):
    """A subclass whose constructor takes more than the library's."""

    def __init__(self, weight: float, **given: Any) -> None:
        self.weight = weight
        super().__init__(**given)


class Watching(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def test_a_trainer_is_put_together_from_its_parts(tmp_path: Path) -> None:
    given = search_trainer(tmp_path)
    data = {"train_dataset": given.train_dataset, "eval_dataset": given.train_dataset}
    trainer: Any = Weighted(2.0, model_init=fresh, args=given.args, **data)
    trainer.weight, trainer.eval_dataset = 3.0, given.eval_dataset
    trainer.add_callback(Watching(trainer))
    with sent_as_reference(trainer):
        parts = take_apart(trainer)
        # As a pickle does it: what refers to the Trainer is a call that gives the new one.
        give, none = trainer.__reduce_ex__(4)
    callback = next(name for name, part in parts.items() if isinstance(part, Watching))

    def fetch() -> dict[str, Any]:
        assert none == ()
        return {**parts, callback: Watching(give())}

    made = put_together(parts["class"], fetch)
    assert made is not trainer and type(made) is Weighted
    assert (made.weight, made.eval_dataset) == (3.0, given.eval_dataset)
    assert any(isinstance(each, Watching) and each.trainer is made for each in made.callback_handler.callbacks)
    made.train()
    assert made.state.global_step == 4
    assert "__reduce_ex__" not in vars(trainer)


def test_a_token_of_the_hub_stays_here(tmp_path: Path) -> None:
    trainer = search_trainer(tmp_path, hub_token="hf_secret")
    assert take_apart(trainer)["args"].hub_token is None
    assert trainer.args.hub_token == "hf_secret"


@pytest.mark.parametrize("kind", ["linear", "constant", "reduce"])
def test_settings_of_now_on_the_state_of_another_training(kind: str) -> None:
    def make(rate: float, decay: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate, weight_decay=decay)
        if kind == "reduce":
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        factor = (lambda step: 1 - step / 10) if kind == "linear" else (lambda step: 1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(schedule: Any) -> None:
        schedule.step(1.0) if kind == "reduce" else schedule.step()

    other, now = make(0.1, 0.0), make(0.4, 0.5)
    for _ in range(5):
        other[0].step()
        step(other[1])
    with keep_hyperparameters(*now, 0.4, 0.1):
        now[0].load_state_dict(copy.deepcopy(other[0].state_dict()))
        now[1].load_state_dict(other[1].state_dict())
    [group] = now[0].param_groups
    assert group["weight_decay"] == 0.5
    assert group["lr"] == pytest.approx(0.2 if kind == "linear" else 0.4)
    now[0].step()
    step(now[1])
    assert group["lr"] == pytest.approx(0.16 if kind == "linear" else 0.4)
