"""Overrides of a subclass: the arguments that they take (subclasses of five years have five ages of signatures), and
methods of the transformers Trainer whose override has no effect here.

A subclass with one of the latter is refused when it is built, because ignoring its override would train something else.
Some of them can be called all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name; empty when the signature cannot be read, as for some builtins."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` accepts the keyword `name`, by name or through ``**kwargs``."""
    parameters = parameters_of(function)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def keep_taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that `function` accepts."""
    return {name: value for name, value in given.items() if takes(function, name)}


def takes_positionals(function: Callable[..., Any], count: int) -> bool:
    """Whether a (bound) function accepts that many positional arguments."""
    kinds = [parameter.kind for parameter in parameters_of(function).values()]
    # Counted, not named: an override may give its parameters other names.
    places = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return places >= count or inspect.Parameter.VAR_POSITIONAL in kinds


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether `model_init` takes a search's trial: its first parameter has no default, or is named so."""
    first = next(iter(parameters_of(model_init).values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD, first.VAR_POSITIONAL):
        return False
    return first.default is first.empty or first.name == "trial"


class Signatures:
    """The arguments that the methods of one Trainer take, read before every run and not at every step."""

    def __init__(self, trainer: Trainer, defaults: Mapping[str, Any]) -> None:
        func = trainer.compute_loss_func
        func = getattr(func, "forward", func)  # a module's `__call__` takes anything
        # The names of `defaults`, the library's own functions, that a subclass or the instance replaces.
        self.overridden = frozenset(name for name, own in defaults.items() if _function(trainer, name) is not own)
        modules = (getattr(_function(trainer, name), "__module__", "") for name in ("compute_loss", "prediction_step"))
        self.prediction_is_default = all(str(module).startswith("trainer_lib.") for module in modules)
        self.compute_loss_takes_items = takes(trainer.compute_loss, "num_items_in_batch")
        self.compute_loss_takes_outputs = takes(trainer.compute_loss, "return_outputs")
        self.training_step_takes_items = takes_positionals(trainer.training_step, 3)
        self.loss_func_takes_items = func is not None and takes(func, "num_items_in_batch")
        self.samples_take_device = takes_positionals(trainer.get_batch_samples, 3)
        # 7 since transformers 4.46, 6 (without the start time) since 4.38, 5 (without the gradient norm) before.
        report = trainer._maybe_log_save_evaluate
        # How many of the newest seven positional arguments `_maybe_log_save_evaluate` takes.
        self.report_takes = next((count for count in (7, 6, 5) if takes_positionals(report, count)), 7)
        self.report_takes_rate = takes(report, "learning_rate")


def _function(trainer: object, name: str) -> Any:
    found = getattr(trainer, name, None)
    return getattr(found, "__func__", found)


_SIZES = "Remove it: no layer is split over processes."
_LOADED = "Override _load_from_checkpoint for the weights, or _load_optimizer_and_scheduler."
_BEGIN = "Use a callback's on_train_begin, or override training_step, create_optimizer or get_train_dataloader."
_ROTATION = "Set save_total_limit, or remove checkpoints in a callback's on_save."
_METRICS = "Override evaluation_loop, or give preprocess_logits_for_metrics."
_NOISE = "Set neftune_noise_alpha, or put a forward hook on the embedding yourself."

#: Method -> what to do instead.
UNCALLED: Mapping[str, str] = {
    "_build_accelerator_args": "Set accelerator_config and the ddp_* arguments, of which the accelerator is made.",
    "_defer_fsdp_gradient_reduction": _SIZES,
    "_has_mixed_mesh_grads": _SIZES,
    "_mixed_mesh_grad_norm": _SIZES,
    "_prepare_context_parallel_inputs": _SIZES,
    "_sync_replicated_trainable_parameters": _SIZES,
    "get_cp_size": _SIZES,
    "get_sp_size": _SIZES,
    "get_tp_size": _SIZES,
    "_finish_current_push": "Override push_to_hub; training ends when the push under way has.",
    "_tune_save_checkpoint": "Override _save_checkpoint; Ray Tune keeps a pointer to our checkpoints.",
    "_init_training_state": _BEGIN,
    "_prepare_for_training": _BEGIN,
    "_run_epoch": "Use a callback's on_epoch_begin and on_epoch_end, or override training_step.",
    "_update_auto_batch_size": "Set auto_find_batch_size, which keeps the global batch.",
    "_issue_warnings_after_load": _LOADED,
    "_load_callback_state": "Make the callback an ExportableState: its state is saved and restored.",
    # Of earlier Trainers of the reference.
    "_activate_neftune": _NOISE,
    "_deactivate_neftune": _NOISE,
    "_align_special_tokens": "Set the tokens in the model's configuration before you build the Trainer.",
    "_fsdp_qlora_plugin_updates": 'Remove it: fsdp="full_shard auto_wrap" wraps adapters and quantised layers.',
    "_gather_and_numpify": _METRICS,
    "_is_attention_mask_causal": _SIZES,
    "_load_state_dict_in_model": "Override _load_from_checkpoint.",
    "_nested_gather": _METRICS,
    "_pad_across_processes": _METRICS,
    "_rotate_checkpoints": _ROTATION,
    "_save_tpu": "Override _save.",
    "_sorted_checkpoints": _ROTATION,
    "compare_trainer_and_checkpoint_args": "Remove it: differences are logged when training resumes.",
    "ipex_optimize_model": "Optimize the model before you build the Trainer.",
    "propagate_args_to_deepspeed": "Remove it: the arguments fill the DeepSpeed configuration in.",
    "torch_jit_model_eval": "Give a scripted model, or set torch_compile=True.",
}
#: Methods of the table that exist nevertheless: code may call them.
CALLABLE = frozenset(
    {
        *("get_cp_size", "get_sp_size", "get_tp_size", "_finish_current_push", "_nested_gather", "_rotate_checkpoints"),
        *("_activate_neftune", "_deactivate_neftune", "_issue_warnings_after_load", "_load_callback_state"),
        *("_defer_fsdp_gradient_reduction", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm"),
        *("_prepare_context_parallel_inputs", "_sync_replicated_trainable_parameters"),
    }
)

_LOOP = "_inner_training_loop"


def refuse_uncalled(cls: type, uncalled: Mapping[str, str] = UNCALLED) -> None:
    """Raise ConfigError for a class that overrides a method which is never called, or replaces the training loop."""
    for owner in own_classes(cls):
        for name in uncalled.keys() & vars(owner).keys():
            what = "The class overrides a method that this Trainer does not call."
            raise ConfigError(what, field=f"{owner.__name__}.{name}", remedy=uncalled[name])
        if _LOOP in vars(owner) and not _may_read(vars(owner)[_LOOP], _LOOP):
            what = "The class replaces the training loop, so nothing of this Trainer's would train."
            methods = "training_step, get_batch_samples or get_train_dataloader"
            remedy = f"Call super().{_LOOP}(...) in it, or override {methods}."
            raise ConfigError(what, field=f"{owner.__name__}.{_LOOP}", remedy=remedy)


def _may_read(function: Any, attribute: str) -> bool:
    """Whether a function reads an attribute of this name; True where its code does not show it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    # A decorator calls the function that it wraps; a closure may hold the original method.
    return code is None or attribute in code.co_names or bool(code.co_freevars and "__class__" not in code.co_freevars)


def own_classes(cls: type) -> Iterable[type]:
    """The classes of a Trainer that are not the library's, the most derived first."""
    # Mixins in between are the user's as well.
    return (base for base in cls.__mro__ if base is not object and not base.__module__.startswith("trainer_lib."))


def is_set(trainer: object, name: str) -> bool:
    """Whether a subclass gave an attribute of the Trainer a value."""
    return name in vars(trainer) or any(name in vars(owner) for owner in own_classes(type(trainer)))
