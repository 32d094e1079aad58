"""Whether a training that was killed and resumed ends with the bits of one that was not.

    python -m benchmarks.gpu.resumes '{"case": "bf16", "dry": true}'

Three processes: one trains to the end; one kills itself by SIGKILL after step 25; one resumes that. Compared are the
SHA-256 of weights and optimizer state, and the losses. `full_determinism` is set, since kernels of a GPU else differ
between two runs of the same program.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.gpu.processes import Job
from benchmarks.gpu.work import Tokens, language_model, main, settings
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.recipes.shared.model_places import add_adapters, load_causal_model, quantized
from trainer_lib.trainer.model.models import set_compute_type

STEPS, SAVE, KILL = 40, 10, 25
BATCH = 8
#: Arguments of a case, and the packages that it needs.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "bf16": ({"bf16": True}, None),
    "fp16 with scaler": ({"fp16": True}, None),
    "compile": ({"bf16": True, "torch_compile": True}, None),
    "gradient checkpointing": ({"bf16": True, "gradient_checkpointing": True}, None),
    "accumulation 4": ({"bf16": True, "gradient_accumulation_steps": 4}, None),
    "channels_last convolution": ({"bf16": True}, None),
    "adamw_bnb_8bit": ({"bf16": True, "optim": "adamw_bnb_8bit"}, "bitsandbytes"),
    "QLoRA": ({"bf16": True}, "bitsandbytes peft"),
    "adamw_torch_8bit": ({"bf16": True, "optim": "adamw_torch_8bit"}, "torchao"),
    "adamw_torch_4bit": ({"bf16": True, "optim": "adamw_torch_4bit"}, "torchao"),
    "adamw_torch_bf16_sr": ({"bf16": True, "optim": "adamw_torch_bf16_sr"}, "torchao"),
    "liger": ({"bf16": True, "use_liger_kernel": True}, "liger_kernel"),
    "fp8": ({"bf16": True}, "torchao"),
}


class Convolutions(nn.Module):
    """Images [batch, 3, 32, 32] -> loss; its memory is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2)),
            *(nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy of the logits [batch, 10] with labels [batch]."""
        logits = self.layers(images.to(memory_format=torch.channels_last))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Images(Dataset[dict[str, Tensor]]):
    """Random images [3, 32, 32] and classes out of 10."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(rows, 3, 32, 32, generator=generator)
        self.labels = torch.randint(10, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Kill(TrainerCallback):
    """Kills the process after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send SIGKILL to ourselves."""
        if state.global_step == KILL:
            os.kill(os.getpid(), signal.SIGKILL)


def measure(*, case: str, dry: bool, phase: str = "", folder: str = "") -> dict[str, Any]:
    """Run all three processes of a case; with `phase`, be one of them."""
    arguments, packages = CASES[case]
    for package in (packages or "").split():
        if importlib.util.find_spec(package) is None:
            return {"missing": package}
    if phase:
        return _train(case, arguments, dry, phase, folder)
    with tempfile.TemporaryDirectory() as home:
        whole = _start(case, dry, "whole", f"{home}/whole")
        killed = _start(case, dry, "killed", f"{home}/killed")
        expected, code = _wait(whole), killed.wait()
        if code != -signal.SIGKILL:
            raise RuntimeError(f"the process that was to be killed ended with {code}: {killed.text()[-1500:]}")
        checkpoints = sorted(path.name for path in Path(f"{home}/killed").glob("checkpoint-*"))
        resumed = _wait(_start(case, dry, "resumed", f"{home}/killed"))
        again = {} if resumed == expected else _wait(_start(case, dry, "whole", f"{home}/again"))
    differing = [name for name, value in expected.items() if resumed.get(name) != value]
    return {
        "identical": not differing,
        "differing": differing[:3],
        "two whole runs are identical": again == expected if again else None,
        "resumed from": checkpoints[-1] if checkpoints else None,
        "final loss": expected["loss"],
        "state_bytes": expected["state_bytes"],
    }


def _start(case: str, dry: bool, phase: str, folder: str) -> Job:
    chosen = {"case": case, "dry": dry, "phase": phase, "folder": folder}
    return Job("resumes", chosen, Path(f"{folder}-{phase}.txt"), inside=True)


def _wait(job: Job) -> dict[str, Any]:
    code, result = job.wait(), job.result()
    if code or result is None:
        raise RuntimeError(job.text()[-1500:])
    return result


def _train(case: str, arguments: dict[str, Any], dry: bool, phase: str, folder: str) -> dict[str, Any]:
    samples = STEPS * BATCH * arguments.get("gradient_accumulation_steps", 1)
    torch.manual_seed(0)
    if case.startswith("channels_last"):
        network: Any = Convolutions()
        rows: Dataset[Any] = Images(samples)
    else:
        name = "small llama" if case in ("liger", "QLoRA") else "small"
        network, rows = language_model(name, dry=dry, dropout=0.1), Tokens(samples, 32 if dry else 256, 256)
    if case == "fp8":
        network = _fp8(network)
    if case == "adamw_torch_bf16_sr":
        network = network.bfloat16()
    if case == "QLoRA":
        network = _few_bits(network)
    saved = {"save_strategy": "steps", "save_steps": SAVE, "save_async": True, "full_determinism": True}
    chosen = settings(folder, steps=STEPS, batch=BATCH, dry=dry, **{**saved, **arguments})
    callbacks, args = [Kill()] if phase == "killed" else None, TrainingArguments(**chosen)
    set_compute_type(network, args)
    trainer = Trainer(model=network, args=args, train_dataset=rows, callbacks=callbacks)
    output = trainer.train(resume_from_checkpoint=True if phase == "resumed" else None)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    optimizer: Any = trainer.optimizer
    state |= dict(_leaves("optimizer", optimizer.state_dict()["state"]))
    size = sum(_bytes(value) for name, value in state.items() if not name.startswith("model."))
    return {
        **{name: _digest(value) for name, value in state.items()},
        "loss": output.training_loss,
        "state_bytes": size,
    }


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values by their place; bitsandbytes keeps dicts in its state."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{name}.{key}", inner)


def _fp8(network: Any) -> Any:
    torchao = importlib.import_module("torchao.float8")
    return torchao.convert_to_float8_training(network, module_filter_fn=lambda module, name: "lm_head" not in name)


def _few_bits(network: Any) -> Any:
    """Adapters with dropout on the network's weights in 4 bits, loaded from a folder as the recipes do."""
    with tempfile.TemporaryDirectory() as base:
        network.save_pretrained(base)
        settings = quantized("4bit", place=base, adapted=True)
        loaded = load_causal_model(base, dtype="float32", vocabulary=1, field="model", settings=settings)
    return add_adapters(loaded, {"rank": 8, "dropout": 0.1}, place=base)


def _bytes(value: Any) -> int:
    if hasattr(value, "__tensor_flatten__"):  # the quantised state of torchao
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if hasattr(value, "__tensor_flatten__"):
        return " ".join(_digest(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    raw = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()


if __name__ == "__main__":
    main(measure)
