"""Sweeps: many trainings of one spec, and the best of them. A trial is a pipeline run with other values."""
