"""One pattern of user code, run on transformers' Trainer and on ours; what both end with is compared."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import trainer_lib
from tests.support.toys import Classifier, classification_rows

ROWS = classification_rows(16)
TOLERANCE = 1e-5
#: What a clock measures, and what the reference adds for a model that it prepares.
_UNEQUAL = ("runtime", "per_second", "preparation_time", "total_flos")
#: After a resume, the reference reports the mean loss of the resumed part alone.
RESUMED = "train_loss"
EVALUATES: dict[str, Any] = {"eval_dataset": ROWS[:12], "eval_strategy": "steps", "eval_steps": 2}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
#: A pattern: it defines its classes on `make.lib` (transformers or trainer_lib) and returns a Trainer.
Pattern = Callable[["Make"], Any]

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class Either(_Base):  # type: ignore[misc]
    """Base of what a pattern overrides: the Trainer of either library follows in the order of resolution."""

    seen: list[Any] = []  # noqa: RUF012
    if TYPE_CHECKING:
        compute_metrics: Any
        control: Any
        data_collator: Any
        gather_function: Any
        lr_scheduler: Any
        optimizer: Any
        _globalstep_last_logged: Any


class Small(Classifier):
    """A classifier without dropout, with the configuration that the reference reads."""

    def __init__(self, features: int = 6) -> None:
        super().__init__(dropout=0.0, features=features)


class Make:
    """What a pattern builds its Trainer with: one of the libraries, and defaults for everything else."""

    def __init__(self, lib: Any, folder: Path) -> None:
        self.lib = lib
        self.folder = folder

    def args(self, cls: Any = None, **settings: Any) -> Any:
        """Arguments of a short, quiet run in sequential order."""
        given: dict[str, Any] = {"output_dir": str(self.folder), "use_cpu": True, "report_to": "none"}
        given |= {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 3}
        given |= {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
        given |= {"train_sampling_strategy": "sequential", **settings}
        return (cls or self.lib.TrainingArguments)(**given)

    def callback(self, **events: Any) -> Any:
        """A callback with these functions as its events; each takes (args, state, control, **kwargs)."""
        methods = {name: staticmethod(function) for name, function in events.items()}
        return type("Mine", (self.lib.TrainerCallback,), methods)()

    def __call__(self, cls: Any = None, *, model: nn.Module | None = None, args: Any = None, **given: Any) -> Any:
        """A Trainer of a class of the library, or on `Either`, from keywords of its constructor and its arguments."""
        cls = cls or self.lib.Trainer
        if not issubclass(cls, self.lib.Trainer):
            cls = type(cls.__name__, (cls, self.lib.Trainer), {})
        parts = {name: given.pop(name) for name in (*_PARTS, *getattr(cls, "takes", ())) if name in given}
        parts.setdefault("train_dataset", ROWS)
        torch.manual_seed(0)
        return cls(model or Small(), args or self.args(**given), **parts)


class Case(NamedTuple):
    """A pattern, and what runs on the reference for a pattern of an age that it does not serve any more."""

    pattern: Pattern
    reference: Pattern | None = None


class Table(dict[str, Case]):
    def add(self, pattern: Pattern) -> Pattern:
        self[pattern.__name__] = Case(pattern)
        return pattern

    def of(self, reference: Pattern | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Decorate a class on `Either`, which is trained with these settings."""

        def add(cls: Any) -> Any:
            self[cls.__name__] = Case(lambda make: make(cls, **settings), reference)
            return cls

        return add


_PARTS = (
    *("train_dataset", "eval_dataset", "data_collator", "compute_metrics", "callbacks", "optimizers"),
    *("compute_loss_func", "preprocess_logits_for_metrics", "processing_class", "optimizer_cls_and_kwargs"),
)


def outcome(pattern: Pattern, lib: Any, folder: Path) -> dict[str, Any]:
    """Run a pattern: the weights it ends with, what it logged, and what it noted in `seen`."""
    torch.manual_seed(0)
    one = pattern(Make(lib, folder))
    if one.state.global_step == 0:
        one.train()
    left_out = getattr(one, "leaves_out", ())
    return {
        "weights": {name: value.detach().clone() for name, value in one.model.state_dict().items()},
        "logs": [
            {name: value for name, value in entry.items() if not name.endswith(_UNEQUAL) and name not in left_out}
            for entry in one.state.log_history
        ],
        "seen": copy.copy(getattr(one, "seen", [])),
        "step": one.state.global_step,
    }


@contextlib.contextmanager
def _in_a_hurry() -> Iterator[None]:
    """One thread for tiny tensors; the reference collects garbage at every start, which is all of the test run here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


class Bounds(NamedTuple):
    """How far two outcomes may be apart: their numbers, relative and absolute, and their weights."""

    rel: float = 1e-4
    abs: float = TOLERANCE
    weights: float = TOLERANCE


USUAL = Bounds()


def assert_same(case: Case, folder: Path, bounds: Bounds = USUAL) -> None:
    """Run a pattern on both libraries and compare: weights and numbers within bounds, names and order exactly."""
    transformers = pytest.importorskip("transformers")
    with _in_a_hurry():
        theirs = outcome(case.reference or case.pattern, transformers, folder / "theirs")
        ours = outcome(case.pattern, trainer_lib, folder / "ours")
    compare(ours, theirs, bounds)


def compare(ours: dict[str, Any], theirs: dict[str, Any], bounds: Bounds = USUAL) -> None:
    assert ours["step"] == theirs["step"]
    assert [sorted(entry) for entry in ours["logs"]] == [sorted(entry) for entry in theirs["logs"]]
    for one, other in zip(ours["logs"], theirs["logs"], strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=bounds.rel, abs=bounds.abs), f"{name}: {one} and {other}"
    numbers = bool(theirs["seen"]) and all(isinstance(each, int | float) for each in theirs["seen"])
    assert ours["seen"] == (pytest.approx(theirs["seen"], abs=TOLERANCE) if numbers else theirs["seen"])
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        assert torch.allclose(ours["weights"][name], value, atol=bounds.weights), name
        assert math.isfinite(float(value.float().sum()))
