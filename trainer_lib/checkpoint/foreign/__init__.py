"""Checkpoints that another program wrote: recognised, and read for an import."""
