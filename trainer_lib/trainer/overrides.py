"""Methods of the transformers Trainer without a counterpart here: an override would never be called.

A subclass that has one is refused when it is built, because ignoring its override would train something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_lib.errors import ConfigError

_SIZES = "Remove it: no layer is split over processes."
_STATE = "Override _save_checkpoint; what it writes is listed in trainer_lib/trainer/snapshots.py."
_LOADED = "Override _load_from_checkpoint for the weights; all other state is restored as a whole."
_BEGIN = "Use a callback's on_train_begin, or override training_step, create_optimizer or get_train_dataloader."

#: Method -> what to do instead.
UNCALLED: Mapping[str, str] = {
    "_build_accelerator_args": "Set accelerator_config and the ddp_* arguments: no Accelerator is built.",
    "create_accelerator_and_postprocess": "Set accelerator_config and the ddp_* arguments: no Accelerator is built.",
    "_defer_fsdp_gradient_reduction": _SIZES,
    "_has_mixed_mesh_grads": _SIZES,
    "_mixed_mesh_grad_norm": _SIZES,
    "_prepare_context_parallel_inputs": _SIZES,
    "_sync_replicated_trainable_parameters": _SIZES,
    "get_cp_size": _SIZES,
    "get_sp_size": _SIZES,
    "get_tp_size": _SIZES,
    "_finish_current_push": "Override push_to_hub; training ends when the push under way has.",
    "_get_dataloader": "Override get_train_dataloader, get_eval_dataloader or get_test_dataloader.",
    "_get_grad_norm": "Override _clip_grad_norm, which gives the norm that is logged.",
    "_hp_search_setup": "Override call_model_init, or give hp_space to hyperparameter_search.",
    "_tune_save_checkpoint": "Override _save_checkpoint; trials are Optuna's, not Ray's.",
    "_init_training_state": _BEGIN,
    "_prepare_for_training": _BEGIN,
    "_run_epoch": "Use a callback's on_epoch_begin and on_epoch_end, or override training_step.",
    "_validate_args": "Override TrainingArguments.validate.",
    "set_initial_training_values": "Override get_train_dataloader and get_total_train_batch_size, or set max_steps.",
    "_update_auto_batch_size": "Set auto_find_batch_size, which keeps the global batch.",
    "_issue_warnings_after_load": _LOADED,
    "_load_optimizer_and_scheduler": _LOADED,
    "_load_rng_state": _LOADED,
    "_load_scaler": _LOADED,
    "_load_callback_state": "Make the callback an ExportableState: its state is saved and restored.",
    "_save_optimizer_and_scheduler": _STATE,
    "_save_rng_state": _STATE,
    "_save_scaler": _STATE,
}


def refuse_uncalled(cls: type) -> None:
    """Raise ConfigError for a class that overrides a method which is never called."""
    for each in _own_classes(cls):
        for name in UNCALLED.keys() & vars(each).keys():
            raise ConfigError(
                "The class overrides a method that this Trainer does not have.",
                field=f"{each.__name__}.{name}",
                remedy=UNCALLED[name],
            )


def _own_classes(cls: type) -> Iterable[type]:
    # Mixins in between are the user's as well.
    return (each for each in cls.__mro__ if each is not object and not each.__module__.startswith("trainer_lib."))
