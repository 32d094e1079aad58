"""Shows progress: a bar on a terminal, plain lines elsewhere. Only the main process prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

# A number of 15 digits, which says nothing on a terminal.
_HIDDEN = frozenset({"total_flos"})


class ProgressCallback(TrainerCallback):
    """Shows a bar with the time left when standard error is a terminal or a notebook, otherwise one line per log.

    Args:
        max_str_len: of a longer text among the logs, only the number of characters is shown.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0
        self._began, self._first_step = time.monotonic(), 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.current_step = state.global_step
        # The steps before a resume took another process's time.
        self._began, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero and _is_interactive():
            # initial: a resumed run's bar starts where it stopped.
            self.training_bar = _open_bar(total=state.max_steps, initial=state.global_step)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
        self.current_step = state.global_step

    @override
    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not _is_interactive():
            return
        if self.prediction_bar is None:
            total = _length_of(kwargs.get("eval_dataloader"))
            if total is None:
                return
            self.prediction_bar = _open_bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    @override
    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if not logs or not state.is_world_process_zero:
            return
        shown = {name: self._format(value) for name, value in logs.items() if name not in _HIDDEN}
        if self.training_bar is not None:
            # Through the bar, which a print would tear.
            self.training_bar.write(str(shown))
        else:
            _write(self._line(state, shown))

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def _line(self, state: TrainerState, shown: Mapping[str, Any]) -> str:
        """`step 20/100  epoch 0.4  loss 1.23  …  left 0:00:12`, by the steps that this process has trained."""
        step, last = state.global_step, state.max_steps
        parts = [f"step {step}/{last}"] if last else []
        parts += [f"{name} {value}" for name, value in shown.items()]
        done = step - self._first_step
        if done > 0 and step < last:
            seconds = int((time.monotonic() - self._began) / done * (last - step))
            parts.append(f"left {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")
        return "  ".join(parts)

    def _format(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[text of {len(value)} characters; raise max_str_len to see it]"
        return f"{value:.4g}" if isinstance(value, float) else value


class PrinterCallback(TrainerCallback):
    """Prints every log as a dictionary, once per machine; used when `disable_tqdm` is true."""

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if logs is not None and state.is_local_process_zero:
            shown = {name: value for name, value in logs.items() if name not in _HIDDEN}
            _write(str({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in shown.items()}))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _is_interactive() -> bool:
    # A notebook's standard error is not a terminal, but it draws bars.
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())


def _open_bar(**settings: Any) -> Any:
    from tqdm.auto import tqdm  # imported here: a run without a bar does not need it

    return tqdm(dynamic_ncols=True, **settings)


def _length_of(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
