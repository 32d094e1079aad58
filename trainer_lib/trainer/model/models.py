"""Models of transformers and peft: their wrappers, their files, and which of their weights are trained.

Neither package is imported here: a model from one of them has imported it already, so it is in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import require_known, suggestion
from trainer_lib.distributed.precision import check_float8
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.strategies.recomputation import Recomputation, find_blocks
from trainer_lib.trainer.overrides import parameters_of

_ADAPTER_PARTS = ("modules_to_save", "token_adapter", "prompt_encoder")
"""Children under which peft keeps trained copies, besides those that its layers name in `adapter_layer_names`."""
_PROBED = 64  # values of each frozen tensor that its fingerprint looks at


# -- what a model is ---------------------------------------------------------------------------------------------------


def _is_a(model: object, package: str, name: str) -> bool:
    kind = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return isinstance(kind, type) and isinstance(model, kind)


def is_transformers(model: object) -> bool:
    """Whether a model is a `transformers.PreTrainedModel`."""
    # The module that defines it: the package itself would import it now, for seconds, although no model needs it.
    return _is_a(model, "transformers.modeling_utils", "PreTrainedModel")


def is_peft(model: object) -> bool:
    """Whether a model is a `peft.PeftModel`, a wrapper around a frozen model."""
    return _is_a(model, "peft", "PeftModel")


def is_adapted(model: object) -> bool:
    """Whether only peft adapters of a model are exported: it is a wrapper, or `add_adapter` was called on it."""
    return is_peft(model) or (is_transformers(model) and bool(getattr(model, "_hf_peft_config_loaded", False)))


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether peft puts trained tokens before the rows; those of prefix tuning are past keys instead."""
    wrapper: Any = getattr(model, "_orig_mod", model)
    config = wrapper.active_peft_config if is_peft(wrapper) else None
    kind = getattr(config, "peft_type", None)
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in ("PREFIX_TUNING", "CARTRIDGE")


def innermost(model: nn.Module) -> nn.Module:
    """The model whose forward computes, inside torch.compile's and peft's wrappers."""
    inner: Any = getattr(model, "_orig_mod", model)
    if is_peft(inner):
        inner = inner.get_base_model()
    elif _is_a(inner, "peft", "PeftMixedModel"):
        inner = inner.base_model.model
    return inner if isinstance(inner, nn.Module) else model


def is_placed(model: nn.Module) -> bool:
    """Whether the weights must stay on their devices: quantised by bitsandbytes, or offloaded to host or disk."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    method = getattr(model, "quantization_method", None)
    return bool(devices & {"cpu", "disk"}) or str(getattr(method, "value", method)) == "bitsandbytes"


def is_spread(model: nn.Module, device: torch.device) -> bool:
    """Whether the layers are on several devices, or on one that is not this process's."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"}
    if len(devices) != 1:
        return len(devices) > 1
    # "cuda" without an index is the first GPU.
    return _as_device(next(iter(devices))) != (device if device.index is not None else _as_device(0, device.type))


def _as_device(name: Any, kind: str = "cuda") -> torch.device:
    return torch.device(kind, name) if isinstance(name, int) else torch.device(name)


def keep_layout(model: nn.Module) -> None:
    """Keep 4-bit weights as they are in evaluation on a CPU.

    With AVX512-BF16 bitsandbytes packs them in another way for it. That rounds their scales, even when it is undone for
    a checkpoint, and the layers that stay packed pass no gradient on.
    """
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def set_compute_type(model: nn.Module, args: TrainingArguments) -> None:
    """Let 4-bit layers multiply in the type of the arguments, where their model asks for it by `computes_by_args`."""
    if not getattr(innermost(model), "computes_by_args", False):
        return
    wanted = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "compute_type_is_set"):
            layer.compute_dtype, layer.compute_type_is_set = wanted, True


def refuse_untrainable(model: nn.Module) -> None:
    """Raise ConfigError for a quantised model without adapters: it has nothing that can be trained."""
    if not getattr(model, "is_quantized", False) or is_adapted(model):
        return
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(quantizer, "is_qat_trainable", False):
        return
    what = "The model is quantised, and whole numbers have no gradient, so it cannot be trained."
    remedy = "Put adapters on top: peft.get_peft_model(model, LoraConfig(...))."
    raise ConfigError(what, field="model", value=type(model).__name__, remedy=remedy)


# -- what is saved of it -----------------------------------------------------------------------------------------------


def model_files(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The files next to the weights of a transformers or peft model that its `from_pretrained` needs, by path.

    ``config.json``, ``generation_config.json`` and custom code; of a model with adapters everything:
    ``adapter_config.json`` and ``adapter_model.safetensors`` (in a folder of its name for every adapter but "default").
    Empty for other models. `create_model_card` writes the card.

    Args:
        state: the model's weights, tensors ``[...]`` by name.
    """
    given: Any = model
    if is_adapted(model):
        files = folder_files(lambda folder: given.save_pretrained(folder, state_dict=dict(state)))
        return {
            name: _in_order(data) if Path(name).name == "adapter_config.json" else data
            for name, data in files.items()
            if name != "README.md"
        }
    return _transformers_files(given) if is_transformers(model) else {}


def _in_order(config: bytes) -> bytes:
    """The configuration of adapters, with the names that peft holds as a set, in another order in each process."""
    values: dict[str, Any] = parse_json(config)
    for name in ("target_modules", "exclude_modules"):
        if isinstance(values.get(name), list):
            values[name] = sorted(values[name])
    return json.dumps(values, indent=2, sort_keys=True).encode()


def _transformers_files(model: Any) -> dict[str, bytes]:
    # Not `save_pretrained`, which would write the weights as well.
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    files: dict[str, bytes] = {}
    if model.can_generate() and model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    if getattr(model, "_auto_class", None) is not None:  # registered by register_for_auto_class: its code goes along
        from transformers.dynamic_module_utils import custom_object_save

        files.update(folder_files(lambda folder: custom_object_save(model, folder, config=config)))
    files["config.json"] = config.to_json_string().encode()  # the line before notes in it where the code is
    return files


def folder_files(write: Callable[[str], Any]) -> dict[str, bytes]:
    """The files that `write(folder)` writes, as bytes by relative path."""
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        write(folder)
        paths = (path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def in_saving_order(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state`, tensors ``[...]`` by name, with copies of tied weights last.

    The first of several equal tensors is the one that is stored, and transformers expects the source of the tie there.
    """
    tied: Any = getattr(model, "all_tied_weights_keys", None)
    copies: Collection[str] = tied if isinstance(tied, Mapping) else ()
    return {name: state[name] for name in sorted(state, key=lambda name: name in copies)}


# -- what of it is trained ---------------------------------------------------------------------------------------------


def trained_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of `state`, tensors ``[...]`` by name, that a checkpoint holds.

    Of a model with adapters all but the frozen base: adapters (active or not), other trained parameters, and buffers.
    Everything of any other model.
    """
    if not _has_adapters(model):
        return dict(state)
    frozen = set(_frozen_names(model))
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def _has_adapters(model: nn.Module) -> bool:
    return is_adapted(model) or _is_a(model, "peft", "PeftMixedModel")


def _frozen_names(model: nn.Module) -> Iterator[str]:
    adapters = tuple(
        f"{prefix}.{part}." if prefix else f"{part}."
        for prefix, module in model.named_modules()
        for part in (*getattr(module, "adapter_layer_names", ()), *_ADAPTER_PARTS)
        if isinstance(getattr(module, part, None), nn.Module)
    )
    # A tied tensor has several names, and the state lists every one.
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    for name in model.state_dict(keep_vars=True):  # for the names: `keep_vars` makes no detached views
        if name not in trained and name not in buffers and not name.startswith(adapters):
            yield name


def frozen_fingerprint(model: nn.Module, state: Mapping[str, torch.Tensor]) -> str | None:
    """A digest of the frozen base under adapters; None for a model without adapters.

    It covers names, shapes and 64 values of each tensor ``[...]`` of `state`. A checkpoint holds the adapters only: on
    another base they would train on, wrongly and without a warning.
    """
    if not _has_adapters(model):
        return None
    digest = hashlib.sha256()
    for name in sorted(_frozen_names(model)):
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        flat = tensor.detach().reshape(-1)
        probe = flat[:: max(1, flat.numel() // _PROBED)][:_PROBED].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(probe.view(torch.uint8).numpy().tobytes() if probe.numel() else b"")
    return digest.hexdigest()


def numbers_in(parameter: nn.Parameter) -> int:
    """The numbers that a parameter ``[...]`` stands for: bitsandbytes packs two of 4 bits into a byte."""
    is_packed = type(parameter).__name__ == "Params4bit" and parameter.dtype == torch.uint8
    return parameter.numel() * (2 if is_packed else 1)


def describe_base(model: nn.Module) -> dict[str, Any] | None:
    """The model under adapters: its name, its revision on the Hub, and the SHA-256 of its files with weights.

    None for a model without adapters, or whose base was not loaded from files.
    """
    inner: Any = innermost(model)
    place = str(getattr(inner, "name_or_path", "") or "")
    if not is_peft(model) or not is_transformers(inner) or not place:
        return None
    folder, revision = Path(place), None
    if not folder.is_dir():
        library: Any = importlib.import_module("transformers.utils")
        revision = getattr(inner.config, "_commit_hash", None)
        try:
            folder = Path(library.cached_file(place, "config.json", revision=revision, local_files_only=True)).parent
        except OSError:
            return None
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    name = place if revision is not None else folder.name  # no path of a machine
    return {"name": name, "revision": revision, "files": digests} if digests else None


# -- settings for training ---------------------------------------------------------------------------------------------


def refuse_names(own: Mapping[str, Any], config: Any, *, field: str) -> None:
    """Raise ConfigError for a name that a configuration of transformers does not have: it would keep it silently."""
    known = {*config.to_dict(), *getattr(config, "attribute_map", ()), "attn_implementation"}
    known |= {"rope_theta", "rope_scaling", "partial_rotary_factor"} if hasattr(config, "rope_parameters") else set()
    for name, value in own.items():
        if name not in known and not hasattr(config, name):
            what, remedy = f"{type(config).__name__} has no such setting.", suggestion(name, known, listing=False)
            raise ConfigError(what, field=f"{field}.{name}", value=value, remedy=remedy)
        if isinstance(value, Mapping) and callable(getattr(getattr(config, name, None), "to_dict", None)):
            refuse_names(value, getattr(config, name), field=f"{field}.{name}")


def enable_gradient_checkpointing(model: nn.Module, kwargs: dict[str, Any] | None) -> None:
    """Switch recomputation on; with adapters, let gradients pass the frozen embedding. Raises ConfigError."""
    enable = checkpointing_switch(model)
    parameters = inspect.signature(enable).parameters
    bundle = next((name for name in parameters if name.endswith("checkpointing_kwargs")), None)
    if bundle is None and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        bundle = "gradient_checkpointing_kwargs"
    # torch's recommended variant; the reentrant one needs an input with a gradient, and frozen embeddings give none.
    settings = {"use_reentrant": False, **(kwargs or {})}
    own = {name: settings.pop(name) for name in list(settings) if name in parameters}
    if bundle is not None:
        if is_transformers(innermost(model)):
            _refuse_checkpointing_names(settings)
        own[bundle] = settings
    elif kwargs and settings.keys() & kwargs.keys():
        what = f"The model's {enable.__name__}() takes no such settings."
        remedy = "Remove them, or let it take gradient_checkpointing_kwargs."
        raise ConfigError(what, field="gradient_checkpointing_kwargs", value=kwargs, remedy=remedy)
    try:
        enable(**own)
    except ValueError as error:  # transformers' models that have no support
        raise _no_checkpointing(str(error)) from error
    requires_grads = getattr(model, "enable_input_require_grads", None)
    if _has_adapters(model) and callable(requires_grads):
        requires_grads()


def _refuse_checkpointing_names(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for what torch's checkpoint() does not know: it would hand that on to the layers."""
    parameters = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    known = [name for name in parameters if name not in ("function", "args", "kwargs")] + ["preserve_rng_state"]
    for name, value in settings.items():
        what = "torch.utils.checkpoint has no such setting."
        require_known(name, known, what, field=f"gradient_checkpointing_kwargs.{name}", value=value)


def checkpointing_switch(model: nn.Module) -> Callable[..., Any]:
    """The model's method that switches recomputation on, under its new or old name; ConfigError without one."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable: Callable[..., Any] | None = getattr(model, name, None)
        if callable(enable):
            return enable
    raise _no_checkpointing("The model has no gradient_checkpointing_enable().")


def _no_checkpointing(why: str) -> ConfigError:
    remedy = 'Give gradient_checkpointing_kwargs={"every": 1}, or add gradient_checkpointing_enable() to the model.'
    return ConfigError(why, field="gradient_checkpointing", value=True, remedy=remedy)


def check_settings(model: nn.Module, args: TrainingArguments) -> None:
    """Raise ConfigError for settings that this model cannot serve, and MissingExtraError for an absent package."""
    if args.gradient_checkpointing:
        _check_recomputation(model, args)
    if args.neftune_noise_alpha is not None:
        input_embedding(model, args.neftune_noise_alpha)
    if args.use_liger_kernel:
        liger_kernels(model, args.liger_kernel_config)
    if args.fp8:
        check_float8(model, args)


def _check_recomputation(model: nn.Module, args: TrainingArguments) -> None:
    choice = Recomputation.of(args.gradient_checkpointing_kwargs)
    if choice is None:
        checkpointing_switch(model)
        return
    find_blocks(model, choice)
    if args.use_cache:
        what, remedy = "Recomputed blocks would enter their keys and values twice.", "Remove it."
        raise ConfigError(what, field="use_cache", value=True, remedy=remedy)
    layout = read_layout(args)
    if choice.offload and layout is not None and layout.tensor > 1:
        what, remedy = "Activations of divided layers stay there.", "Remove it, or divide by shard instead of tensor."
        raise ConfigError(what, field="gradient_checkpointing_kwargs.offload", value=True, remedy=remedy)


def liger_kernels(model: nn.Module, config: dict[str, bool] | None) -> Any:
    """The module of liger_kernel that replaces layers of a model. Raises MissingExtraError and ConfigError."""
    inner = innermost(model)
    if not is_transformers(inner):
        what = "Liger kernels replace layers of transformers models only."
        raise ConfigError(what, field="use_liger_kernel", value=type(inner).__name__, remedy="Remove it.")
    try:
        kernels = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        what = f"The package liger-kernel is needed ({error})."
        remedy = "Install it: pip install liger-kernel."
        raise MissingExtraError(what, field="use_liger_kernel", value=True, remedy=remedy) from error
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    known = kernels.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        what = f"There are no kernels for {kind!r} models."
        raise ConfigError(what, field="use_liger_kernel", value=True, remedy="Remove it.")
    options = inspect.signature(known[kind]).parameters
    for name in config or {}:
        if name not in options:
            offered = ", ".join(option for option in options if option != "model")
            what = f"The kernel does not exist for {kind!r} models."
            raise ConfigError(what, field=f"liger_kernel_config.{name}", remedy=f"There are {offered}.")
    return kernels


def input_embedding(model: nn.Module, alpha: float) -> nn.Module:
    """The layer that turns tokens into vectors: the model's `get_input_embeddings()`, or its only `nn.Embedding`.

    Raises ConfigError, with NEFTune's `alpha`, when neither gives a layer.
    """
    get = getattr(model, "get_input_embeddings", None)
    found: Any = None
    if callable(get):
        with contextlib.suppress(NotImplementedError):
            found = get()
    else:
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        found = embeddings[0] if len(embeddings) == 1 else None
    if not isinstance(found, nn.Module):
        what = "It is not clear which embedding of the model to add noise to."
        remedy = "Remove it, or give the model get_input_embeddings()."
        raise ConfigError(what, field="neftune_noise_alpha", value=alpha, remedy=remedy)
    return found


def non_embedding_parameters(model: nn.Module, numel: Callable[[nn.Parameter], int] = nn.Parameter.numel) -> int:
    """Number of parameters that multiply with every token: all but the tables of embeddings.

    `numel`: elements of a parameter ``[...]``; of a sharded one, those of the whole.
    """
    count = getattr(model, "num_parameters", None)
    if callable(count) and is_transformers(innermost(model)):
        return int(count(exclude_embeddings=True))  # knows how many parameters a quantised byte holds
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(numel(parameter) for parameter in model.parameters() if id(parameter) not in tables)


# Parts of transformers' class names (or `loss_type`) whose loss predicts the next token.
_SHIFTING = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")


_KEYS_AND_VALUES = ("past_key_values", "cache")  # the output's name up to transformers 5.23, and from 5.24 on


class ModelFacts:
    """The known facts about the model under training, most of them of its `forward`.

    Wrappers of torch.compile and of adapters are looked through. `numel`: the elements of a whole parameter, even of a
    sharded one.

    Attributes:
        columns: names of the parameters of `forward`; None when ``**kwargs`` takes any name. The ``**kwargs`` of a
            transformers model take settings and no data.
        labels: parameters that hold labels.
        uses_num_items: it takes `num_items_in_batch`, and may divide its loss by it.
        accepts_loss_kwargs: it is given `num_items_in_batch` by the reference: it declares so, or has ``**kwargs``.
        divides_by_items: its source divides the loss by `num_items_in_batch`, as far as it can be read.
        shifts_labels: its loss compares position t with label t + 1.
        has_prompt: trained virtual tokens precede every row, so the first label is a target as well.
        returns_loss: ``return_loss`` defaults to True (contrastive models).
        main_input: the name of its main input, whose elements count as tokens.
        flops_per_item: floating-point operations of a forward and backward pass for one token or sample.
        own_flops: the model's own `floating_point_ops(inputs)`, if it has one.
        ignored_outputs: outputs that predictions leave out (``keys_to_ignore_at_inference``); by default, those of a
            transformers model with its keys and values.
    """

    def __init__(
        self, model: nn.Module, label_names: Sequence[str] | None, numel: Callable[[nn.Parameter], int]
    ) -> None:
        inner = innermost(model)
        parameters = parameters_of(inner.forward)
        self.open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = tuple(name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD)
        needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        self.required = tuple(name for name in named if name in needed)
        self.columns = None if self.open_ended and not (named and is_transformers(inner)) else named
        self.labels = tuple(label_names) if label_names is not None else _label_names(inner, named)
        self.uses_num_items = _uses_num_items(inner, parameters, self.open_ended)
        self.accepts_loss_kwargs = bool(getattr(inner, "accepts_loss_kwargs", self.open_ended))
        self.divides_by_items = "num_items_in_batch" in parameters or _divides(inner)
        self.shifts_labels = _shifts(inner)
        self.has_prompt = has_virtual_tokens(model)
        self.returns_loss = "return_loss" in parameters and parameters["return_loss"].default is True
        own = getattr(model, "floating_point_ops", None)
        default = _KEYS_AND_VALUES if is_transformers(inner) else ()
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", default)
        self.main_input: str = getattr(model, "main_input_name", "input_ids")
        self.flops_per_item = 6 * non_embedding_parameters(model, numel)
        self.own_flops: Callable[[Any], Any] | None = own if callable(own) else None
        self.ignored_outputs: tuple[str, ...] = tuple(ignored or ())

    def misfit(self, names: Collection[str]) -> ConfigError | None:
        """The error for a batch with names that the model does not take; None when it takes them."""
        unknown = [name for name in names if not self.open_ended and name not in (self.columns or ())]
        missing = [name for name in self.required if name not in names]
        if not unknown and not missing:
            return None
        takes = ", ".join(self.columns or self.required)
        what = f"The batch has {', '.join(names)}; the model's forward takes {takes}."
        remedy = "Let collate (the data_collator) name its tensors like the parameters of forward."
        return ConfigError(what, field="model", remedy=remedy)


def _label_names(model: nn.Module, named: tuple[str, ...]) -> tuple[str, ...]:
    # The rule of transformers' `find_labels`.
    found = [name for name in named if "label" in name]
    if "QuestionAnswering" in type(model).__name__:
        found += [name for name in named if name in ("start_positions", "end_positions")]
    return tuple(found) or ("labels",)


def _uses_num_items(model: nn.Module, parameters: dict[str, inspect.Parameter], open_ended: bool) -> bool:
    declared = getattr(model, "accepts_loss_kwargs", None)
    if isinstance(declared, bool):
        return declared
    # A transformers model passes **kwargs to its loss function; the **kwargs of other models mean something else.
    # Look at the class: reading the property warns for models whose task it does not know.
    has_loss_function = hasattr(type(model), "loss_function") or "loss_function" in vars(model)
    return "num_items_in_batch" in parameters or (open_ended and has_loss_function)


def _divides(model: nn.Module) -> bool:
    if getattr(model, "accepts_loss_kwargs", None) is True:
        return True
    try:
        # transformers' own loss functions divide by the count.
        return "loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False


def _shifts(model: nn.Module) -> bool:
    declared = getattr(model, "shifts_labels", None)
    if isinstance(declared, bool):
        return declared
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False  # an encoder-decoder shifts the decoder's inputs: every label is a target
    name = str(getattr(model, "loss_type", None) or type(model).__name__)
    return any(part in name for part in _SHIFTING)
