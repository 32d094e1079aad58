"""`debug="underflow_overflow"` and `past_index`: what is looked at, and what is handed on, inside the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib.errors import ConfigError, NonFiniteError

ROWS = classification_rows(12)


class Overflowing(Classifier):
    """Its second layer makes an infinity out of what the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data.fill_(3e38)
        self.head.bias.data.fill_(3e38)


def test_the_first_value_that_is_not_finite_is_named_with_the_modules_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = trainer(tmp_path, ROWS, model=Overflowing(), debug="underflow_overflow", max_steps=2)
    with pytest.raises(
        NonFiniteError, match=r"debug = underflow_overflow: .* in the output of head \(Linear\)"
    ) as found:
        one.train()
    assert one.state.global_step == 0
    assert found.value.remedy is not None and found.value.details is not None
    frames = [line for line in found.value.details.splitlines() if line.endswith(")") and not line.startswith(" ")]
    assert frames == ["body (Linear)", "norm (LayerNorm)", "dropout (Dropout)", "head (Linear)"]
    assert "  weights   3.00e+38  3.00e+38  (3, 8)" in found.value.details
    assert "head (Linear) is not finite" in caplog.text


def test_bad_inputs_and_weights_are_told_apart(tmp_path: Path) -> None:
    rows = [{**row, "x": torch.full((6,), torch.nan)} for row in ROWS]
    with pytest.raises(NonFiniteError, match=r"in the input of body \(Linear\)"):
        trainer(tmp_path / "a", rows, debug="underflow_overflow", max_steps=1).train()
    broken = Classifier()
    broken.norm.weight.data[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"in the weights of norm \(LayerNorm\)"):
        trainer(tmp_path / "b", ROWS, model=broken, debug=["underflow_overflow"], max_steps=1).train()


def test_a_sound_model_trains_as_without_it_and_keeps_no_hook(tmp_path: Path) -> None:
    watched = trainer(tmp_path / "a", ROWS, debug="underflow_overflow", max_steps=3)
    watched.train()
    plain = trainer(tmp_path / "b", ROWS, max_steps=3)
    plain.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name])
    assert not any(module._forward_hooks for module in watched.model.modules())


# ---------------------------------------------------------------------------------------------------------- past_index
class Recurrent(nn.Module):
    """Adds what it remembers of the batch before; the memory is its third output."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.as_tuple = as_tuple
        self.given: list[float | None] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: torch.Tensor | None = None) -> Any:
        assert mems is None or not mems.requires_grad
        self.given.append(None if mems is None else float(mems))
        logits = self.layer(x) + (0 if mems is None else mems)
        memory = logits.mean() * 0 + len(self.given)
        if labels is None:
            return {"logits": logits, "memory": memory}
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, logits, memory) if self.as_tuple else {"loss": loss, "logits": logits, "memory": memory}


@pytest.mark.parametrize("as_tuple", [True, False])
def test_the_memory_is_fed_back_and_reset_each_epoch_and_around_evaluation(as_tuple: bool, tmp_path: Path) -> None:
    model = Recurrent(as_tuple)
    given: dict[str, Any] = {"eval_dataset": ROWS[:8], "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2}
    trainer(tmp_path, ROWS, model=model, past_index=2, per_device_eval_batch_size=4, **given).train()
    steps = [None, 1.0], [None, 3.0], [None], [None], [None, 7.0], [None, 9.0], [None, 11.0]
    # Steps 1, 2 | evaluation | step 3 (epoch ends) | step 4 | evaluation | steps 5, 6 | evaluation
    assert model.given == [each for part in steps for each in part]


def test_predictions_without_labels_have_a_memory_too(tmp_path: Path) -> None:
    model = Recurrent(as_tuple=False)
    one = trainer(tmp_path, None, model=model, past_index=2, per_device_eval_batch_size=4)
    one.predict([{"x": row["x"]} for row in ROWS])
    assert model.given == [None, 1.0, 2.0]


def test_a_position_that_the_outputs_do_not_have_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="past_index = 5: The model returns 3 values"):
        trainer(tmp_path, ROWS, model=Recurrent(as_tuple=True), past_index=5, max_steps=1).train()
