"""Recognise folders that other programs wrote by the file names in them, and name what can be done with them.

No file is opened here: most are pickles, which can run code when they are loaded. No torch.
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
    """A kind of folder that another program writes.

    Attributes:
        kind: a word for it.
        signs: names of which one identifies it; ``*`` and ``?`` as in a shell.
        what: what a message calls it, after "there is".
        remedy: what to do, a sentence or two.
    """

    kind: str
    signs: tuple[str, ...]
    what: str
    remedy: str


# In this order: a DeepSpeed checkpoint of the transformers Trainer also has the signs of the later kinds.
_KINDS = (
    Foreign(
        "deepspeed",
        ("global_step*", "zero_to_fp32.py", "zero_pp_rank_*", "mp_rank_*", "bf16_zero_pp_rank_*"),
        "a checkpoint of DeepSpeed's engine (pickles, one per process)",
        "Its weights can be used: run its zero_to_fp32.py, where you trust it, to write model.safetensors. Its "
        "optimizer cannot be used: train on from the weights.",
    ),
    Foreign(
        "dcp",
        (".metadata", "*.distcp", "pytorch_model_fsdp_*", "optimizer_0"),
        "a sharded checkpoint of torch.distributed (its index, .metadata, is a pickle)",
        "Its weights can be used: run `accelerate merge-weights`, where you trust it, to write model.safetensors. Its "
        "optimizer cannot be used: train on from the weights.",
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
        "Load them into the model and start a new training: the folder has no optimizer to resume from.",
    ),
    Foreign(
        "pickles",
        ("*.pkl", "*.pickle", "*.pt", "*.pth", "*.bin", "*.npy", "*.npz", "*.joblib"),
        "a folder with pickles",
        "They are never loaded: such a file can run any code. Export them as safetensors where you trust them.",
    ),
)


# Few names, all of which trainflow never writes: a folder that matches is protected from deletion.
_NEVER_OURS = ("*.pt", "*.pth", "*.pkl", "*.bin", "*.ckpt", "*.distcp", ".metadata", "global_step*", "*_fsdp_*")


def is_foreign(names: Iterable[str]) -> bool:
    """Whether a folder with these names and no commit was certainly written by another program."""
    # fnmatchcase: the same answer on a system whose file names ignore case.
    return any(fnmatch.fnmatchcase(name, sign) for name in names for sign in _NEVER_OURS)


def recognise_folder(store: Store) -> Foreign | None:
    """Recognise a folder by the names in it; None when it is of no known kind. Raises StorageError."""
    names = store.children()
    for kind in _KINDS:
        if any(fnmatch.fnmatchcase(name, sign) for sign in kind.signs for name in names):
            return kind
    return None
