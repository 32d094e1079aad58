"""Rows in files: their sources, their types, prepared shards and predictions."""
