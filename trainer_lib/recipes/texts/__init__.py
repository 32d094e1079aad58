"""Texts: documents, tokens, packed rows, and generation."""
