"""Strategies to train a model by one process or many: one file per way, one protocol (`base.Strategy`)."""
