"""Callbacks watch the training loop and may steer it. `base` draws their lifecycle."""
