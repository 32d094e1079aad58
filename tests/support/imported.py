"""Checkpoints that the Trainer of transformers wrote, and importing them in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import run
from trainer_lib.protocol.requests import ImportRequest, ImportResult, RecipeFile

SETTINGS: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 4}
SETTINGS |= {"learning_rate": 5e-3, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}
SETTINGS |= {"train_sampling_strategy": "sequential", "optim": "adamw_torch", "seed": 7}


def peer_run(folder: Path, model: Any, rows: list[Any], **given: Any) -> Any:
    """Train with the Trainer of transformers, which saves every `save_steps`, and return it."""
    from transformers import Trainer, TrainingArguments

    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "dataloader_pin_memory": False}
    args = TrainingArguments(output_dir=str(folder), **quiet, **{**SETTINGS, "save_strategy": "steps", **given})
    peer = Trainer(model, args, train_dataset=rows)
    peer.train()
    return peer


def import_here(source: Path | str, destination: Path | str, model: str) -> ImportResult:
    """Import a checkpoint in this process; `model` is FILE.py:FUNCTION."""
    path, _, name = model.rpartition(":")
    request = ImportRequest(
        output=str(destination),
        source=str(source),
        recipe=RecipeFile(path, str(Path(path).parent)),
        model=name,
    )
    return run(request, kind="in_process")
