"""`benchmarks.async_save` on a GPU: how long a save blocks training, by our Trainer and by torch's own checkpoints.

python -m benchmarks.gpu.saves '{"dry": true}'
"""

from __future__ import annotations

from typing import Any

from benchmarks import async_save
from benchmarks.gpu.work import device, main


def measure(*, dry: bool) -> dict[str, Any]:
    """A state of 1.26 GB (weights and two moments of 105 M parameters), two saves each."""
    width, depth, saves = (64, 2, 1) if dry else (1024, 100, 2)
    return async_save.measure(width, depth, saves, 1, device(dry))


if __name__ == "__main__":
    main(measure)
