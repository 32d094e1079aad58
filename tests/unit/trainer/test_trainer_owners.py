"""Every attribute of a Trainer has one writer, and it has few names beyond the reference's."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.overrides import Unusable
from tests.support.repository import relative, sources, tree
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import Seq2SeqTrainer, Trainer, TrainerCallback

ROWS = classification_rows(12)
NAMES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "reference_trainer_names.json").read_text())
MOST_METHODS, MOST_ATTRIBUTES = 15, 10
PREFIX = "_trainflow"

#: Attribute of a Trainer -> the one class that writes it.
OWNERS: dict[str, str] = {
    **dict.fromkeys(("_trainflow", "args", "_memory_tracker", "model_init", "processing_class"), "Trainer"),
    **dict.fromkeys(("train_dataset", "eval_dataset", "data_collator", "compute_loss_func"), "Trainer"),
    **dict.fromkeys(("compute_metrics", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"), "Trainer"),
    **dict.fromkeys(("model", "label_names", "can_return_loss", "label_smoother"), "TrainedModel"),
    **dict.fromkeys(("is_model_parallel", "place_model_on_device"), "TrainedModel"),
    **dict.fromkeys(("model_wrapped", "optimizer", "lr_scheduler"), "Engine"),
    **dict.fromkeys(("callback_handler", "state", "control"), "Events"),
    **dict.fromkeys(("is_in_train", "current_gradient_accumulation_steps"), "TrainingLoop"),
    **dict.fromkeys(("hp_name", "hp_space", "compute_objective", "hp_search_backend"), "TrialRunner"),
    **dict.fromkeys(("objective", "_trial"), "TrialRunner"),
    "current_flos": "Counters",
    "_signature_columns": "Loaders",
    "hub_model_id": "SavingMethods",
}
#: search/trainer_parts.py sends a Trainer to a process of Ray: while its parts are pickled it is a reference, and there
#: what a subclass had set is put back. Neither is an attribute of ours.
SENT = {("__reduce_ex__", "a function"), ("vars()", "a function")}
#: Attribute of the collaborators' table -> the one class that writes it after it was built.
INTERNAL_OWNERS = {
    "world": "Trainer",
    "facts": "TrainedModel",
    **dict.fromkeys(("run", "stop"), "TrainingLoop"),
}
TRAINERS = {"self._trainer", "trainer"}
TABLES = {"self._internals", "internals", "self._trainflow", "trainer._trainflow"}


def _classes() -> Iterator[ast.ClassDef | ast.Module]:
    for path in sources("trainer_lib"):
        if relative(path).startswith(("trainer_lib/trainer/", "trainer_lib/hub/", "trainer_lib/search/")):
            module = tree(path)
            own = [node for node in module.body if isinstance(node, ast.ClassDef)]
            yield from own
            yield ast.Module([node for node in module.body if node not in own], [])


def _writes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(object, attribute) of everything that is assigned."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del):
            yield ast.unparse(each.value), each.attr
        if isinstance(each, ast.Call) and ast.unparse(each.func) in ("setattr", "delattr", "vars"):
            yield ast.unparse(each.args[0]), f"{ast.unparse(each.func)}()"


def _is_trainer(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and (node.name == "Trainer" or "TrainerBase" in map(ast.unparse, node.bases))


def _writers(objects: set[str], *, of_trainer: bool) -> set[tuple[str, str]]:
    found = set()
    for node in _classes():
        own = objects | {"self"} if of_trainer and _is_trainer(node) else objects
        name = node.name if isinstance(node, ast.ClassDef) else "a function"
        found |= {(attribute, name) for target, attribute in _writes(node) if target in own}
    return found


def test_every_attribute_of_a_trainer_has_the_one_writer_that_the_table_names() -> None:
    assert _writers(TRAINERS, of_trainer=True) == set(OWNERS.items()) | SENT


def test_every_collaborator_that_is_replaced_has_one_writer() -> None:
    assert _writers(TABLES, of_trainer=False) == set(INTERNAL_OWNERS.items())


def test_a_second_writer_would_be_found() -> None:
    node = ast.parse(
        "class Other:\n def do(self, trainer):\n  trainer.state, self.x = 1, 2\n  setattr(trainer, 'y', 1)"
    )
    assert set(_writes(node)) == {("trainer", "state"), ("self", "x"), ("trainer", "setattr()")}


def test_a_constructed_and_a_training_trainer_have_no_attribute_without_an_owner(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        seen: set[str] = set()  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seen |= set(vars(one))

    one = trainer(tmp_path, ROWS, eval_dataset=ROWS, callbacks=[Look()], max_steps=2, eval_strategy="epoch")
    constructed = set(vars(one))
    one.train()
    one.predict(ROWS)
    assert constructed <= set(OWNERS) and Look.seen <= set(OWNERS) and set(vars(one)) <= set(OWNERS)


def _public(cls: type) -> set[str]:
    return {name for each in cls.__mro__ if each is not object for name in vars(each) if not name.startswith("__")}


@pytest.mark.parametrize("cls", [Trainer, Seq2SeqTrainer])
def test_few_names_beyond_the_references_are_on_a_trainer(cls: type) -> None:
    reference = {*NAMES["Trainer"], *NAMES[cls.__name__]}
    ours = _public(cls) - reference
    assert len(ours) <= MOST_METHODS
    # Of earlier Trainers of the reference.
    older = {"tokenizer", "num_tokens", "prediction_loop", "init_git_repo", "_nested_gather", "is_tp_enabled"}
    older |= {"_activate_neftune", "_deactivate_neftune", "_rotate_checkpoints"}
    assert {name for name in ours if not name.startswith(PREFIX)} <= older
    attributes = set(OWNERS) - reference
    assert len(attributes) <= MOST_ATTRIBUTES and all(name.startswith(PREFIX) for name in attributes)


def test_the_recorded_names_are_those_of_the_reference() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != NAMES["transformers"]:
        pytest.skip(f"recorded from {NAMES['transformers']}")
    for name in ("Trainer", "Seq2SeqTrainer"):
        cls = getattr(transformers, name)
        found = _public(cls)
        for each in cls.__mro__[:-1]:
            source = ast.parse(textwrap.dedent(inspect.getsource(each)))
            found |= {attribute for target, attribute in _writes(source) if target == "self"}
        assert sorted(found) == NAMES[name]


# -------------------------------------------------------------------------------------------------- names of subclasses
#: What subclasses in the wild call their own attributes; names of this library's past among them.
TAKEN = (
    *("_step", "_forward", "strategy", "device", "precision", "comm", "_log", "_metrics", "loss", "tokenizer", "_run"),
    *("_stop", "data", "mode", "_past", "_saver", "_disk", "_held", "_begin", "_report", "_snapshot", "_labels", "run"),
    *("_called", "_length", "_lengths", "_hub", "_resume", "_read", "_prepared", "_publish", "_attempt", "_request"),
    *("_frozen", "_caches", "_pushes", "_batching", "_exchanges", "_usable", "_signature", "engine", "loop", "events"),
    *("world", "world_size", "rank", "checkpoints", "scaler", "epoch", "global_step", "grad_norm", "ref_model", "beta"),
    *("_stored_metrics", "_tag_names", "running_loss", "callbacks", "metrics", "step", "forward", "publisher", "facts"),
    *("is_fsdp_enabled", "is_deepspeed_enabled", "deepspeed", "_is_vlm", "padding_value", "max_length", "dataset"),
)


class Before(Trainer):
    """Sets its own attributes before the Trainer is built."""

    def __init__(self, *given: Any, **more: Any) -> None:
        _take_names(self)
        super().__init__(*given, **more)


class After(Trainer):
    """Sets its own attributes after the Trainer is built."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        _take_names(self)


class OnTheClass(Trainer):
    """Has its own attributes on the class."""


def _take_names(target: Any) -> None:
    for name in TAKEN:
        setattr(target, name, Unusable())
    target._signature_columns = ["x", "labels"]


_take_names(OnTheClass)


def _trained(folder: Path, cls: type[Trainer]) -> tuple[list[torch.Tensor], dict[str, float]]:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    torch.manual_seed(0)
    one = trainer(folder, ROWS, cls=cls, model=Classifier(), eval_dataset=ROWS, gradient_accumulation_steps=2, **given)
    one.train()
    metrics = one.predict(ROWS).metrics or {}
    one.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert cls is Trainer or all(isinstance(getattr(one, name), Unusable) for name in TAKEN)
    return [each.detach() for each in one.model.parameters()], {"loss": metrics["test_loss"]}


@pytest.mark.parametrize("cls", [Before, After, OnTheClass])
def test_a_subclass_may_use_any_of_these_names_for_itself(cls: type[Trainer], tmp_path: Path) -> None:
    weights, metrics = _trained(tmp_path / "mine", cls)
    wanted, wanted_metrics = _trained(tmp_path / "plain", Trainer)
    assert metrics == wanted_metrics
    assert all(torch.equal(one, other) for one, other in zip(weights, wanted, strict=True))


# ------------------------------------------------------------------------------------------------------------ arguments
def test_nothing_sets_a_field_of_the_users_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    one = trainer(tmp_path, ROWS, max_steps=1)
    given = copy.copy(one.args)
    given.gradient_accumulation_steps = 1
    before = copy.deepcopy(vars(given))
    other = Trainer(Classifier(), given, train_dataset=ROWS)
    other.train()
    assert vars(given) == before
    assert other.args.gradient_accumulation_steps == 2
