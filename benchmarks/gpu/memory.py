"""The memory report, and what happens when a GPU's memory runs out in a step and in an evaluation.

    python -m benchmarks.gpu.memory '{"case": "report", "dry": true}'

Memory is made short by `torch.cuda.set_per_process_memory_fraction`; a dry run makes it short in the model's forward.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.work import Tokens, language_model, main, settings, train

LENGTH, GLOBAL, STEPS = 256, 64, 6
LIMIT = 3 * 2**30  # bytes: a micro-batch of 64 does not fit, one of 8 does


class Short(nn.Module):
    """A model whose forward runs out of memory with more than `rows` samples."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """As the inner model, while memory suffices."""
        if len(input_ids) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. (a dry run)")
        return self.inner(input_ids=input_ids, labels=labels)


def report(dry: bool) -> dict[str, Any]:
    """Compare the report's peak with the allocator's."""
    if not dry:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(folder, steps=STEPS, batch=8, dry=dry, bf16=True, skip_memory_metrics=False)
        _, output = train("ours", language_model("small", dry=dry), _rows(dry), chosen)
    kind = "cpu" if dry else "gpu"
    metrics = output.metrics
    before = metrics[f"before_init_mem_{kind}"] + metrics[f"init_mem_{kind}_alloc_delta"]
    told = before + metrics[f"train_mem_{kind}_alloc_delta"] + metrics[f"train_mem_{kind}_peaked_delta"]
    return {"reported_peak": told, "allocator_peak": told if dry else torch.cuda.max_memory_allocated()}


def retry(dry: bool) -> dict[str, Any]:
    """Let memory run out with `auto_find_batch_size`: the same weights as with that micro-batch from the start?"""
    return _shrink(dry, {"auto_find_batch_size": True, "per_device_train_batch_size": GLOBAL})


def search(dry: bool) -> dict[str, Any]:
    """Let the micro-batch follow from `global_batch_size` alone."""
    return _shrink(dry, {"global_batch_size": GLOBAL})


def _shrink(dry: bool, asked: dict[str, Any]) -> dict[str, Any]:
    _make_short(dry)
    digest, batch = _train(dry, asked)
    small = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": GLOBAL // batch}
    expected, _ = _train(dry, small)
    return {"micro_batch": batch, "same_weights": digest == expected}


def _train(dry: bool, asked: dict[str, Any]) -> tuple[str, int]:
    network: Any = language_model("small", dry=dry)
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(folder, steps=STEPS, batch=GLOBAL, dry=dry, full_determinism=True)
        chosen = {name: value for name, value in chosen.items() if name != "per_device_train_batch_size"} | asked
        trainer, _ = train("ours", Short(network, 8) if dry else network, _rows(dry), chosen)
    digest = hashlib.sha256()
    for value in network.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    batch = int(trainer._train_batch_size)
    del trainer
    return digest.hexdigest(), batch


def evaluation(dry: bool) -> dict[str, Any]:
    """Let memory run out in an evaluation; the error names the field, and a smaller batch then works."""
    from trainer_lib import Trainer, TrainingArguments
    from trainer_lib.errors import TrainflowError

    _make_short(dry)
    network: Any = language_model("small", dry=dry)
    told: dict[str, Any] = {}
    for batch in (GLOBAL * 4, 4):
        with tempfile.TemporaryDirectory() as folder:
            chosen = settings(folder, steps=1, batch=4, dry=dry, per_device_eval_batch_size=batch)
            chosen |= {"prediction_loss_only": True}
            model = Short(network, 8) if dry else network
            try:
                found = Trainer(model=model, args=TrainingArguments(**chosen), eval_dataset=_rows(dry)).evaluate()
                told[f"batch {batch}"] = f"loss {found['eval_loss']:.3f}"
            except TrainflowError as error:
                told[f"batch {batch}"] = f"{type(error).__name__} of {error.field}"
            except torch.OutOfMemoryError:
                told[f"batch {batch}"] = "torch.OutOfMemoryError"
    return told


def _rows(dry: bool) -> Tokens:
    return Tokens(GLOBAL * STEPS, 32 if dry else LENGTH, 256)


def _make_short(dry: bool) -> None:
    if not dry:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / total))


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "report": report,
    "retry": retry,
    "search": search,
    "evaluation": evaluation,
}


def measure(*, case: str, dry: bool) -> dict[str, Any]:
    """Run one case."""
    return CASES[case](dry)


if __name__ == "__main__":
    main(measure)
