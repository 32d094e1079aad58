"""Tensor parallelism: processes that compute a part of every layer."""
