"""The golden test in one call: train whole, train again with a stop, resume in a fresh Trainer, compare at atol=0."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.training import Note, StopAt, assert_equal, final_state, preempted_at
from trainer_lib import Trainer

Make = Callable[..., Trainer]
"""``make(folder, *more_callbacks)``: a fresh Trainer around fresh data and a fresh model."""


def everything(trainer: Trainer) -> dict[str, Any]:
    """`final_state`, with the other generators of this process; call it right after training."""
    numpy_state: Any = np.random.get_state()
    generators = (random.getstate(), numpy_state[1].tolist(), numpy_state[2])
    return {**final_state(trainer), "generators": generators}


def prove(make: Make, folder: Path, stop: int, event: str = "on_step_end") -> tuple[Trainer, Trainer]:
    """Assert that a run stopped at `stop` and resumed ends like one that was not; both Trainers."""
    whole = make(folder / "whole")
    whole.train()
    expected = everything(whole)
    reached = preempted_at(make(folder / "cut", StopAt(stop, event)))
    assert stop <= reached <= stop + 1
    assert 0 < reached < whole.state.global_step, "there is nothing to resume"
    resumed = make(folder / "cut")
    first = Note("on_train_begin", lambda state, **_: state.global_step)
    resumed.add_callback(first)
    resumed.train(resume_from_checkpoint=True)
    assert first.kept == [reached]
    assert_equal(expected, everything(resumed))
    return whole, resumed
