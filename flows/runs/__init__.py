"""Runs as people look at them: alive or dead, compared, resumed, removed."""
