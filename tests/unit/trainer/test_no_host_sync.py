"""A quiet step, one that neither logs nor evaluates nor saves, never makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.toys import Augmented, Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import trainer
from trainer_lib import Trainer, TrainerCallback

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")
STEPS = 6
MODELS: dict[str, tuple[Any, Any]] = {
    "classifier": (Classifier, lambda: classification_rows(80)),
    "augmented": (Classifier, lambda: Augmented(classification_rows(80))),
    "language model": (TokenModel, lambda: token_rows(80)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    "decaying": {"weight_decay": 0.1, "gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
}


class CountingSyncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Between(TrainerCallback):
    """Does something at the first step's begin and at the last step's end."""

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin, self.end = begin, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.end()


def waits(folder: Path, name: str, base: type[Trainer] = Trainer, **given: Any) -> dict[str, int]:
    """The waiting calls of `STEPS` quiet steps."""
    counter, counted = CountingSyncs(), Counter[str]()
    quiet = Between(counter.calls.clear, lambda: counted.update(counter.calls))
    model, rows = MODELS[name]
    one = trainer(folder, rows(), model=model(), cls=base, callbacks=[quiet], max_steps=STEPS, **given)
    with counter:
        one.train()
    assert one.state.global_step == STEPS
    return dict(counted)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_quiet_steps_never_wait(name: str, settings: str, bf16: bool, tmp_path: Path) -> None:
    assert waits(tmp_path, name, bf16=bf16, **SETTINGS[settings]) == {}


def test_a_loss_that_waits_is_counted(tmp_path: Path) -> None:
    class Curious(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            assert loss.item() > 0
            return loss

    found = waits(tmp_path, "classifier", Curious, gradient_accumulation_steps=2)
    assert found == {"aten._local_scalar_dense.default": 2 * STEPS}
