"""The model of a checkpoint that another program wrote, built on the meta device for its names, shapes and their order.

config.json can only name classes of the installed transformers. No code in the folder or on the Hub runs, nothing is
downloaded, and a configuration that describes many more parameters than there are weights is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from trainer_lib.errors import ConfigError

_UNSAFE = {"auto_map", "custom_pipelines", "trust_remote_code", "quantization_config", "_name_or_path", "name_or_path"}
_KERNELS = ("attn_implementation", "experts_implementation")
_FEW = 1_000  # parameters that any configuration may describe: on the meta device they cost little


def from_config(config: Mapping[str, Any] | None, num_tensors: int) -> nn.Module | None:
    """The transformers model that config.json describes, without values; None without such a description.

    One with many times as many parameters as `num_tensors`, the weights in the file, is refused. Raises ConfigError.
    """
    names = (config or {}).get("architectures")
    if config is None or not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    try:
        import transformers
    except ImportError:
        return None
    # An identifier only: no dotted path out of the package.
    found = getattr(transformers, names[0], None) if names[0].isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        return None
    try:
        with _limited(_FEW + 4 * num_tensors), torch.device("meta"):
            kind: Any = found.config_class
            description = kind.from_dict(_harmless(config))
            description._attn_implementation = "eager"  # plain torch: names of weights do not depend on the kernel
            model: nn.Module = found(description)
        return model
    except Exception as error:  # anything that a strange configuration may lead to
        raise _unbuildable(names[0], error) from error


def converted(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Weights, name → tensor `[...]`, under the names that a model of transformers has in memory; or None.

    Its files may use other names: those of experts that are joined when they are loaded. Raises ConfigError.
    """
    try:
        import transformers
    except ImportError:
        return None
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not isinstance(model, transformers.PreTrainedModel) or len(dtypes) != 1:
        return None
    kind: Any = type(model)
    try:
        # Without a path nothing is read: what transformers does with names is all that is wanted.
        made, report = kind.from_pretrained(
            None, config=model.config, state_dict=dict(tensors), dtype=dtypes.pop(), output_loading_info=True
        )
    except Exception as error:
        raise _unbuildable(kind.__name__, error) from error
    odd = any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: Mapping[str, Tensor] = made.state_dict()
    return None if odd else state


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a peft adapter's weights, name → tensor `[...]`, into a model's. Raises ConfigError if it is another."""
    try:
        import peft
    except ImportError as error:
        raise _no_adapter(f"peft cannot be imported ({error})") from error
    if not isinstance(model, peft.PeftModel):
        raise _no_adapter(f"the model given is a {type(model).__name__}, not a PeftModel")
    expected = peft.get_peft_model_state_dict(model)
    # Names and shapes first, because peft ignores what does not fit.
    if expected.keys() != tensors.keys() or any(expected[name].shape != tensors[name].shape for name in tensors):
        raise _no_adapter(f"the model's adapter has other weights ({len(expected)}, the folder {len(tensors)})")
    peft.set_peft_model_state_dict(model, dict(tensors))


def _unbuildable(name: str, error: Exception) -> ConfigError:
    what = f"The model cannot be built from config.json: {type(error).__name__}: {str(error)[:200]}"
    remedy = "Give --model FILE.py:FUNCTION, a function of yours that returns the model as it was trained."
    return ConfigError(what, field="model", value=name, remedy=remedy)


def _no_adapter(why: str) -> ConfigError:
    remedy = "Let the function return get_peft_model(base, config), as it was trained."
    return ConfigError(f"The folder holds a peft adapter, but {why}.", field="model", remedy=remedy)


def _harmless(value: Any, depth: int = 0) -> Any:
    """The configuration without its keys that name code, kernels or places."""
    if isinstance(value, list):
        return [_harmless(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _harmless(item, depth + 1)
        for key, item in value.items()
        if key not in _UNSAFE and not str(key).endswith(_KERNELS)
    }


@contextmanager
def _limited(parameters: int) -> Iterator[None]:
    """Refuse, inside the block, to make more than so many parameters."""
    left = parameters

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {parameters:,} parameters, many more than there are weights")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
