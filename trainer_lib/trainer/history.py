"""Losses and gradient norms of the steps since the last log, kept on the device: nothing waits for it in between.

A step costs one append to a list. A log, a save or an evaluation collects the numbers, which waits for the device
once. A run that never logs collects them every 1,024 steps, so the list stays short and non-finite steps are noticed.

Loss spikes are found in these numbers, step by step, so neither how often they are collected nor a stop in between
changes which step it is: the first whose loss exceeds the mean of the `window` steps before it by `sigma` of their
standard deviations.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.distributed.communicator import sharers
from trainer_lib.errors import DataError, NonFiniteError
from trainer_lib.strategies.base import Strategy

if TYPE_CHECKING:
    from trainer_lib.trainer.model.source_losses import SourceLosses

# A window of equal losses has no deviation, and rounding alone must not be a spike.
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Spike:
    """A spike at `step` that training went back to `after` for: the samples of the steps in between are skipped.

    `reason`: what was seen, as a clause.
    """

    after: int
    step: int
    reason: str


class SpikeFound(Exception):  # control flow inside the Trainer; never leaves it
    """A step spiked; raised on every rank."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


class SpikeWatch:
    """Compares each loss with the `window` losses before it: `sigma` deviations above their mean, it is a spike."""

    def __init__(self, sigma: float, window: int) -> None:
        self._sigma = sigma
        self._recent: deque[float] = deque(maxlen=window)

    def note(self, step: int, loss: float) -> None:
        """Look at the finite loss of a step. Raises SpikeFound."""
        if len(self._recent) == self._recent.maxlen:
            mean = statistics.fmean(self._recent)
            variance = statistics.fmean((loss - mean) ** 2 for loss in self._recent)
            deviation = max(math.sqrt(variance), _LEAST_DEVIATION * abs(mean))
            if loss - mean > self._sigma * deviation:
                raise SpikeFound(step, f"its loss was {loss:.4g}, and the {len(self._recent)} before had {mean:.4g}")
        self._recent.append(loss)

    def state(self) -> list[float]:
        """The losses in the window, as JSON."""
        return list(self._recent)

    def load_state(self, losses: Iterable[Any]) -> None:
        """Restore what `state` returned."""
        self._recent.clear()
        self._recent.extend(float(loss) for loss in losses)


# Without any log the lists would grow for the whole run.
_LIMIT = 1024


class StepHistory:
    """Loss and gradient norm of the steps since the last log, and the number of non-finite steps.

    A step without any target has no loss: it is not trained, and does not count as non-finite.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        nonfinite_limit: int,
        spikes: SpikeWatch | None = None,
        sources: SourceLosses | None = None,
    ) -> None:
        self._strategy = strategy
        self.sources = sources  # losses by source, where the training data is a mixture
        self._limit = nonfinite_limit
        self._spikes = spikes
        # Steps that are not collected: loss, norm, whether there are targets, micro-batches without any.
        self._steps: list[tuple[torch.Tensor, torch.Tensor, bool, int]] = []
        self._since_log: list[tuple[float, float]] = []  # (loss, norm) of collected steps
        self._total = 0.0
        self._counted = 0
        self._in_a_row = 0
        self._without_in_a_row = 0
        self._empty_in_a_row = 0  # appended steps without targets, those that are not collected included
        # Of the whole run, over all ranks; steps with a NaN or infinite loss or gradient were not taken.
        self.nonfinite_steps = self.steps_without_targets = self.batches_without_targets = 0
        self.example = ""  # a batch without targets in words, for the error

    def append(
        self, loss: torch.Tensor, norm: torch.Tensor, *, has_targets: bool = True, empty_batches: int = 0
    ) -> None:
        """Add a step: this rank's loss ``[]``, and the gradients' norm ``[]``, equal on every rank.

        `has_targets`: on all ranks together; `empty_batches`: micro-batches of this rank without any.
        """
        self._steps.append((loss, norm, has_targets, empty_batches))
        self._empty_in_a_row = 0 if has_targets else self._empty_in_a_row + 1

    def sum_since_log(self) -> torch.Tensor:
        """The sum of the finite losses since the last log ``[]``, for an override that logs by itself."""
        collected = math.fsum(loss for loss, _ in self._since_log if math.isfinite(loss))
        newest = torch.stack([loss for loss, *_ in self._steps]).float().sum() if self._steps else torch.zeros(())
        return newest + collected

    @property
    def steps_since_log(self) -> int:
        """Steps that no log entry covers yet."""
        return len(self._since_log) + len(self._steps)

    def unlogged(self, step: int) -> list[tuple[int, float]]:
        """(step, loss) of the collected steps that no log entry covers, up to `step`; call after `collect`."""
        first = step - len(self._since_log) + 1
        return [(number, loss) for number, (loss, _) in enumerate(self._since_log, start=first)]

    def forget_logged(self) -> None:
        """Drop the steps since the last log: an override has logged them."""
        self._since_log = []

    @property
    def full(self) -> bool:
        """Whether there are enough steps to collect them without a log, or so many without targets in a row."""
        return len(self._steps) >= _LIMIT or self._empty_in_a_row >= self._limit

    def collect(self, step: int) -> None:
        """Bring all numbers to the host. Collective. Raises NonFiniteError, DataError and SpikeFound."""
        if not self._steps:
            return
        own_losses, norms, have_targets, counts = zip(*self._steps, strict=True)
        empty = torch.tensor(counts, dtype=torch.float32, device=own_losses[0].device)
        sums = self._strategy.sum(torch.stack([torch.stack(own_losses).float(), empty]))
        losses = sums[0] / self._strategy.comm.world_size
        values = torch.stack([losses, torch.stack(norms).float(), sums[1]]).tolist()  # one transfer for all
        self.batches_without_targets += int(sum(values.pop())) // sharers(self._strategy.comm)
        if self.sources is not None:
            self.sources.collect(lambda own: self._strategy.sum(own) / sharers(self._strategy.comm), losses.device)
        if self._spikes is not None:  # sums are equal on all ranks; one decision does not rely on it
            values = self._strategy.comm.broadcast_json(values)
        first = step - len(self._steps) + 1
        for number, noted in enumerate(zip(*values, have_targets, strict=True), start=first):
            self._note(*noted)
            if self._spikes is not None:
                self._look_for_spike(self._spikes, number, noted[0])
        self._steps, self._empty_in_a_row = [], 0
        if self._in_a_row >= self._limit:
            raise NonFiniteError(
                f"Loss or gradients were NaN or infinite for {self._in_a_row} steps in a row, "
                f"from step {step - self._in_a_row + 1} on.",
                step=step,
                remedy="Lower learning_rate, check the data for extreme values, or use bf16 instead of fp16.",
            )
        self.require_targets(step, self._limit)

    def require_targets(self, step: int, steps: int) -> None:
        """Raise DataError when none of the newest `steps` collected steps has a target; `step`: the newest."""
        if 0 < steps <= self._without_in_a_row:
            raise DataError(
                f"None of the {self._without_in_a_row} steps up to step {step} has a target, so the model learned "
                f"nothing from them: every label is -100. {self.example}".rstrip(),
                field="train_dataset",
                value="0 % of the labels are targets",
                step=step,
                remedy="Check the chat template, the labels and the truncation (max_length): the answers must stay in "
                "the rows, with labels other than -100.",
            )

    def _look_for_spike(self, spikes: SpikeWatch, step: int, loss: float) -> None:
        if self._in_a_row >= self._limit:
            raise SpikeFound(step, f"{self._in_a_row} steps in a row had a NaN or infinite loss or gradient")
        if math.isfinite(loss):
            spikes.note(step, loss)

    def _note(self, loss: float, norm: float, has_targets: bool) -> None:
        self._since_log.append((loss, norm))
        # A loss that needs no targets is finite.
        if not has_targets and not math.isfinite(loss):
            self.steps_without_targets += 1
            self._without_in_a_row += 1
            return
        self._without_in_a_row = 0
        if math.isfinite(loss):
            self._total += loss
            self._counted += 1
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            self.nonfinite_steps += 1

    def take(self, *, hide_nonfinite: bool) -> dict[str, float]:
        """The log entry of the collected steps, which are then dropped: mean loss, last norm, non-finite steps so far.

        `hide_nonfinite` leaves non-finite losses out of the mean; they are counted either way.
        """
        losses = [loss for loss, _ in self._since_log if math.isfinite(loss) or not hide_nonfinite]
        entry = {"loss": sum(losses) / len(losses) if losses else math.nan, "grad_norm": self._since_log[-1][1]}
        self._since_log = []
        return entry | self.counts() | ({} if self.sources is None else self.sources.take())

    def counts(self) -> dict[str, int]:
        """The counts of unusual steps and micro-batches so far, without those that are 0."""
        names = ("nonfinite_steps", "steps_without_targets", "batches_without_targets")
        return {name: count for name in names if (count := getattr(self, name))}

    @property
    def in_trouble(self) -> bool:
        """Whether the newest collected step was not finite; such a model is never the best."""
        return self._in_a_row > 0

    def mean_loss(self) -> float:
        """Mean over the run's finite steps; call after `collect`."""
        return self._total / self._counted if self._counted else math.nan

    def state(self) -> dict[str, Any]:
        """As JSON; call after `collect`."""
        return {
            "since_log": [[json_number(loss), json_number(norm)] for loss, norm in self._since_log],
            "total": self._total,
            "counted": self._counted,
            "in_a_row": self._in_a_row,
            "nonfinite_steps": self.nonfinite_steps,
            "without_in_a_row": self._without_in_a_row,
            **self.counts(),
            **({} if self._spikes is None else {"recent": self._spikes.state()}),
            **({} if self.sources is None else {"sources": self.sources.state()}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._since_log = [(float(loss), float(norm)) for loss, norm in state.get("since_log", [])]
        self._total = float(state.get("total", 0.0))
        self._counted = int(state.get("counted", 0))
        self._in_a_row = int(state.get("in_a_row", 0))
        self._without_in_a_row = int(state.get("without_in_a_row", 0))
        for name in ("nonfinite_steps", "steps_without_targets", "batches_without_targets"):
            setattr(self, name, int(state.get(name, 0)))
        if self._spikes is not None:
            self._spikes.load_state(state.get("recent", []))
        if self.sources is not None and "sources" in state:
            self.sources.load_state(state["sources"])


def json_number(value: float) -> float | str:
    """The value as JSON takes it, which has no NaN and no infinity: they are written as text."""
    return value if math.isfinite(value) else str(value)
