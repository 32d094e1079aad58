"""What a trial in another process is made of, without Ray: where it goes on, the Trainer's parts, and its settings."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.searching import fresh, search_trainer
from trainer_lib import Trainer, TrainerCallback, default_hp_space_ray
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.optim.present_settings import PresentSettings
from trainer_lib.search.trial_process import find_place, put_together, sent_as_reference, take_apart


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
    present = PresentSettings(*now, 0.4)
    now[0].load_state_dict(copy.deepcopy(other[0].state_dict()))
    now[1].load_state_dict(other[1].state_dict())
    present.put_back(0.1)
    [group] = now[0].param_groups
    assert group["weight_decay"] == 0.5
    assert group["lr"] == pytest.approx(0.2 if kind == "linear" else 0.4)
    now[0].step()
    step(now[1])
    assert group["lr"] == pytest.approx(0.16 if kind == "linear" else 0.4)
