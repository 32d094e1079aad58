"""The verb *merge_adapters*: the base model's weights with the trained adapters merged in, for `from_pretrained`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from trainer_lib.base.records import to_record
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.errors import ConfigError, first_line
from trainer_lib.protocol.requests import MergeRequest, MergeResult
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import Store
from trainer_lib.trainer.model.models import in_saving_order, is_peft, model_files
from trainer_lib.worker.process.assembly import arguments, build_model, load_weights
from trainer_lib.worker.process.session import Work

FIELD = "publish.merge_adapters"
WEIGHTS = "model.safetensors"
_ALONE = "Remove it: the adapters are published alone."


def run(work: Work[MergeRequest]) -> MergeResult:
    """Build the recipe's model, load its adapters, merge them, and write the merged model.

    Raises:
        ConfigError: the model has no adapters, or they cannot be merged. DamagedError: they are another model's.
    """
    request = work.request
    args = arguments(work, "publish", request.output)
    model = build_model(work, args, DataInfo(to_record(request.data)))
    require_mergeable(model)
    load_weights(model, request.model_url)
    merged = merge(model)
    store, state = Store.open(request.output), merged.state_dict()
    with store.open_write(WEIGHTS) as writer:
        write_safetensors(writer, in_saving_order(merged, state))
    beside = [store.write_bytes(name, content) for name, content in model_files(merged, state).items()]
    store.sync()
    return MergeResult((writer.entry, *beside))


def require_mergeable(model: nn.Module) -> None:
    """Raise ConfigError for a model without adapters that can be merged into its weights."""
    given: Any = model
    if not is_peft(model):
        raise _refuse(f"build_model() returned a {type(model).__name__}, which has no adapters of peft.")
    if getattr(given, "merge_and_unload", None) is None:
        kinds = sorted({str(getattr(each.peft_type, "value", each.peft_type)) for each in given.peft_config.values()})
        raise _refuse(f"Adapters of the kind {', '.join(kinds)} are not part of the weights, so they cannot be merged.")
    if getattr(given.get_base_model(), "is_quantized", False):
        raise _refuse("The base model is quantised, and merging would round the adapters away.")
    shared = _find_shared_weight(given)
    if shared is not None:
        raise _refuse(f"The adapters change {shared}, a weight that another layer shares and would be changed in.")


def _find_shared_weight(model: Any) -> str | None:
    """The name of a layer with adapters whose weight is also another layer's; None: there is none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(each.data_ptr() for _, each in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        weight = getattr(module.get_base_layer(), "weight", None) if isinstance(module, BaseTunerLayer) else None
        if weight is not None and uses[weight.data_ptr()] > 1:
            return str(name).removeprefix("base_model.model.")
    return None


def merge(model: nn.Module) -> nn.Module:
    """The base model, with the weights that give what the model gives with its adapters.

    Raises:
        ConfigError: merged weights would not be finite.
    """
    given: Any = model
    try:
        merged: nn.Module = given.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise _refuse(f"peft cannot merge the adapters: {first_line(error).rstrip('.')}.") from error
    return merged


def _refuse(what: str) -> ConfigError:
    return ConfigError(what, field=FIELD, value="true", remedy=_ALONE)
