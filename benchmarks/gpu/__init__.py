"""Everything that trainflow claims of a GPU, measured on one GPU of any size in about eight minutes; see `__main__`."""
