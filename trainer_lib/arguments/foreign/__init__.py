"""Arguments from other programs: the objects of transformers, and the variables of `accelerate launch`."""
