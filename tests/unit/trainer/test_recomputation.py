"""Blocks that are recomputed, whole or but for some operators, or kept on the CPU: the same numbers, less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.gradients import gradients
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trained, trainer
from trainer_lib.errors import ConfigError
from trainer_lib.strategies import recomputation
from trainer_lib.strategies.recomputation import Recomputation, find_blocks, save_memory

DEEP: dict[str, Any] = {"num_hidden_layers": 4, "attention_dropout": 0.2}


class Block(nn.Module):
    """A layer of a model that is not of transformers, with dropout."""

    def __init__(self, size: int = 6, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size) if norm else nn.Identity()
        self.up, self.down, self.drop = nn.Linear(size, 64), nn.Linear(64, size), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.gelu(self.up(self.norm(x)))
        return torch.add(x, self.drop(self.down(wide)))


class Stacked(Classifier):
    """Blocks before the head of a classifier."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(Block(norm=norm) for _ in range(4)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output: dict[str, torch.Tensor] = super().forward(self.stack(x.to(self.head.weight.dtype)), labels)
        return output


MODELS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "llama": (lambda: llama(**DEEP), lm_rows(8)),
    "bert": (lambda: bert(num_hidden_layers=4, hidden_dropout_prob=0.2), text_rows(8)),
    "a plain module": (Stacked, classification_rows(8)),
}
CHOICES: list[dict[str, Any]] = [
    {"every": 1},
    {"every": 2},
    {"save": ["mm", "sdpa"]},
    {"save": "aten.addmm", "every": 2, "offload": True},
    {"every": 0, "offload": True},
]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_without_to_the_bit(name: str) -> None:
    model, rows = MODELS[name]
    plain, loss = gradients(rows, micro=4, batch=8, model=model)
    for choice in CHOICES:
        given: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": choice}
        saving, same = gradients(rows, micro=4, batch=8, model=model, **given)
        assert same == loss, choice
        assert saving.keys() == plain.keys()
        assert all(torch.equal(value, saving[name]) for name, value in plain.items()), choice


def peak(choice: dict[str, Any] | None) -> int:
    """Bytes at the peak of a forward and a backward of a wide stack, worked out without values."""
    from torch.distributed._tools.mem_tracker import MemTracker  # imports inductor: two seconds

    with FakeTensorMode():
        model = nn.Sequential(*(Block(64) for _ in range(8)))
        settings = Recomputation.of(choice)
        if settings is not None:
            save_memory(model, settings)
        tracker = MemTracker()
        rows = torch.empty(4096, 64)
        tracker.track_external(model, rows)
        with tracker:
            model(rows).sum().backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def test_the_more_is_recomputed_the_less_is_kept() -> None:
    full, half, kept, nothing = (peak(choice) for choice in ({"every": 1}, {"every": 2}, {"save": "mm"}, None))
    assert full < 0.5 * nothing and full < half < nothing
    assert full < kept < nothing


@pytest.mark.parametrize(("every", "recomputed"), [(1, 4), (2, 2), (0, 0)])
def test_what_blocks_keep_moves_to_the_cpu(every: int, recomputed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, rest = list[torch.Size](), list[torch.Size]()

    class Noting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory is torch.cuda.is_available()
            super().__init__(self.pack, lambda tensor: tensor)

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            (inputs if tensor.shape == (2, 6) else rest).append(tensor.shape)
            return tensor

    monkeypatch.setattr(recomputation, "save_on_cpu", Noting)
    model = nn.Sequential(*(Block() for _ in range(4)))
    save_memory(model, Recomputation(every=every, offload=True))
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    assert len(inputs) == recomputed + 2 * (4 - recomputed)
    assert len(rest) == 4 * (4 - recomputed)


def test_only_the_named_operators_run_once() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def count(choice: dict[str, Any]) -> int:
        model = nn.Sequential(*(Block() for _ in range(4)))
        save_memory(model, Recomputation.of(choice) or Recomputation())
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 6)).sum().backward()
        return int(counter.get_total_flops())

    assert count({"save": ["mm"]}) == count({"every": 0, "offload": True}) < count({"every": 2}) < count({"every": 1})


@pytest.mark.parametrize(
    ("model", "choice", "names"),
    [
        (lambda: llama(**DEEP), {"every": 1}, ["LlamaDecoderLayer"] * 4),
        (lambda: llama(**DEEP), {"blocks": "LlamaMLP"}, ["LlamaMLP"] * 4),
        (bert, {"every": 1}, ["BertLayer"] * 2),
        (lambda: nn.TransformerDecoder(cast("Any", Block()), 2), {"every": 3}, ["Block"] * 2),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([Block(), Block()])])}), {"every": 1}, ["Block"] * 2),
    ],
)  # fmt: skip
def test_blocks_are_the_layers_that_a_model_repeats(model: Any, choice: dict[str, Any], names: list[str]) -> None:
    settings = Recomputation.of(choice)
    assert settings is not None and [type(block).__name__ for block in find_blocks(model(), settings)] == names


def test_the_model_is_as_before_after_training(tmp_path: Path) -> None:
    for _ in range(2):
        given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every": 1}}
        one = trained(tmp_path, classification_rows(8), model=Stacked(), max_steps=1, **given)
        assert not any("forward" in vars(module) for module in one.model.modules())


@pytest.mark.parametrize(
    ("choice", "more", "message"),
    [
        ({"every": -1}, {}, r"kwargs.every = -1: .*2 for every other"),
        ({"every": True}, {}, r"kwargs.every = True: This is not a number"),
        ({"every": 0}, {}, r"kwargs.every = 0: No block .*offload"),
        ({"every": 0, "offload": True, "save": "mm"}, {}, r"kwargs.save = .*Remove"),
        ({"save": ["aten.nm"]}, {}, r"kwargs.save = aten.nm: torch has no such operator.*mm"),
        ({"save": []}, {}, r"kwargs.save = \[\]: This is not a list of names"),
        ({"save": "mm", "use_reentrant": True}, {}, r"kwargs.use_reentrant = True: .*Remove"),
        ({"offload": "maybe"}, {}, r"kwargs.offload = maybe: .*true or false"),
        ({"every": 2, "evry": 2}, {}, r"kwargs.evry = 2: .*every"),
        ({"blocks": "Blok"}, {}, r"kwargs.blocks = Blok: .*Block"),
        ({"every": 1}, {"use_cache": True}, "use_cache = True: .*twice"),
        ({"every": 1}, {"model": Classifier()}, r"kwargs.blocks = none: .*repeats no layers"),
        ({"every": 1}, {"model": Stacked(norm=True)}, r"kwargs.blocks = Block: Its running statistics"),
    ],
)
def test_a_wrong_choice_is_refused(choice: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = {"model": Stacked(), "gradient_checkpointing": True, "gradient_checkpointing_kwargs": choice, **more}
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, classification_rows(4), **settings)
