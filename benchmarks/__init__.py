"""Measured claims: `python -m benchmarks.NAME --size smallest` runs each alone; `--save` leaves a dated result."""
