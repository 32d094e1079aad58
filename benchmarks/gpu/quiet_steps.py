"""How often the host waits for the GPU in steps that neither log, evaluate nor save.

    python -m benchmarks.gpu.quiet_steps '{"loop": "ours", "case": "bf16", "dry": true}'

Ours trains 50 steps under `torch.cuda.set_sync_debug_mode("error")`, in which torch raises where it would wait. All
three are then counted by torch's profiler, over 20 steps: waits for a stream or an event, and copies from the GPU. The
model is plain torch: the forward of a model of transformers itself waits once, where it looks at positions.
"""

from __future__ import annotations

import tempfile
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_outputs import CausalLMOutput

from benchmarks.gpu.work import Tokens, by_hand, device, main, settings, train

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "accumulation 4": {"bf16": True, "gradient_accumulation_steps": 4},
    "label smoothing": {"bf16": True, "label_smoothing_factor": 0.1},
}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
WARM_UP, STRICT, COUNTED = 10, 50, 20
DRY = 2  # steps that a dry run counts
BATCH = 8


class Blocks(nn.Module):
    """Four causal transformer blocks of width 384: tokens and labels [batch, length] -> loss and logits."""

    def __init__(self, dry: bool) -> None:
        super().__init__()
        width, tokens = (48, 256) if dry else (384, 8192)
        self.head = width // 6
        self.table = nn.Embedding(tokens, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))
        self.output = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        """Compute the mean cross entropy of the next token."""
        hidden = self.table(input_ids)
        for norm, project, out in zip(self.norms, self.attention, self.output, strict=True):
            query, key, value = project(norm(hidden)).unflatten(-1, (3, 6, self.head)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + out(mixed.transpose(1, 2).flatten(2))
        logits = hidden @ self.table.weight.T
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def measure(*, loop: str, case: str, dry: bool) -> dict[str, Any]:
    """Train one case strictly (ours), then counted."""
    strict = "not tried" if loop != "ours" or dry else _train_strictly(case)
    return {"strict": strict, **_count(loop, case, dry)}


def _train_strictly(case: str) -> str:
    def on_step_end(state: Any, **_: Any) -> None:
        if state.global_step == WARM_UP:
            torch.cuda.set_sync_debug_mode("error")
        elif state.global_step == WARM_UP + STRICT:
            torch.cuda.set_sync_debug_mode("default")

    try:
        _train("ours", case, WARM_UP + STRICT + 1, dry=False, on_step_end=on_step_end)
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if "trainer_lib" in frame.filename), frames[-1])
        return f"{error} ({place.filename}:{place.lineno}: {place.line})"
    return "passed"


def _count(loop: str, case: str, dry: bool) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU] if dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler, counted = profile(activities=activities), DRY if dry else COUNTED
    steps = WARM_UP + counted + 1

    def step(number: int) -> None:
        if number == WARM_UP:
            profiler.start()
        elif number == WARM_UP + counted:
            profiler.stop()

    if loop == "hand":
        network = Blocks(dry).to(device(dry))
        rows = Tokens(BATCH * steps, 32 if dry else 256, 256)
        for number, _ in enumerate(by_hand(network, rows, steps=steps, batch=BATCH, dry=dry), 1):
            step(number)
    else:
        _train(loop, case, steps, dry, on_step_end=lambda state, **_: step(state.global_step))
    counts = {event.key: event.count for event in profiler.key_averages()}
    kernels = sorted({name for name in counts if "flash" in name.lower() or "cudnn" in name.lower()})
    waits = {wait: sum(count for name, count in counts.items() if wait in name) / counted for wait in WAITS}
    return {"waits_per_step": waits, "attention": [name[:60] for name in kernels][:2]}


def _train(loop: str, case: str, steps: int, dry: bool, **hooks: Any) -> None:
    network = Blocks(dry).to(device(dry))
    chosen = CASES[case]
    rows = Tokens(BATCH * steps * chosen.get("gradient_accumulation_steps", 1), 32 if dry else 256, 256)
    with tempfile.TemporaryDirectory() as folder:
        train(loop, network, rows, settings(folder, steps=steps, batch=BATCH, dry=dry, **chosen), **hooks)


if __name__ == "__main__":
    main(measure)
