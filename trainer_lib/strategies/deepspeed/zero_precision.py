"""The precision of an engine that casts the model and scales the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from trainer_lib.precision import Precision

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(Precision):
    """A precision without autocast and scaler for the Trainer; it saves the engine's loss scale and counters."""

    def __init__(self, name: str, device: torch.device, engine: Callable[[], Any]) -> None:
        # fp32 for the Trainer: no autocast and no scaler of its own.
        super().__init__("fp32", None, device)
        self.name = name
        # A function, because there is no engine yet.
        self._engine = engine

    @override
    def scaler_state(self) -> dict[str, float] | None:
        """Return the engine's counters, and with fp16 the scale of the loss and when it last changed."""
        engine = self._engine()
        if engine is None:
            return None
        scaler = engine.optimizer.loss_scaler
        state = {name: float(getattr(engine, name)) for name in _COUNTERS}
        return state | {name: float(getattr(scaler, name)) for name in _SCALER if hasattr(scaler, name)}

    @override
    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `scaler_state` returned. State that another strategy wrote has none of these entries."""
        engine = self._engine()
        if engine is None or not state:
            return
        for name in _COUNTERS:
            setattr(engine, name, int(state.get(name, 0)))
        scaler = engine.optimizer.loss_scaler
        for name in _SCALER if self.name == "fp16" else ():
            if hasattr(scaler, name) and name in state:
                # A checkpoint holds floats, and some of the scaler's fields are whole numbers.
                setattr(scaler, name, type(getattr(scaler, name))(state[name]))
