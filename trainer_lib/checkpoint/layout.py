"""The names of a checkpoint's folder and of every file in it. No torch here.

::

    checkpoint-<step>/
        model.safetensors        weights and buffers; any safetensors reader loads it
        optimizer.safetensors    the optimizer's tensors, named <parameter>/<key>
        optimizer.json           its groups and everything that is not a tensor, by parameter name
        scheduler.json           the learning-rate schedule, if there is one
        scaler.json              the loss scaler of fp16, if there is one
        data.json                the position in the training data
        trainer_state.json       counters, log history, best metric, callbacks' states
        training_args.json       the arguments, secrets removed
        rng/rank-00000.json      random states, one file per rank
        extra/rank-00000.safetensors    tensors of callbacks and of `past_index`, if there are any
        shards/rank-00000.safetensors   of a sharded model, in place of the two .safetensors files above: the blocks of
        shards.json                     both that this rank writes, and an index over the blocks of all ranks
        config.json, ...         files that make the model usable elsewhere, and those of an overridden `save_model`
        trainflow/model.safetensors     the weights, where an overridden `save_model` wrote a model.safetensors itself
        COMMIT.json              written last: the checkpoint exists from here on

    While a process writes the folder it also holds WRITING.json (`locks.claim`); a damaged checkpoint that was set
    aside holds DAMAGED.json in place of COMMIT.json.
"""

from __future__ import annotations

import re

from trainer_lib.errors import DamagedError
from trainer_lib.locks.claim import is_claim
from trainer_lib.storage.commit import COMMIT

KIND = "checkpoint"  # the kind that the folder's commit file states

MODEL = "model.safetensors"
OWN_MODEL = "trainflow/model.safetensors"
OPTIMIZER_TENSORS = "optimizer.safetensors"
OPTIMIZER = "optimizer.json"
"""Only a checkpoint that training can resume from has this file; one that holds a model alone does not."""
SCHEDULER = "scheduler.json"
SCALER = "scaler.json"
DATA = "data.json"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGS = "training_args.json"
SHARD_INDEX = "shards.json"
DAMAGED = "DAMAGED.json"

_OWN_FILES = frozenset(
    {
        *(MODEL, OPTIMIZER_TENSORS, OPTIMIZER, SCHEDULER, SCALER, DATA, TRAINER_STATE, TRAINING_ARGS),
        *(OWN_MODEL, SHARD_INDEX, COMMIT, DAMAGED),
    }
)
# Folders, because every rank has a file in them.
_OWN_FOLDERS = ("rng/", "extra/", "shards/")
# No leading zeros, and no number beyond 64 bits: one step has one name.
_FOLDER_NAME = re.compile(r"checkpoint-(0|[1-9]\d{0,17})")


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of an optimizer step."""
    return f"checkpoint-{step}"


def parse_step(name: str) -> int | None:
    """The optimizer step in a folder name; None when the name is not a checkpoint's."""
    match = _FOLDER_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def rng_file(rank: int) -> str:
    """The file of a rank's random states."""
    return f"rng/rank-{rank:05d}.json"


def extra_file(rank: int) -> str:
    """The file of a rank's tensors that are neither the model's nor the optimizer's."""
    return f"extra/rank-{rank:05d}.safetensors"


def shard_file(rank: int) -> str:
    """The file of the blocks that a rank writes of a sharded model and its optimizer."""
    return f"shards/rank-{rank:05d}.safetensors"


def is_own_file(path: str) -> bool:
    """Whether the format uses a path inside the folder itself, so that no further file may have it."""
    return path in _OWN_FILES or is_claim(path) or path.startswith(_OWN_FOLDERS)


def damaged_file(where: str, reason: str) -> DamagedError:
    """The error for a file at a URL that is not as it was committed; `reason` is a clause ("it is missing")."""
    remedy = "Use an earlier checkpoint (a resume does by itself), or restore the file."
    return DamagedError(f"The file is damaged: {reason}.", field=where, remedy=remedy)
