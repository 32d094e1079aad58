"""Content keys of stages."""
