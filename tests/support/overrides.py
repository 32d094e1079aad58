"""A Trainer whose every overridable method notes that it was called, and a run that should call them all."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import EarlyStoppingCallback, Trainer

ROWS = classification_rows(12)
SURFACE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "trainer_methods.json").read_text())


class Unusable:
    """Not callable, not a number, not comparable, not true or false: any use of it fails."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise AssertionError("used")


def spied(called: set[str], names: list[str]) -> type[Trainer]:
    """Build a subclass that overrides each of `names` with a method that records its name and calls the Trainer's."""

    def spying(name: str, method: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        return staticmethod(spy) if isinstance(inspect.getattr_static(Trainer, name), staticmethod) else spy

    made: Any = type("Spied", (Trainer,), {name: spying(name, getattr(Trainer, name)) for name in names})
    return made  # type: ignore[no-any-return]


def exercise(folder: str) -> list[str]:
    """Train, resume, evaluate, predict, save, publish and report; the names of the overridden methods that were called
    without being called from here."""
    from datasets import Dataset

    called: set[str] = set()
    columns = {"x": [row["x"].tolist() for row in ROWS], "labels": [row["labels"] for row in ROWS], "n": [0] * 12}
    rows = Dataset.from_dict(columns).with_format("torch")
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "load_best_model_at_end": True, "max_steps": 2}
    given |= {"push_to_hub": True, "hub_model_id": Path(folder, "hub").as_uri(), "hub_strategy": "end"}
    one: Trainer = trainer(
        Path(folder, "out"),
        rows,
        cls=spied(called, SURFACE["called"]),
        eval_dataset=rows,
        model_init=Classifier,
        use_legacy_prediction_loop=True,
        include_num_input_tokens_seen="all",
        compute_metrics=lambda p: {"rows": float(len(p.predictions))},
        **given,
    )
    one.add_callback(EarlyStoppingCallback(5))
    one.train(resume_from_checkpoint="auto")
    one.train(resume_from_checkpoint=str(Path(folder, "out", "checkpoint-1")))
    one.predict(rows)
    one.predict(ROWS)
    one.save_model(str(Path(folder, "model")))
    one.save_state()
    one.log_metrics("train", {"loss": 1.0})
    one.save_metrics("train", {"loss": 1.0})
    return sorted(called)
