"""Samples: `rows` are read and stored, `loading` brings them to the model. Import the submodule you need."""
