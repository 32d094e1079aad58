"""Records of runs on a storage, as values to read."""
