"""Checkpoints: committed or absent, on any store, without pickle.

`layout` names a checkpoint's files. `catalogue` lists, verifies and removes checkpoints; `writer` writes one and
`reader` opens one; `background` writes while training continues (`staging` holds its copy), `preload` reads ahead of a
resume. `tensors`, `sharded`, `optimizer`, `rng` and `values` know the formats. `foreign` recognises and reads folders
that other programs wrote. Import from these modules: this one stays empty, because `catalogue` must not import torch.
"""
