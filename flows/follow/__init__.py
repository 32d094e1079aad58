"""Evaluation of checkpoints while they are made."""
