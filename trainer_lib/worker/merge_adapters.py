"""The verb *merge_adapters*: the base model's weights with the trained adapters merged in, for `from_pretrained`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.errors import ConfigError, first_line
from trainer_lib.protocol.requests import MergeRequest, MergeResult
from trainer_lib.recipes import DataInfo
from trainer_lib.storage import Store
from trainer_lib.trainer.model.models import in_saving_order, is_peft, is_placed, model_files
from trainer_lib.worker.process.assembly import arguments, build_model, build_trainer, load_weights
from trainer_lib.worker.process.session import Work

FIELD = "publish.merge_adapters"
WEIGHTS = "model.safetensors"
_PLACES = 32
_ALONE = "Remove it: the adapters are published alone."


def run(work: Work[MergeRequest]) -> MergeResult:
    """Build the recipe's model, load its adapters, merge them, and write the merged model, if they agree."""
    request = work.request
    args = arguments(work, "publish", request.output)
    model = build_model(work, args, DataInfo(work.prepared))
    require_mergeable(model)
    load_weights(model, request.model_url)
    batches = _held_out(work, args, model)
    expected = _answers(model, batches)
    merged = merge(model, dtype=request.dtype)
    agreement = compare(expected, _answers(merged, batches))
    _require_agreement(agreement, request)
    store, state = Store.open(request.output), merged.state_dict()
    with store.open_write(WEIGHTS) as writer:
        write_safetensors(writer, in_saving_order(merged, state))
    beside = [store.write_bytes(name, content) for name, content in model_files(merged, state).items()]
    store.sync()
    return MergeResult((writer.entry, *beside), agreement)


def _held_out(work: Work[MergeRequest], args: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Batches of one row of a held-out split, or of training where there is none, as the model's forward takes them."""
    names = sorted(work.request.data.splits, key=lambda name: (name != "test", name == "train", name))
    if not names:
        return []
    split, trainer = ArrowSplit(work.prepared, names[0]), build_trainer(work, args, model, [])
    takes = trainer._trainflow.facts.columns
    rows = [trainer.data_collator([split[row]]) for row in range(min(len(split), work.request.prompts))]
    return [{name: value for name, value in row.items() if takes is None or name in takes} for row in rows]


def _answers(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The logits of rows ``[places, tokens]``, at most at their last 32 places; none where a model gives no logits."""
    model.eval()
    device, answers = next(model.parameters()).device, []
    with torch.no_grad():
        for batch in batches:
            on_device = {
                name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()
            }
            output = model(**on_device)
            logits = output.get("logits") if isinstance(output, Mapping) else None
            if isinstance(logits, Tensor):
                answers.append(logits.reshape(-1, logits.shape[-1])[-_PLACES:].float().cpu())
    return answers


def compare(expected: Sequence[Tensor], merged: Sequence[Tensor]) -> dict[str, float]:
    """The greatest difference of logits ``[places, tokens]`` by row, and the share of places with the same next token.

    Empty without rows.
    """
    if not expected:
        return {}
    ours, theirs = torch.cat(list(merged)), torch.cat(list(expected))
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    difference = (ours - theirs).abs().max()
    return {"merge_agreement": same.item(), "merge_difference": difference.item(), "merge_prompts": len(expected)}


def _require_agreement(agreement: Mapping[str, float], request: MergeRequest) -> None:
    if agreement and not 1 - agreement["merge_agreement"] <= request.tolerance:
        same, difference = agreement["merge_agreement"], agreement["merge_difference"]
        raise ConfigError(
            f"Merged weights choose the next token of the adapters in {100 * same:.1f} % of the places that were tried "
            f"(logits differ by up to {difference:.3g}).",
            field="publish.merge_tolerance",
            value=request.tolerance,
            remedy="Set publish.merged_type=float32, publish the adapters alone, or tolerate more.",
        )


def require_mergeable(model: nn.Module) -> None:
    """Raise ConfigError for a model without adapters that can be merged into its weights."""
    given: Any = model
    if not is_peft(model):
        raise _refuse(f"build_model() returned a {type(model).__name__}, which has no adapters of peft.")
    if getattr(given, "merge_and_unload", None) is None:
        kinds = sorted(
            {str(getattr(config.peft_type, "value", config.peft_type)) for config in given.peft_config.values()}
        )
        raise _refuse(f"Adapters of the kind {', '.join(kinds)} are not part of the weights, so they cannot be merged.")
    base = given.get_base_model()
    if getattr(base, "is_quantized", False) and not (is_placed(base) and set(given.peft_config) == {"default"}):
        raise _refuse("The base model is quantised, and merging would round the adapters away.")
    shared = _find_shared_weight(given)
    if shared is not None:
        raise _refuse(f"The adapters change {shared}, a weight that another layer shares and would be changed in.")


def _find_shared_weight(model: Any) -> str | None:
    """The name of a layer with adapters, or trained as a whole, whose weight is also another layer's; None: no such."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    uses = Counter(param.data_ptr() for _, param in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        layer = module.original_module if isinstance(module, ModulesToSaveWrapper) else layer
        weight = getattr(layer, "weight", None)
        if weight is not None and uses[weight.data_ptr()] > 1:
            return str(name).removeprefix("base_model.model.")
    return None


def merge(model: nn.Module, *, dtype: str | None = None) -> nn.Module:
    """The base model with the weights that give what the model gives with its adapters.

    `dtype` is their type; None: that of the base, bfloat16 of a quantized one. Raises ConfigError for values not
    finite.
    """
    given: Any = model
    if getattr(given.get_base_model(), "is_quantized", False):
        given, dtype = _dequantize(given), dtype or "bfloat16"
    try:
        merged: nn.Module = given.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise _refuse(f"peft cannot merge the adapters: {first_line(error).rstrip('.')}.") from error
    return merged if dtype is None else merged.to(getattr(torch, dtype))


def _dequantize(model: Any) -> Any:
    """Put the adapters on the values that the quantized weights stand for, in float32."""
    import peft

    adapters, config = peft.get_peft_model_state_dict(model), model.peft_config["default"]
    base = model.unload().dequantize(dtype=torch.float32)
    plain = peft.get_peft_model(base, config)
    peft.set_peft_model_state_dict(plain, adapters)
    return plain


def _refuse(what: str) -> ConfigError:
    return ConfigError(what, field=FIELD, value="true", remedy=_ALONE)
