"""Requests to workers and their results. No torch."""
