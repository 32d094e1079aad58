"""Samples per second of evaluating a language model, and of generation, against the loop by hand.

python -m benchmarks.gpu.evaluate '{"loop": "ours", "tasks": ["perplexity"], "dry": true}'
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu.work import (
    LIBRARIES,
    Tokens,
    collate,
    device,
    language_model,
    main,
    settings,
    synchronize,
    transformers,
)

ROUNDS = 3
NEW_TOKENS = 32


def measure(*, loop: str, tasks: list[str], dry: bool) -> dict[str, Any]:
    """Evaluate each task three times after a warm-up; the rate is of the quickest."""
    return {task: _measure(loop, task, dry) for task in tasks}


def _measure(loop: str, task: str, dry: bool) -> dict[str, Any]:
    generates = task == "generation"
    rows = 8 if dry else (256 if generates else 512)
    batch = 4 if dry else (64 if generates else 16)
    network = _translator(dry) if generates else language_model("gpt2", dry=dry)
    network.eval()
    vocabulary = network.config.vocab_size
    dataset = Tokens(rows, 16 if dry else (64 if generates else 512), min(256, vocabulary))
    with tempfile.TemporaryDirectory() as folder:
        run = _by_hand(network, dataset, batch, generates, dry)
        if loop != "hand":
            run = _by_trainer(loop, network, dataset, batch, generates, dry, folder)
        seconds, values = [], []
        for _ in range(ROUNDS + 1):
            begun = time.perf_counter()
            values.append(run())
            synchronize(dry)
            seconds.append(time.perf_counter() - begun)
    return {"samples_per_s": rows / min(seconds[1:]), "loss": values[-1]}


def _by_hand(network: Any, rows: Tokens, batch: int, generates: bool, dry: bool) -> Callable[[], float]:
    def run() -> float:
        total = torch.zeros((), device=device(dry))
        for host in DataLoader(rows, batch, collate_fn=collate, pin_memory=not dry):
            inputs = {name: value.to(device(dry), non_blocking=True) for name, value in host.items()}
            with torch.inference_mode(), torch.autocast(device(dry).type, torch.bfloat16):
                if generates:
                    network.generate(inputs["input_ids"], **_generation(dry))
                total += network(**inputs).loss * len(inputs["labels"])
        return float(total / len(rows))

    return run


def _by_trainer(
    loop: str, network: nn.Module, rows: Tokens, batch: int, generates: bool, dry: bool, folder: str
) -> Callable[[], float]:
    library = LIBRARIES[loop]
    chosen = settings(folder, steps=1, batch=batch, dry=dry, bf16=True, per_device_eval_batch_size=batch)
    if generates:
        args = library.Seq2SeqTrainingArguments(**chosen, predict_with_generate=True)
        given = {"model": network, "args": args, "eval_dataset": rows, "data_collator": collate}
        # Without metrics a Trainer computes the loss alone, and generates nothing.
        trainer = library.Seq2SeqTrainer(**given, compute_metrics=lambda made: {"rows": len(made.predictions)})
        return lambda: float(trainer.evaluate(**_generation(dry))["eval_loss"])
    args = library.TrainingArguments(**chosen, prediction_loss_only=True)
    trainer = library.Trainer(model=network, args=args, eval_dataset=rows, data_collator=collate)
    return lambda: float(trainer.evaluate()["eval_loss"])


def _generation(dry: bool) -> dict[str, Any]:
    count = 4 if dry else NEW_TOKENS
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}


def _translator(dry: bool) -> Any:
    """T5 of the size `t5-small` (60 M parameters), from its configuration."""
    tiny = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 256} if dry else {}
    sizes = {"num_layers": 6, "num_heads": 8, **tiny}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    with torch.device(device(dry)):
        return transformers.AutoModelForSeq2SeqLM.from_config(config)


if __name__ == "__main__":
    main(measure)
