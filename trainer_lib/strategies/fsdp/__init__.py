"""Fully sharded data parallelism."""
