"""Every name of the reference's Trainer, public or private: served, called, refused by name, or inside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.overrides import SURFACE
from tests.support.toys import TokenModel, classification_rows, token_rows
from tests.support.training import trainer
from trainer_lib import Seq2SeqTrainer, Trainer
from trainer_lib.trainer.overrides import CALLABLE, UNCALLED

ROWS = classification_rows(8)
NAMES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "reference_trainer_names.json").read_text())

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
    **dict.fromkeys(
        ("is_fsdp_enabled", "is_deepspeed_enabled", "is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled"), False
    ),
    **dict.fromkeys(("is_fsdp_xla_v2_enabled", "is_distributed_loading_by_transformers", "is_tp_enabled"), False),
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


def test_a_method_of_the_reference_is_called_by_a_run_or_by_users_or_refused() -> None:
    methods = {name for name in SURFACE["called"] if name in NAMES["Trainer"]}
    assert not methods & UNCALLED.keys()
    assert UNCALLED.keys() >= CALLABLE


def test_every_attribute_can_be_read_on_a_new_trainer(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    for name in NAMES["Trainer"]:
        if name not in INSIDE and name not in IN_A_RUN and (name not in UNCALLED or name in CALLABLE):
            getattr(one, name)
    for name, value in VALUES.items():
        assert getattr(one, name) == value, name
    for name in INSIDE:
        assert not hasattr(one, name)


def test_sizes_of_parallel_layers_are_one(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    assert (one.get_tp_size(), one.get_cp_size(), one.get_sp_size()) == (1, 1, 1)
    assert one.gather_function(one._tr_loss) == 0


def test_nothing_is_pushed_and_nothing_is_waited_for(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, push_to_hub=True, hub_model_id=(tmp_path / "hub").as_uri(), max_steps=1)
    assert one.push_in_progress is None
    one._finish_current_push()
    one.train()
    pushes: Any = one.push_in_progress
    assert pushes.is_done()


def test_private_methods_that_libraries_call_do_what_their_callers_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_weights_that_a_model_leaves_out_of_its_files_are_tied_again_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize("name", sorted({*VALUES, *INSIDE}))
def test_a_subclass_may_set_the_attribute_before_and_after_the_trainer_is_built(name: str, tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            setattr(self, name, None)
            super().__init__(*given, **more)
            setattr(self, name, getattr(self, name))

    trainer(tmp_path, ROWS, cls=Mine)
