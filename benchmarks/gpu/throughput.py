"""Tokens per second, utilization and peak memory of a language model in bf16, by one of the three ways to train.

    python -m benchmarks.gpu.throughput '{"loop": "ours", "model": "gpt2", "batch": 0, "compiled": false, "dry": true}'

`batch` 0 searches for the largest power of two with which the loop by hand needs at most 60 % of the memory: both
Trainers convert logits to fp32 as well, and all three are to run with the same batch.

Model FLOPs are 6 per parameter and token, plus 12 * layers * width * length per token for attention (as in Chowdhery et
al., "PaLM", appendix B; the embedding table counts because it is also the output layer of GPT-2).
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.work import Tokens, Windows, by_hand, language_model, main, settings, train
from trainer_lib.base.outputs import utilization

LENGTHS = {"gpt2": 1024, "llama": 4096}
STEPS = {"gpt2": 15, "llama": 6}  # of a window
LARGEST = {"gpt2": 64, "llama": 16}
ROOM = 0.6


def measure(*, loop: str, model: str, batch: int, compiled: bool, dry: bool) -> dict[str, Any]:
    """Train through the warm-up and three windows."""
    length = 32 if dry else LENGTHS[model]
    batch = batch or (2 if dry else largest_batch(model, length))
    network = language_model(model, dry=dry)
    steps = 2 if dry else STEPS[model]
    windows = Windows(warm_up=3 if dry else 5, steps=steps, count=3, dry=dry)
    rows = Tokens(batch * windows.total, length, network.config.vocab_size)
    if loop == "hand":
        runnable: Any = torch.compile(network) if compiled else network
        for _ in by_hand(runnable, rows, steps=windows.total, batch=batch, dry=dry):
            windows.step()
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = settings(folder, steps=windows.total, batch=batch, dry=dry, bf16=True, torch_compile=compiled)
            train(loop, network, rows, arguments, on_step_end=windows.step)
    rates = [steps * batch * length / seconds for seconds in windows.seconds]
    flops = statistics.median(rates) * flops_per_token(network, length)
    name = "CPU" if dry else torch.cuda.get_device_name()
    return {
        "batch": batch,
        "length": length,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "tokens_per_s": statistics.median(rates),
        "windows": rates,
        "mfu": utilization(flops, 1.0, devices=1, device=name, precision="bf16"),
        "peak_bytes": 0 if dry else torch.cuda.max_memory_allocated(),
    }


def flops_per_token(network: Any, length: int) -> float:
    """Model FLOPs of training on one token, forward and backward."""
    config = network.config
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return float(6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length)


def largest_batch(model: str, length: int) -> int:
    """The largest power of two that leaves room, found by training two steps by hand with each."""
    memory = torch.cuda.get_device_properties(0).total_memory
    for batch in _halvings(LARGEST[model]):
        torch.cuda.reset_peak_memory_stats()
        network = language_model(model, dry=False)
        try:
            for _ in by_hand(network, Tokens(2 * batch, length, 8192), steps=2, batch=batch, dry=False):
                pass
        except torch.cuda.OutOfMemoryError:
            continue
        finally:
            del network
            gc.collect()
            torch.cuda.empty_cache()
        if torch.cuda.max_memory_allocated() <= ROOM * memory:
            return batch
    return 1


def _halvings(largest: int) -> Iterator[int]:
    while largest >= 1:
        yield largest
        largest //= 2


if __name__ == "__main__":
    main(measure)
