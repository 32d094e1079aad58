"""Checkpoints of the transformers Trainer, imported; `catalogue` recognises folders of other programs."""
