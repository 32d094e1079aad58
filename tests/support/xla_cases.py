"""Cases of an XLA device, run in the interpreter that has torch_xla (`tests.support.xla`)."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Tied(nn.Module):
    """A classifier with Dropout whose two middle layers share one weight; all of its square weights have one shape."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = x
        for layer in (self.first, self.second, self.third):
            hidden = self.dropout(torch.relu(layer(hidden)))
        logits = self.head(hidden)
        outputs = {"logits": logits}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


def _rows() -> list[dict[str, Any]]:
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": int(row.sum() > 0)} for row in values]


def _trainer(folder: Path, *, model: Any = Tied, **given: Any) -> Any:
    from trainer_lib import Trainer, TrainingArguments

    settings: dict[str, Any] = {"max_steps": 10, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    settings |= {"logging_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    settings |= {"learning_rate": 0.01, "report_to": [], "disable_tqdm": True, **given}
    optimizers = settings.pop("optimizers", (None, None))
    args = TrainingArguments(str(folder), **settings)
    make: dict[str, Any] = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    rows = _rows()
    return Trainer(args=args, train_dataset=rows, eval_dataset=rows[:20], optimizers=optimizers, **make)


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def resume(folder: Path, **given: Any) -> dict[str, Any]:
    """A training of ten steps, and one that continues it from the fourth."""
    from trainer_lib.distributed import xla

    whole = _trainer(folder, **given)
    whole.train()
    weights, random = _weights(whole), xla.random_state()
    continued = _trainer(folder, **given)
    continued.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    history = [
        [entry["loss"] for entry in each.state.log_history if "loss" in entry][-6:] for each in (whole, continued)
    ]
    return {
        "device": whole.args.device.type,
        "fused": [group["fused"] for group in whole.optimizer.param_groups],
        "weights": _same(weights, _weights(continued)),
        "random": random == xla.random_state(),
        "losses": history,
    }


def other_dropout(folder: Path) -> bool:
    """Whether two seeds give two trainings, from the same initial weights."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        trainer = _trainer(folder / str(seed), model=Tied(), seed=seed, data_seed=7)
        trainer.train()
        found.append(_weights(trainer))
    return not _same(*found)


def equal_cpu(folder: Path) -> dict[str, Any]:
    """One training without Dropout on each of two devices, and how far apart they end."""
    found = []
    for device in ("xla", "cpu"):
        torch.manual_seed(0)
        trainer = _trainer(folder / device, model=Tied(0.0), use_cpu=device == "cpu")
        trainer.train()
        output = trainer.predict(_rows()[:22])
        found.append((_weights(trainer), trainer.evaluate()["eval_loss"], torch.from_numpy(output.predictions)))
    (ours, loss, logits), (theirs, other_loss, other_logits) = found
    return {
        "weights": max(float((ours[name] - theirs[name]).abs().max()) for name in ours),
        "eval_loss": abs(loss - other_loss),
        "logits": float((logits - other_logits).abs().max()),
        "predicted": list(logits.shape),
    }


def save(folder: Path) -> dict[str, Any]:
    """What is saved, with an optimizer that was made while the model was on the CPU."""
    from safetensors.torch import load_file

    model = Tied()
    trainer = _trainer(folder, model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))
    before = {name: value.clone() for name, value in _weights(trainer).items()}
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    weights = _weights(trainer)
    files = [load_file(folder / each / "model.safetensors") for each in ("saved", "checkpoint-10")]
    return {
        "tied": model.third.weight is model.second.weight,
        "names": [sorted(each) for each in files],
        "equal": [all(torch.equal(each[name], weights[name]) for name in each) for each in files],
        "trained": not any(torch.equal(before[name], weights[name]) for name in weights),
    }


def compiled_graphs(folder: Path) -> list[int]:
    """Graphs that torch_xla has compiled at steps 6, 12 and 18, and after two evaluations."""
    from trainer_lib import TrainerCallback

    found = []
    metrics = importlib.import_module("torch_xla.debug.metrics")

    def count() -> None:
        data = metrics.metric_data("CompileTime")
        found.append(0 if data is None else int(data[0]))

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 6 == 0:
                count()

    trainer = _trainer(folder, max_steps=18, eval_strategy="no", save_strategy="no")
    trainer.add_callback(Count())
    trainer.train()
    for _ in range(2):
        trainer.evaluate()
        count()
    return found


def refusals(folder: Path) -> dict[str, str]:
    from trainer_lib.errors import ConfigError

    found = {}
    for name, value in (("fsdp", "full_shard"), ("torch_compile", True), ("fp16", True)):
        try:
            _trainer(folder, **{name: value})
        except ConfigError as error:
            found[name] = str(error)
    return found


def device(folder: Path) -> str:
    """The device that the arguments choose, or the error."""
    from trainer_lib.distributed.communicator import choose_device
    from trainer_lib.errors import ConfigError

    try:
        return str(choose_device(use_cpu=False))
    except ConfigError as error:
        return str(error)


def _launched(_: int, folder: str) -> None:
    ordinal = importlib.import_module("torch_xla.runtime").global_ordinal()
    (Path(folder) / f"answer-{ordinal}").write_text(device(Path(folder)), encoding="utf-8")


def launched(folder: Path) -> list[str]:
    """What every replica of `torch_xla.launch` gets for a device."""
    importlib.import_module("torch_xla").launch(_launched, args=(str(folder),))
    return [each.read_text(encoding="utf-8") for each in sorted(folder.glob("answer-*"))]


CASES: dict[str, Callable[[Path], Any]] = {
    "resume": resume,
    "resume_bf16": lambda folder: resume(folder, bf16=True, optim="sgd", optim_args="momentum=0.9"),
    "resume_syncfree": lambda folder: resume(folder, optim="adamw_torch_xla"),
    "other_dropout": other_dropout,
    "equal_cpu": equal_cpu,
    "save": save,
    "compiled_graphs": compiled_graphs,
    "refusals": refusals,
    "device": device,
    "launched": launched,
}


def _main(output: Path, *names: str) -> None:
    logging.basicConfig(filename=output / "log", level=logging.INFO)
    answer = {}
    for name in names:
        folder = output / name
        folder.mkdir()
        answer[name] = CASES[name](folder)
    (output / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
