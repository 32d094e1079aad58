"""Evaluations of checkpoints beside their training: what was measured, where it is logged, which one is kept."""
