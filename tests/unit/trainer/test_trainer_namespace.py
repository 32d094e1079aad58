"""A subclass may use any name for itself that is not one of the reference's: no name of our own is in its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.overrides import Unusable
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import Seq2SeqTrainer, Trainer

DATA = Path(__file__).parents[2] / "data"
#: What the trainers of popular libraries set on themselves and define, collected from their sources (and, as "further",
#: what trainers of scripts usually have), without the names of the reference, which mean the same here.
FOUND: dict[str, Any] = json.loads((DATA / "subclass_names.json").read_text())
REFERENCE: dict[str, Any] = json.loads((DATA / "reference_trainer_names.json").read_text())
#: Words that an engine, a loop or a module has as well.
WORDS = (
    *("strategy", "precision", "device", "comm", "engine", "loop", "world", "state_dict", "load_state_dict", "run"),
    *("epoch", "step", "rank", "world_size", "metrics", "loss", "data", "dataset", "batch", "batches", "scaler"),
    *("forward", "backward", "log_metric", "events", "hooks", "checkpoints", "restore", "weights", "history", "stop"),
    *("_step", "_forward", "_backward", "_log", "_loss", "_engine", "_loop", "_world", "_run", "_state", "_data"),
    *("_device", "_strategy", "_precision", "_comm", "_rank", "_trainer", "_internals", "_events", "_metrics", "_stop"),
    *("_begin", "_report", "_prepare", "_prepared", "_snapshot", "_labels", "_held", "_saver", "_called", "_model"),
    *("_args", "_loaders", "_evaluator", "_counters", "_accelerator", "_signatures", "_facts", "_optimizer", "_start"),
    *("sources", "reader", "writer", "cache", "config", "name", "mode", "parameters", "children", "modules", "to"),
    *(
        "cuda",
        "cpu",
        "half",
        "apply",
        "close",
        "open",
        "reset",
        "setup",
        "update",
        "fit",
        "test",
        "validate",
        "publish",
    ),
)
ATTRIBUTES = sorted({*FOUND["attributes"], *FOUND["further_attributes"], *WORDS})
METHODS = sorted({*FOUND["methods"], *FOUND["further_methods"], *WORDS})
ROWS = classification_rows(12)


def test_no_recorded_name_is_one_of_the_references_or_of_ours() -> None:
    theirs = {*REFERENCE["Trainer"], *REFERENCE["Seq2SeqTrainer"]}
    assert not theirs & {*ATTRIBUTES, *METHODS}
    assert not [name for name in {*ATTRIBUTES, *METHODS} if hasattr(Seq2SeqTrainer, name)]
    assert len(FOUND["attributes"]) > 200 and len(FOUND["methods"]) > 100


class Before(Trainer):
    """Sets its attributes before the Trainer is built."""

    def __init__(self, *given: Any, **more: Any) -> None:
        for name in ATTRIBUTES:
            setattr(self, name, Unusable())
        super().__init__(*given, **more)


class After(Trainer):
    """Sets its attributes after the Trainer is built."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        for name in ATTRIBUTES:
            setattr(self, name, Unusable())


class OnTheClass(Trainer):
    """Has its attributes on the class."""


class Defining(Trainer):
    """Defines methods, none of which is the Trainer's to call."""


class ReadOnly(Trainer):
    """Has properties that cannot be set, and fail when they are read."""


def _fail(self: Any, *_: Any, **__: Any) -> Any:
    raise AssertionError("called")


for _name in ATTRIBUTES:
    setattr(OnTheClass, _name, Unusable())
    setattr(ReadOnly, _name, property(_fail))
for _name in METHODS:
    setattr(Defining, _name, _fail)


def _trained(folder: Path, cls: type[Trainer]) -> tuple[list[torch.Tensor], list[float]]:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    given |= {"gradient_accumulation_steps": 2, "report_to": "jsonl"}
    torch.manual_seed(0)
    one = trainer(folder, ROWS, cls=cls, model=Classifier(), eval_dataset=ROWS, **given)
    one.train()
    losses = [one.predict(ROWS).metrics or {}, one.evaluate()]
    one.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    one.save_model(str(folder / "model"))
    assert one.accelerator.prepare(one.model) is one.model
    if cls in (Before, After):
        assert all(isinstance(getattr(one, name), Unusable) for name in ATTRIBUTES)
    weights = [each.detach() for each in one.model.parameters()]
    return weights, [value for each in losses for name, value in each.items() if name.endswith("_loss")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], list[float]]:
    return _trained(tmp_path_factory.mktemp("plain"), Trainer)


@pytest.mark.parametrize("cls", [Before, After, OnTheClass, Defining, ReadOnly])
def test_a_subclass_with_names_of_its_own_trains_as_without(cls: type[Trainer], plain: Any, tmp_path: Path) -> None:
    weights, losses = _trained(tmp_path, cls)
    assert losses == plain[1]
    assert all(torch.equal(one, other) for one, other in zip(weights, plain[0], strict=True))
