"""What runs leave on a storage, as values to read."""
