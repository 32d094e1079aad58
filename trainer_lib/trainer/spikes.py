"""Loss spikes: what counts as one, and the record of the steps that are skipped because of it.

A spike is found in the losses that a log, a save or an evaluation brings to the host anyway, step by step, so neither
how often they come nor a stop in between changes which step it is. It is the first step whose loss exceeds the mean of
the `window` steps before it by `sigma` of their standard deviations.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# A window of equal losses has no deviation, and rounding alone must not be a spike.
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Spike:
    """A spike that training went back for.

    Attributes:
        after: the step that training went back to; the samples of the steps after it, up to `step`, are skipped.
        step: the step of the spike.
        reason: what was seen, as a clause.
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
    """Compares each loss with those of the steps before it.

    Args:
        sigma: standard deviations above the mean that count as a spike.
        window: number of losses in mean and deviation; before so many there is no spike.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self._sigma = sigma
        self._recent: deque[float] = deque(maxlen=window)

    def note(self, step: int, loss: float) -> None:
        """Look at the finite loss of a step. Raises SpikeFound."""
        if len(self._recent) == self._recent.maxlen:
            mean = statistics.fmean(self._recent)
            variance = statistics.fmean((each - mean) ** 2 for each in self._recent)
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
        self._recent.extend(float(each) for each in losses)


def spikes_to_json(spikes: Iterable[Spike]) -> list[dict[str, Any]]:
    """The records as a checkpoint holds them."""
    return [dataclasses.asdict(each) for each in spikes]


def spikes_from_json(records: Iterable[Any]) -> list[Spike]:
    """The records out of a checkpoint."""
    return [Spike(int(each["after"]), int(each["step"]), str(each["reason"])) for each in records]
