"""A stopped and resumed training of a Keras model equals an uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.keras_toys import classifier, keras, keras_model, pairs, trainer
from tests.support.resuming import prove
from trainer_lib.checkpoint.rng import capture_rng
from trainer_lib.trainer.seed_states import capture_seeds, keep_seeds, part_seeds, restore_seeds

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


def seeds(one: Any) -> dict[str, list[int]]:
    return capture_seeds(one.model)


@pytest.mark.parametrize("optimizer", [None, "Adam", "SGD", "Nadam", "Adafactor", "torch"])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_training_equals_an_uninterrupted_one(optimizer: str | None, stop: int, tmp_path: Path) -> None:
    """Dropout, BatchNorm, accumulation, a smaller last step; the default optimizer, given ones, and torch's."""

    def make(folder: Path, *callbacks: Any) -> Any:
        given: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
        if optimizer == "torch":
            given["optim"] = "adamw_torch"
        elif optimizer is not None:
            more = {"momentum": 0.9} if optimizer == "SGD" else {}
            schedule = keras().optimizers.schedules.CosineDecay(1e-2, 6)
            given["optimizers"] = (getattr(keras().optimizers, optimizer)(schedule, **more), schedule)
        model = classifier(0.5, norm=True)
        return trainer(folder, pairs(22), model=model, callbacks=callbacks, num_train_epochs=2, **given)

    whole, resumed = prove(make, tmp_path, stop)
    assert seeds(whole) == seeds(resumed) and seeds(whole)


def test_an_evaluation_leaves_no_trace_in_the_seeds(tmp_path: Path) -> None:
    module, model = keras(), keras_model()

    class Noisy(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.head, self.drop = module.layers.Dense(3), module.layers.Dropout(0.5, seed=3)

        def call(self, x: Any, labels: Any = None) -> Any:
            logits = self.head(self.drop(x, training=True))  # in evaluations, too
            logits = logits + 0 * module.random.normal((1,))
            return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)

    ends = []
    for name, given in (("plain", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1})):
        module.utils.set_random_seed(0)
        one = trainer(tmp_path / name, pairs(16), model=Noisy(), eval_dataset=pairs(8), **given)
        one.train()
        ends.append((seeds(one), {k: v.clone() for k, v in one.model.state_dict().items()}))
    assert ends[0][0] == ends[1][0] and "global" in ends[0][0]
    assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())


def test_seeds_are_captured_restored_kept_and_parted() -> None:
    model = classifier(0.5)
    before = capture_seeds(model)
    with keep_seeds(model):
        model(np.zeros((2, 5), "float32"), training=True)
        assert capture_seeds(model) != before
    assert capture_seeds(model) == before
    part_seeds(model, 42, 0, 1)
    parted = capture_seeds(model)
    assert parted != before
    part_seeds(model, 42, 0, 2)
    assert capture_seeds(model) != parted
    restore_seeds(model, {**before, "of another model": [1, 2]})
    assert capture_seeds(model) == before


def test_other_models_have_none() -> None:
    assert capture_seeds(torch.nn.Linear(2, 2)).keys() <= {"global"}
    assert "seeds" not in capture_rng()
