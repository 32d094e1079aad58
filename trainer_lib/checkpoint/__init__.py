"""Checkpoints: committed or absent, on any store, without pickle. Empty, because `catalogue` must not import torch."""
