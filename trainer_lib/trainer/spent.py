"""Where the time of a training goes, by this process's clock, which is read twice for each save or evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class TimeSpent:
    """Seconds since the training began; what is not evaluated, saved or restored is trained.

    Attributes:
        restored: reading a checkpoint and finding its position again.
        evaluated: in evaluations between steps.
        saved: that training waited for checkpoints; a save in the background counts as long as it is waited for.
    """

    restored: float = 0.0
    evaluated: float = 0.0
    saved: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def begin(self, *, restored: float) -> None:
        """Start the clock of the training, after a checkpoint was restored in `restored` seconds."""
        self.restored, self._began = restored, time.monotonic()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the block as evaluation."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.evaluated += time.monotonic() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the block as saving."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.saved += time.monotonic() - began

    def so_far(self) -> dict[str, float]:
        """Seconds by name until now: trained, evaluated, saved, restored."""
        trained = time.monotonic() - self._began - self.evaluated - self.saved
        spent = {"trained": trained, "evaluated": self.evaluated, "saved": self.saved, "restored": self.restored}
        return {name: round(seconds, 3) for name, seconds in spent.items()}
