"""Show how training goes: a bar on a terminal, plain lines elsewhere. Only the main process shows anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

_HIDDEN = frozenset({"total_flos"})


class ProgressCallback(TrainerCallback):
    """A progress bar with the time left where standard error is a terminal or a notebook, else a line per log.

    Args:
        max_str_len: longer texts among the logs are shown by their length only (characters).
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0
        self._clock = _Clock()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar where training starts or resumes."""
        self.current_step = state.global_step
        self._clock = _Clock(state.global_step)
        if state.is_world_process_zero and _interactive():
            self.training_bar = _bar(total=state.max_steps, initial=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
        self.current_step = state.global_step

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move a second bar over the batches of an evaluation."""
        if not state.is_world_process_zero or not _interactive():
            return
        if self.prediction_bar is None:
            total = _length(kwargs.get("eval_dataloader"))
            if total is None:
                return
            self.prediction_bar = _bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the second bar."""
        self._close_prediction_bar()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """Close the second bar."""
        self._close_prediction_bar()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show what is logged, with the time left."""
        logs = kwargs.get("logs")
        if not logs or not state.is_world_process_zero:
            return
        shown = {name: self._shown(value) for name, value in logs.items() if name not in _HIDDEN}
        if self.training_bar is not None:
            self.training_bar.write(str(shown))
        else:
            _write(_line(state, shown, self._clock))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def _shown(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[text of {len(value)} characters; raise max_str_len to see it]"
        return f"{value:.4g}" if isinstance(value, float) else value


class PrinterCallback(TrainerCallback):
    """Prints what is logged, and nothing else; used when `disable_tqdm` is true."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print the logs as a dictionary, once per machine."""
        logs = kwargs.get("logs")
        if logs is not None and state.is_local_process_zero:
            shown = {name: value for name, value in logs.items() if name not in _HIDDEN}
            _write(str({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in shown.items()}))


class _Clock:
    """Seconds per step since training began here."""

    def __init__(self, step: int = 0) -> None:
        self.start = time.monotonic()
        self.first = step

    def left(self, step: int, max_steps: int) -> str | None:
        done = step - self.first
        if done <= 0 or max_steps <= step:
            return None
        seconds = int((time.monotonic() - self.start) / done * (max_steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _line(state: TrainerState, shown: Mapping[str, Any], clock: _Clock) -> str:
    """`step 20/100  epoch 0.4  loss 1.23  …  left 0:00:12`."""
    parts = [f"step {state.global_step}/{state.max_steps}"] if state.max_steps else []
    parts += [f"{name} {value}" for name, value in shown.items()]
    left = clock.left(state.global_step, state.max_steps)
    return "  ".join([*parts, f"left {left}"] if left else parts)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _interactive() -> bool:
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())


def _bar(**settings: Any) -> Any:
    from tqdm.auto import tqdm

    return tqdm(dynamic_ncols=True, **settings)


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
