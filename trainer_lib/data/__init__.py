"""Data on its way to the model: order, loading, collation, shards. Import the submodule you need."""
