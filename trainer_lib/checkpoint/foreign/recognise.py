"""Folders that other programs wrote: what they are, told by the names in them, and what can be done with them.

Nothing in them is opened here. Most hold pickles, which can run code when they are loaded. No torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from trainer_lib.storage import Store

TRANSFORMERS = "transformers"

_IMPORT = "`trainflow checkpoints import SOURCE DESTINATION` makes a checkpoint of it that can be resumed."


@dataclass(frozen=True)
class Foreign:
    """A kind of folder.

    Attributes:
        kind: a word for it.
        signs: names that tell it, one of which is enough; ``*`` and ``?`` as in a shell.
        what: how it is called in a message, after "there is".
        remedy: what to do, a sentence or two.
    """

    kind: str
    signs: tuple[str, ...]
    what: str
    remedy: str


_KINDS = (
    Foreign(
        "deepspeed",
        ("global_step*", "zero_to_fp32.py", "zero_pp_rank_*", "mp_rank_*", "bf16_zero_pp_rank_*"),
        "a checkpoint of DeepSpeed's engine (pickles, one per process)",
        "Its weights can be taken over: let its zero_to_fp32.py write model.safetensors, in a place that you trust it. "
        "Its optimizer can not: train on from the weights.",
    ),
    Foreign(
        "dcp",
        (".metadata", "*.distcp", "pytorch_model_fsdp_*", "optimizer_0"),
        "a sharded checkpoint of torch.distributed (its index, .metadata, is a pickle)",
        "Its weights can be taken over: let `accelerate merge-weights` write model.safetensors, in a place that you "
        "trust it. Its optimizer can not: train on from the weights.",
    ),
    Foreign(
        "accelerate",
        ("random_states_*.pkl", "custom_checkpoint_*.pkl", "*.ckpt"),
        "a checkpoint of another trainer (Accelerator.save_state, Lightning), which is made of pickles",
        "Export its weights as safetensors with the program that wrote it, and train on from them.",
    ),
    Foreign(
        TRANSFORMERS,
        ("trainer_state.json", "optimizer.pt", "rng_state*.pth", "training_args.bin", "scheduler.pt"),
        "a checkpoint of the transformers Trainer",
        _IMPORT,
    ),
    Foreign(
        "weights",
        ("model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "adapter_model.*", "*.safetensors"),
        "a folder with a model's weights only",
        "Load them into the model and start training anew; there is nothing else to go on from.",
    ),
    Foreign(
        "pickles",
        ("*.pkl", "*.pickle", "*.pt", "*.pth", "*.bin", "*.npy", "*.npz", "*.joblib"),
        "a folder with pickles",
        "They are never loaded: such a file can run any code. Export them as safetensors where you trust them.",
    ),
)


_NEVER_OURS = ("*.pt", "*.pth", "*.pkl", "*.bin", "*.ckpt", "*.distcp", ".metadata", "global_step*", "*_fsdp_*")


def is_foreign(names: Iterable[str]) -> bool:
    """Whether a folder without a commit, with these names in it, was certainly not written by us."""
    return any(fnmatch.fnmatchcase(name, sign) for name in names for sign in _NEVER_OURS)


def recognise_folder(store: Store) -> Foreign | None:
    """What a folder is, by the names in it; None when there is nothing that is known. Raises StorageError."""
    names = store.children()
    for kind in _KINDS:
        if any(fnmatch.fnmatchcase(name, sign) for sign in kind.signs for name in names):
            return kind
    return None
