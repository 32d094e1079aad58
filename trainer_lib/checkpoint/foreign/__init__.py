"""Checkpoints of other programs: those of the transformers Trainer imported (`catalogue` recognises folders).

`source` reads a checkpoint of the transformers Trainer, and the files that `torch.save` wrote by torch, with
`weights_only`.
"""
