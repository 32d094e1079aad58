"""Order, loading, collation and storage of samples. Import the submodule you need."""
