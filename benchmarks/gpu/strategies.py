"""Losses of one process under NCCL (DDP, FSDP2, DeepSpeed) against a training without a process group.

python -m benchmarks.gpu.strategies '{"case": "ddp", "dry": true}'
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.work import Tokens, language_model, main, settings, train

FSDP: dict[str, Any] = {"fsdp": "full_shard auto_wrap"}
LAYER = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "version": 2}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
#: Arguments of a case, and whether it starts a process group.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "alone": ({}, False),
    "alone bf16": ({"bf16": True}, False),
    "DDP": ({}, True),
    "DDP bf16": ({"bf16": True}, True),
    "FSDP2": ({**FSDP, "fsdp_config": LAYER}, True),
    "FSDP2 bf16": ({**FSDP, "fsdp_config": LAYER, "bf16": True}, True),
    "FSDP2 offload": ({"fsdp": "full_shard auto_wrap offload", "fsdp_config": LAYER}, True),
    "DeepSpeed ZeRO 2": ({"deepspeed": ZERO}, True),
}
STEPS, BATCH = 10, 8


def measure(*, case: str, dry: bool) -> dict[str, Any]:
    """Train ten steps and return their losses, the backend and the seconds."""
    arguments, group = CASES[case]
    if "deepspeed" in arguments and importlib.util.find_spec("deepspeed") is None:
        return {"missing": "deepspeed"}
    network = language_model("small", dry=dry)
    with tempfile.TemporaryDirectory() as folder:
        if group:  # as under torchrun with one process
            one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        if case.startswith("DDP"):  # the Trainer forms no group for one process, and uses one that stands
            dist.init_process_group("gloo" if dry else "nccl")
        more = {**arguments, "logging_strategy": "steps", "logging_steps": 1}
        chosen = settings(folder, steps=STEPS, batch=BATCH, dry=dry, **more)
        trainer, output = train("ours", network, Tokens(STEPS * BATCH, 32 if dry else 256, 256), chosen)
        wrapper = type(trainer.model_wrapped).__name__
        backend = dist.get_backend() if dist.is_initialized() else "no group"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = 0 if dry else torch.cuda.max_memory_allocated()
    seconds = output.metrics["train_runtime"]
    return {"losses": losses, "wrapper": wrapper, "backend": backend, "seconds": seconds, "peak_bytes": peak}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main(measure)
