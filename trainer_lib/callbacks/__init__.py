"""Callbacks: what watches the training loop and may steer it. `base` draws the lifecycle."""
