"""Checkpoints of other programs: recognised by their names, and those of the transformers Trainer imported.

`recognise` names what a folder is (no torch). `source` reads a checkpoint of the transformers Trainer, and the files
that `torch.save` wrote by torch, with `weights_only`.
"""
