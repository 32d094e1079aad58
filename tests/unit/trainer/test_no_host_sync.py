"""A quiet step, one that neither logs nor evaluates nor saves, never makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.toys import Augmented, Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import Note, trainer
from trainer_lib import Trainer
from trainer_lib.data.rows.mixture import Mixture, Piece

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")
STEPS = 6


class Mixed(list[Any]):
    mixture = Mixture({"a": 30, "b": 50}, {}, [Piece(0, {"a": 0.5, "b": 0.5})])


def mixed_rows() -> Mixed:
    return Mixed({**row, "source": "a" if place < 30 else "b"} for place, row in enumerate(token_rows(80)))


MODELS: dict[str, tuple[Any, Any]] = {
    "classifier": (Classifier, lambda: classification_rows(80)),
    "augmented": (Classifier, lambda: Augmented(classification_rows(80))),
    "language model": (TokenModel, lambda: token_rows(80)),
    "mixture": (TokenModel, mixed_rows),
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


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine take the path of an accelerator, where reading a number waits; on the CPU it reads the norm."""
    monkeypatch.setattr("trainer_lib.trainer.engine.is_on_host", lambda tensor: False)


def waits(folder: Path, name: str, base: type[Trainer] = Trainer, **given: Any) -> dict[str, int]:
    """The waiting calls of `STEPS` quiet steps."""
    counter, counted = CountingSyncs(), Counter[str]()
    # From the first step's begin to the last step's end.
    begin = Note("on_step_begin", lambda state, **_: counter.calls.clear() if state.global_step == 0 else None)
    end = Note("on_step_end", lambda state, **_: counted.update(counter.calls) if state.global_step == STEPS else None)
    model, rows = MODELS[name]
    one = trainer(folder, rows(), model=model(), cls=base, callbacks=[begin, end], max_steps=STEPS, **given)
    with counter:
        one.train()
    assert one.state.global_step == STEPS
    return dict(counted)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("language model", each) for each in SETTINGS),
        ("classifier", "plain"),
        ("augmented", "accumulated"),
        ("mixture", "accumulated"),
    ],
)
def test_quiet_steps_never_wait(name: str, settings: str, bf16: bool, tmp_path: Path) -> None:
    assert waits(tmp_path, name, bf16=bf16, **SETTINGS[settings]) == {}


def test_the_losses_of_sources_are_logged_where_steps_wait_anyway(tmp_path: Path) -> None:
    one = trainer(tmp_path, mixed_rows(), model=TokenModel(), max_steps=4, logging_strategy="steps", logging_steps=1)
    one.train()
    logs = [entry for entry in one.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4]
    # The mean over all targets is between those over the targets of each source.
    for entry in logs:
        least, most = sorted((entry["loss_a"], entry["loss_b"]))
        assert least <= entry["loss"] <= most


def test_a_loss_that_waits_is_counted(tmp_path: Path) -> None:
    class Curious(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            assert loss.item() > 0
            return loss

    found = waits(tmp_path, "classifier", Curious, gradient_accumulation_steps=2)
    assert found == {"aten._local_scalar_dense.default": 2 * STEPS}


def test_a_step_that_is_not_finite_is_skipped_on_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoilt(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step in (0, 3) else loss

    ended = []
    for on_host in (False, True):
        monkeypatch.setattr("trainer_lib.trainer.engine.is_on_host", lambda tensor, on_host=on_host: on_host)
        torch.manual_seed(0)
        one = trainer(tmp_path / str(on_host), classification_rows(80), model=Classifier(), cls=Spoilt, max_steps=STEPS)
        assert one.train().metrics["nonfinite_steps"] == 2
        ended.append({name: value.tolist() for name, value in one.model.state_dict().items()})
    assert ended[0] == ended[1]
    assert all(value == value for values in ended[0].values() for value in torch.tensor(values).flatten().tolist())
