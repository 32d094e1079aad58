"""The ddp_* arguments, by what torch's replication then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import TrainerCallback
from trainer_lib.errors import ConfigError

ROWS = classification_rows(16)


class Buffered(Classifier):
    """Has a buffer, and five layers of 1 MiB."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))
        self.unused = unused
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        layers: list[Any] = [] if self.unused else list(self.wide)
        for layer in layers:
            outputs["loss"] = outputs["loss"] + layer(torch.zeros(1, 512)).sum() * 0
        return outputs


class Differ(TrainerCallback):
    """Gives the buffer another value on every rank, between two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.seen.fill_(args.process_index + 5.0)


def replicated(folder: str) -> dict[str, Any]:
    """What each setting changes, in one world."""
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "small": {"ddp_bucket_cap_mb": 1},
        "static": {"ddp_static_graph": True, "ddp_find_unused_parameters": False},
    }
    for name, given in cases.items():
        one = trainer(Path(folder, name), ROWS, model=Buffered(), max_steps=3, **given)
        one.train()
        wrapped: Any = one.model_wrapped
        said = wrapped._get_ddp_logging_data()
        found[name] = {
            "find_unused": bool(said["find_unused_parameters"]),
            "static": bool(said.get("static_graph")),
            "buckets": len(str(said["bucket_sizes"]).split(",")),
        }
    for value in (True, False):
        buffers: Any = {"ddp_broadcast_buffers": value, "max_steps": 2}
        one = trainer(Path(folder, f"buffers-{value}"), ROWS, model=Buffered(), callbacks=[Differ()], **buffers)
        one.train()
        found[f"buffers {value}"] = float(one.model.state_dict()["seen"])
    one = trainer(
        Path(folder, "strict"), ROWS, model=Buffered(unused=True), ddp_find_unused_parameters=False, max_steps=3
    )
    try:
        one.train()
    except RuntimeError as error:
        found["strict"] = str(error).splitlines()[0]
    try:
        trainer(Path(folder, "order"), ROWS, dataloader_in_order=False, dataloader_num_workers=1)
    except ConfigError as error:
        found["order"] = str(error)
    return found


def test_ddp_arguments_change_the_replication(tmp_path: Path) -> None:
    zero, one = run_distributed(replicated, 2, str(tmp_path))
    assert zero["plain"]["find_unused"] and not zero["static"]["find_unused"]
    assert zero["static"]["static"] and not zero["plain"]["static"]
    assert zero["small"]["buckets"] > zero["plain"]["buckets"]
    assert (zero["buffers True"], one["buffers True"]) == (5.0, 5.0)
    assert (zero["buffers False"], one["buffers False"]) == (5.0, 6.0)
    assert "Expected to have finished reduction" in zero["strict"]
    assert "dataloader_in_order = False: Several processes take their micro-batches by position" in one["order"]
