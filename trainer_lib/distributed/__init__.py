"""Ranks: communication, devices, precision, sharding."""
