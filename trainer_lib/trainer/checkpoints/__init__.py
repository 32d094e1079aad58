"""Checkpoints of a Trainer: when they are written, what is in them, and the return to one."""
