"""The loss of a divided vocabulary is that of one process, and no process has the logits of all classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from tests.distributed.test_layouts import HEADS, RAGGED
from tests.support.distributed import loaded, run_distributed
from tests.support.tiny_models import llama, lm_rows
from tests.support.training import losses, norms, trainer
from trainer_lib import Trainer

CLASSES = 35  # the last process has fewer than the others, and no other tensor of the model has this size


class ReadsLogits(Trainer):
    """A loss of the user's own, which needs logits."""

    @override
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"per_device_train_batch_size": 1},
    "smoothed": {"label_smoothing_factor": 0.1},
    "tied": {"tied": True},
    "bf16": {"bf16": True},
    "own loss": {"cls": ReadsLogits},
    "in shards": {"label_smoothing_factor": 0.1, "shard": 2},
}
#: Processes -> cases: more than one neighbour and shards need four, and everything else only costs more with them.
WORLDS = {2: ("accumulated", "smoothed", "tied", "bf16", "own loss"), 4: ("plain", "in shards")}


class LastSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the last sizes of all tensors that are made, but for vectors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen |= {part.shape[-1] for part in tree_leaves(made) if isinstance(part, torch.Tensor) and part.ndim > 1}
        return made


def trained(folder: str, world: int) -> dict[str, Any]:
    """Losses, norms and evaluations; whether logits were whole in training and evaluation, without and with metrics."""
    results = {}
    for number, name in enumerate(WORLDS.get(world, CASES)):
        settings = {**RAGGED, **CASES[name]}
        shard = settings.pop("shard", 1)
        if world > 1:
            settings["parallelism"] = {"shard": shard, "tensor": world // shard}
        model = llama(**HEADS, vocab_size=CLASSES, tie_word_embeddings=settings.pop("tied", False))
        one = trainer(f"{folder}/{number}", lm_rows(14), model=model, **settings)
        with LastSizes() as training:
            one.train()
        with LastSizes() as evaluation:
            evaluated = one.evaluate(lm_rows(9, seed=3))["eval_loss"]
        one.compute_metrics = lambda _: {}
        with LastSizes() as measured:
            whole = one.evaluate(lm_rows(9, seed=3))["eval_loss"]
        results[name] = {
            "losses": losses(one),
            "norms": norms(one),
            "evaluated": [evaluated, whole],
            "has_all_classes": [CLASSES in noted.seen for noted in (training, evaluation, measured)],
        }
    return results


def test_no_process_has_the_logits_of_all_classes_unless_they_are_read(tmp_path: Path) -> None:
    expected = trained(str(tmp_path / "alone"), 1)
    with loaded("transformers.models.llama.modeling_llama"):
        ranks = [run_distributed(trained, world, str(tmp_path / str(world)), world, timeout_s=180) for world in WORLDS]
    found = [item for results in ranks for one in results for item in one.items()]
    assert {name for name, _ in found} == set(CASES)
    for name, one in found:
        for series in ("losses", "norms", "evaluated"):
            digits = 0.02 if name == "bf16" else 2e-6
            assert one[series] == pytest.approx(expected[name][series], rel=digits), (name, series)
        assert one["has_all_classes"] == [name == "own loss", name == "own loss", True], name
