"""Names: each of the reference's has its account, an attribute has one writer, and a subclass may use any other."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.overrides import Unusable
from tests.support.repository import relative, sources, tree
from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import trained, trainer
from trainer_lib import Seq2SeqTrainer, Trainer, TrainerCallback
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.accelerator.trainer_accelerator import REFUSED, TrainerAccelerator
from trainer_lib.trainer.overrides import CALLABLE, UNCALLED

ROWS = classification_rows(12)
DATA = Path(__file__).parents[2] / "data"
NAMES: dict[str, Any] = json.loads((DATA / "reference_trainer_names.json").read_text())
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
    "_signature_columns": "DataMethods",
    "hub_model_id": "SavingMethods",
}
#: search/trial_process.py sends a Trainer to a process of Ray: while its parts are pickled it is a reference, and there
#: what a subclass had set is put back. Neither is an attribute of ours.
SENT = {("__reduce_ex__", "a function"), ("vars()", "a function")}
#: Of a Seq2SeqTrainer alone.
GENERATES = {("_gen_kwargs", "Generation")}
#: Attribute of the collaborators' table -> the one class that writes it after it was built.
INTERNAL_OWNERS = {"world": "Trainer", "facts": "TrainedModel", **dict.fromkeys(("run", "stop"), "TrainingLoop")}
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
    return isinstance(node, ast.ClassDef) and (node.name == "Trainer" or node.name.endswith("Methods"))


def _writers(objects: set[str], *, of_trainer: bool) -> set[tuple[str, str]]:
    found = set()
    for node in _classes():
        own = objects | {"self"} if of_trainer and _is_trainer(node) else objects
        name = node.name if isinstance(node, ast.ClassDef) else "a function"
        found |= {(attribute, name) for target, attribute in _writes(node) if target in own}
    return found


def test_every_attribute_and_every_collaborator_that_is_replaced_has_the_one_writer_that_a_table_names() -> None:
    assert _writers(TRAINERS, of_trainer=True) == set(OWNERS.items()) | SENT | GENERATES
    assert _writers(TABLES, of_trainer=False) == set(INTERNAL_OWNERS.items())


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


# ------------------------------------------------------------------------------------------------------------ arguments
def test_nothing_sets_a_field_of_the_users_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    given = copy.copy(trainer(tmp_path, ROWS, max_steps=1).args)
    given.gradient_accumulation_steps = 1
    before = copy.deepcopy(vars(given))
    other = Trainer(Classifier(), given, train_dataset=ROWS)
    other.train()
    assert vars(given) == before
    assert other.args.gradient_accumulation_steps == 2


#: State of the reference's own bodies. Nothing here has that meaning; a subclass may use the name for itself.
INSIDE = {
    "_attn_mask_causal_checked": "context parallelism is not served",
    "_eval_dataloaders": "the loaders that are kept belong to the collaborator that makes them",
    "_loggers_initialized": "trackers are set up by their callbacks",
    "_mixed_mesh_grads": "gradients on several meshes are not served",
    "model_preparation_time": "evaluation does not prepare the model",
    "neftune_hook_handle": "the hook is removed when training ends, whatever ends it",
}
#: Attributes that are set while something runs.
IN_A_RUN = {"objective", "compute_objective", "hp_space"}
#: Attribute -> its value on a new Trainer.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("is_fsdp_enabled", "is_deepspeed_enabled", "is_fsdp_xla_enabled"), False),
    **dict.fromkeys(("is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled", "is_tp_enabled"), False),
    "is_distributed_loading_by_transformers": False,
    **dict.fromkeys(("deepspeed", "neftune_noise_alpha", "push_in_progress", "loss_is_scaled_for_ga"), None),
    **dict.fromkeys(("_globalstep_last_logged", "_total_loss_scalar", "_tr_loss", "_initial_global_step"), 0),
    **dict.fromkeys(("_initial_num_input_tokens_seen", "current_flos"), 0),
    **dict.fromkeys(("model_accepts_loss_kwargs", "_created_lr_scheduler", "_loss_shifts_labels"), False),
    **dict.fromkeys(("is_in_train", "is_model_parallel", "can_return_loss"), False),
}


@pytest.mark.parametrize("cls", [Trainer, Seq2SeqTrainer])
def test_every_name_of_the_reference_is_accounted_for_once(cls: type) -> None:
    for name in NAMES[cls.__name__]:
        accounts = {
            "served": hasattr(cls, name) or name in getattr(cls, "__annotations__", {}) or _is_declared(cls, name),
            "refused": name in UNCALLED,
            "inside": name in INSIDE,
        }
        wanted = 2 if name in CALLABLE else 1
        assert sum(accounts.values()) == wanted, f"{name}: {accounts}"


def _is_declared(cls: type, name: str) -> bool:
    return any(name in getattr(each, "__annotations__", {}) for each in cls.__mro__)


def test_every_attribute_can_be_read_on_a_new_trainer(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    for name in NAMES["Trainer"]:
        if name not in INSIDE and name not in IN_A_RUN and (name not in UNCALLED or name in CALLABLE):
            getattr(one, name)
    for name, value in VALUES.items():
        assert getattr(one, name) == value, name
    for name in INSIDE:
        assert not hasattr(one, name)
    assert (one.get_tp_size(), one.get_cp_size(), one.get_sp_size()) == (1, 1, 1)
    assert one.gather_function(one._tr_loss) == 0


def test_nothing_is_pushed_and_nothing_is_waited_for(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, push_to_hub=True, hub_model_id=(tmp_path / "hub").as_uri(), max_steps=1)
    assert one.push_in_progress is None
    one._finish_current_push()
    one.train()
    pushes: Any = one.push_in_progress
    assert pushes.is_done()


def test_private_methods_do_what_libraries_need_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one: Any = trainer(tmp_path, ROWS)
    one.model.weight_of_a_head = torch.nn.Parameter(torch.zeros(2))
    result = one.model.load_state_dict({"other": torch.zeros(1)}, strict=False)
    with caplog.at_level("WARNING", logger="trainer_lib"):
        one._issue_warnings_after_load(result)
    missing, unexpected = [record.message for record in caplog.records]
    assert "weight_of_a_head" in missing and unexpected.endswith("the model lacks: ['other'].")
    context, batch = one._prepare_context_parallel_inputs(one.model, ROWS[0])
    with context(), one._defer_fsdp_gradient_reduction():
        assert batch is ROWS[0] and one._has_mixed_mesh_grads(one.model) is False
    for parameter in one.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in one.model.parameters())
    assert float(one._mixed_mesh_grad_norm(one.model, 1.0)) == pytest.approx(count**0.5)
    assert sum(float(p.grad.square().sum()) for p in one.model.parameters()) == pytest.approx(1, rel=1e-3)
    for nothing in (one._load_callback_state, one._rotate_checkpoints):
        assert nothing() is None
    assert one._rotate_checkpoints(use_mtime=True, output_dir="out") is None
    assert one._sync_replicated_trainable_parameters(one.model) is None


def test_weights_left_out_of_files_are_tied_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one: Any = trainer(tmp_path, ROWS)
    tied: list[int] = []
    one.model._keys_to_ignore_on_save, one.model.tie_weights = ["head"], lambda: tied.append(1)
    one._issue_warnings_after_load(SimpleNamespace(missing_keys=["head"], unexpected_keys=[]))
    assert tied == [1] and not caplog.records


def test_the_noise_of_neftune_is_put_on_once_and_taken_off(tmp_path: Path) -> None:
    one: Any = trainer(tmp_path, token_rows(8), model=TokenModel(), neftune_noise_alpha=5.0, max_steps=1)
    embedding = next(module for module in one.model.modules() if isinstance(module, torch.nn.Embedding))
    assert one._activate_neftune(one.model) is one.model
    one._activate_neftune(one.model)
    assert len(embedding._forward_hooks) == 1
    one._deactivate_neftune(one.model)
    assert not embedding._forward_hooks
    one.train()
    assert not embedding._forward_hooks


def test_a_subclass_may_set_the_attributes_before_and_after_the_trainer_is_built(tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            names = (*VALUES, *INSIDE, "tokenizer")
            for name in names:
                setattr(self, name, None)
            super().__init__(*given, **more)
            for name in names:
                setattr(self, name, getattr(self, name))

    trainer(tmp_path, ROWS, cls=Mine)


#: What the trainers of popular libraries set on themselves and define, collected from their sources (and, as "further",
#: what trainers of scripts usually have), without the names of the reference, which mean the same here.
FOUND: dict[str, Any] = json.loads((DATA / "subclass_names.json").read_text())
WORDS = FOUND["words"]  # that an engine, a loop or a module has as well
ATTRIBUTES = sorted({*FOUND["attributes"], *FOUND["further_attributes"], *WORDS})
METHODS = sorted({*FOUND["methods"], *FOUND["further_methods"], *WORDS})


def test_no_recorded_name_is_one_of_the_references_or_of_ours() -> None:
    assert not {*NAMES["Trainer"], *NAMES["Seq2SeqTrainer"]} & {*ATTRIBUTES, *METHODS}
    assert not [name for name in {*ATTRIBUTES, *METHODS} if hasattr(Seq2SeqTrainer, name)]
    assert len(FOUND["attributes"]) > 200 and len(FOUND["methods"]) > 100


class Before(Trainer):
    """Sets its attributes before the Trainer is built, and finds them afterwards."""

    def __init__(self, *given: Any, **more: Any) -> None:
        before = {name: Unusable() for name in ATTRIBUTES}
        vars(self).update(before)
        super().__init__(*given, **more)
        assert all(getattr(self, name) is value for name, value in before.items())


def _fail(self: Any, *_: Any, **__: Any) -> Any:
    raise AssertionError("called")


# Methods, none of which is the Trainer's to call; properties that cannot be set, and fail when they are read.
Defining: Any = type("Defining", (Trainer,), dict.fromkeys(METHODS, _fail))
ReadOnly: Any = type("ReadOnly", (Trainer,), dict.fromkeys(ATTRIBUTES, property(_fail)))


def _trained(folder: Path, cls: type[Trainer]) -> tuple[list[torch.Tensor], list[float]]:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    given |= {"gradient_accumulation_steps": 2, "report_to": "jsonl"}
    torch.manual_seed(0)
    one = trained(folder, ROWS, cls=cls, model=Classifier(), eval_dataset=ROWS, **given)
    losses = [one.predict(ROWS).metrics or {}, one.evaluate()]
    one.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    one.save_model(str(folder / "model"))
    assert one.accelerator.prepare(one.model) is one.model
    if cls is Before:
        assert all(isinstance(getattr(one, name), Unusable) for name in ATTRIBUTES)
    weights = [each.detach() for each in one.model.parameters()]
    return weights, [value for each in losses for name, value in each.items() if name.endswith("_loss")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], list[float]]:
    return _trained(tmp_path_factory.mktemp("plain"), Trainer)


@pytest.mark.parametrize("cls", [Before, Defining, ReadOnly])
def test_a_subclass_with_names_of_its_own_trains_as_without(cls: type[Trainer], plain: Any, tmp_path: Path) -> None:
    weights, losses = _trained(tmp_path, cls)
    assert losses == plain[1]
    assert all(torch.equal(one, other) for one, other in zip(weights, plain[0], strict=True))


#: Public members whose own code, in accelerate, asks only for what the Trainer has filled in.
INHERITED = {
    *("deepspeed_plugin", "multi_device", "distributed_type", "num_processes", "process_index", "device"),
    *("local_process_index", "is_last_process", "is_fsdp2", "is_composable_parallelism_enabled"),
    *("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"),
    *("use_stateful_dataloader", "project_dir", "logging_dir", "save_iteration", "parallelism_config"),
    *("sync_gradients", "gradient_accumulation_steps", "split_between_processes"),
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
    *("trigger_sync_in_backward", "join_uneven_inputs", "print", "set_trigger", "check_trigger"),
    *("save", "free_memory", "clear", "maybe_context_parallel", "profile", "skip_first_batches"),
    *("verify_device_map", "lomo_backward", "pad_across_processes"),
}


def test_every_public_member_of_accelerates_is_served_inherited_or_refused() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    theirs = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    own = {name for cls in TrainerAccelerator.__mro__ if "trainer_lib" in cls.__module__ for name in vars(cls)}
    served = own & theirs - REFUSED.keys()
    assert served | INHERITED | REFUSED.keys() == theirs
    assert not served & INHERITED and not INHERITED & REFUSED.keys()


def test_a_member_that_is_refused_names_the_way_out(tmp_path: Path) -> None:
    helper = trainer(tmp_path, ROWS).accelerator
    for name, remedy in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            getattr(helper, name)()
        assert caught.value.field == f"accelerator.{name}" and caught.value.remedy == remedy
