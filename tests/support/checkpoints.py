"""A small training state, and saving it: what the checkpoint tests have in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpoint.catalogue import CheckpointInfo, list_checkpoints
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot, snapshot_optimizer
from trainer_lib.checkpoint.sharded import collect_local_parts
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.values import capture_rng
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.storage import Store
from trainer_lib.storage.commit import write_commit


class Net(nn.Module):
    """A few layers with tied weights and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.norm(self.embed(x))).logsumexp(-1).mean()
        return loss


def trained(steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    """A net and an optimizer after some steps; the same each time."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 5, (8,), generator=generator)).backward()
        optimizer.step()
    return net, optimizer


def snapshot(step: int = 2, **changes: Any) -> Snapshot:
    """A whole snapshot; `changes` replace fields."""
    net, optimizer = trained(min(step, 5))
    fields: dict[str, Any] = {
        "step": step,
        "model": net.state_dict(),
        "optimizer": snapshot_optimizer(optimizer, net.named_parameters()),
        "scheduler": {"last_epoch": step, "_last_lr": [0.01], "lr_lambdas": [None]},
        "scaler": {"scale": 65536.0},
        "rng": capture_rng(),
        "data": {"epoch": 0, "position": 8 * step},
        "trainer_state": {"global_step": step, "log_history": [{"loss": float("inf"), "step": 1}]},
        "training_args": {"learning_rate": 0.01, "hub_token": "hf_s3cr3t", "nested": {"api_key": "s3cr3t"}},
        "files": {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb\n"},
        "meta": {"strategy": "single", "global_samples": 8 * step},
    }
    return Snapshot(**{**fields, **changes})


def divided(whole: Snapshot) -> Snapshot:
    assert whole.optimizer is not None
    parts = collect_local_parts({"model": whole.model, "optimizer": whole.optimizer.tensors}, 0)
    return replace(whole, model={}, optimizer=replace(whole.optimizer, tensors={}), parts=parts)


def save(root: Store, step: int = 2, **changes: Any) -> CheckpointInfo:
    return save_checkpoint(root, snapshot(step, **changes), SingleProcess())


def untrained(step: int = 2) -> Snapshot:
    """A snapshot of the same shape without a training step: torch imports a compiler at the first one, for seconds."""
    net = Net()
    params = dict(net.named_parameters())
    tensors = {f"{name}/exp_avg": torch.randn_like(param) for name, param in params.items()}
    state = {name: {"exp_avg": {"__tensor__": f"{name}/exp_avg", "device": "any"}} for name in params}
    optimizer = OptimizerSnapshot(tensors, [{"lr": 0.01, "params": list(params)}], {"state": state})
    return Snapshot(step, net.state_dict(), optimizer, rng=capture_rng(), files={"config.json": b"{}"})


def commit(root: Store, step: int, data: bytes = b"1234") -> None:
    folder = root.child(f"checkpoint-{step}")
    write_commit(folder, "checkpoint", [folder.write_bytes("model.safetensors", data)], {"step": step})


def steps(root: Store) -> list[int]:
    return [info.step for info in list_checkpoints(root)]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in a local folder, in order."""
    commits = folder.glob("checkpoint-*/COMMIT.json")
    return sorted(int(commit.parent.name.removeprefix("checkpoint-")) for commit in commits)


def no_damage(what: str) -> None:
    """An `on_damage` for a test in which no checkpoint is damaged."""
    raise AssertionError(what)


def save_untrained(root: Store, step: int, **changes: Any) -> None:
    """Save an untrained snapshot, alone; `changes` replace fields."""
    save_checkpoint(root, replace(untrained(step), **changes), SingleProcess())


FILES = [
    "config.json", "data.json", "model.safetensors", "optimizer.json", "optimizer.safetensors", "rng/rank-00000.json",
    "scaler.json", "scheduler.json", "tokenizer/vocab.txt", "trainer_state.json", "training_args.json",
]  # fmt: skip
BLOCKS = ["shards.json", "shards/rank-00000.safetensors"]
"""What a checkpoint in blocks has in place of the tensors' files."""
