"""Prefect's client and the few of its internals that are used."""
