"""Python values and random states as JSON and back, exactly: how state is kept without pickle.

Plain values, lists and dicts with text keys stand for themselves. What JSON lacks is written as an object with one
marked key: ``{"__tuple__": [...]}`` is a tuple, ``{"__dict__": [[key, value], ...]}`` a dict with numbers or tuples as
keys, ``{"__deque__": [items, maxlen]}`` a deque, ``{"__dtype__": "float32"}`` torch's, a 0-dim tensor is
``{"__scalar__": [value, dtype]}``, and ``{"__tensor__": ...}`` refers to a tensor that is kept in another file.
"""

from __future__ import annotations

import base64
import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.base.json_text import require_shallow
from trainer_lib.errors import ConfigError, DamagedError

_MARKS = ("__tensor__", "__tuple__", "__dict__", "__deque__", "__dtype__", "__scalar__")


def to_json(value: Any, key: str, keep: Callable[[str, Tensor], dict[str, Any]] | None = None) -> Any:
    """Encode a value, which stands at `key`, as JSON. Raises ConfigError for what it cannot hold.

    `keep` stores a tensor `[...]` of any dtype and returns the reference that stands for it; without it only 0-dim
    tensors of real numbers are taken.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        # NumPy's numbers are not JSON's.
        return value.item()
    if isinstance(value, Tensor) and keep is not None:
        return keep(key, value)
    if type(value) is Tensor and value.ndim == 0 and not value.is_complex():
        return {"__scalar__": [value.item(), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{key}.{index}", keep) for index, item in enumerate(value)]
        # JSON has no tuple, and a setting such as betas must come back as one.
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, deque):
        return {"__deque__": [to_json(list(value), key, keep), value.maxlen]}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping) and all(isinstance(inner, str | int | float | tuple) for inner in value):
        pairs = [(to_json(inner, key), to_json(item, f"{key}.{inner}", keep)) for inner, item in value.items()]
        # A dict that happens to use one of our marks as a key is written as pairs, so that reading stays unambiguous.
        is_plain = all(isinstance(inner, str) and inner not in _MARKS for inner in value)
        return dict(pairs) if is_plain else {"__dict__": [list(pair) for pair in pairs]}
    what = f"{key!r} holds a {type(value).__name__}, which cannot be saved without pickle."
    remedy = "Keep numbers, texts, lists, dicts and (in an optimizer) tensors in it."
    raise ConfigError(what, field="checkpoint", remedy=remedy)


def from_json(value: Any, find: Callable[[dict[str, Any]], Tensor] | None = None) -> Any:
    """Decode what `to_json` encoded; `find` returns the tensor `[...]` for a reference. Raises DamagedError."""
    try:
        return _decode(value, find)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"A saved value is malformed: {error}.", remedy="Use an earlier checkpoint.") from error


def render_json(name: str, value: object, *, indent: int | None = None) -> str:
    """Render a part of the state as JSON text, `indent` spaces a level; errors name `name`. Raises ConfigError."""
    try:
        text = json.dumps(value, indent=indent)
        require_shallow(value)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        what = f"This part of the state cannot be written as JSON: {error}."
        remedy = "Keep plain numbers, texts, lists and dicts in the state (of a callback, a dataset, the arguments)."
        raise ConfigError(what, field=name, remedy=remedy) from error


def _decode(value: Any, find: Callable[[dict[str, Any]], Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        if find is None:
            remedy = "Use an earlier checkpoint."
            raise DamagedError("A saved value refers to a tensor where no tensors are kept.", remedy=remedy)
        return find(value)
    if "__tuple__" in value:
        return tuple(_decode(item, find) for item in _require_list(value["__tuple__"]))
    if "__dict__" in value:
        pairs = [_require_list(pair) for pair in _require_list(value["__dict__"])]
        return {_decode(inner, None): _decode(item, find) for inner, item in pairs}
    if "__deque__" in value:
        items, maxlen = _require_list(value["__deque__"])
        return deque(_decode(_require_list(items), find), maxlen)
    if "__dtype__" in value:
        return _require_dtype(value["__dtype__"])
    if "__scalar__" in value:
        return _decode_scalar(*_require_list(value["__scalar__"]))
    return {inner: _decode(item, find) for inner, item in value.items()}


def _decode_scalar(number: object, dtype: object) -> Tensor:
    if not isinstance(number, int | float):
        raise TypeError(f"a number is needed, not {type(number).__name__}")
    return torch.tensor(number, dtype=_require_dtype(dtype))


def _require_dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return dtype


def _require_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is needed, not {type(value).__name__}")
    return value


# -- the global random number generators of this process: Python, NumPy, torch, the device -----------------------------


def capture_rng() -> dict[str, Any]:
    """Capture the states of all global generators; of devices, the current one's."""
    version, words, gauss = random.getstate()
    # legacy=True: a tuple, whose parts JSON can hold.
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": encode_state(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = encode_state(torch.cuda.get_rng_state())
    if torch.backends.mps.is_available():
        state["mps"] = encode_state(torch.mps.get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_rng` returned, once all of it is decoded; the state of an absent device is ignored.

    Raises DamagedError when `state` is something else.
    """
    try:
        # Parsed before the first generator is set, so that a malformed state changes none.
        python, numpy = _python_state(state["python"]), _numpy_state(state["numpy"])
        texts = {name: state[name] for name in ("torch", "cuda", "mps") if name in state}
        raw = {name: bytearray(base64.b64decode(text, validate=True)) for name, text in texts.items()}
        device = {name: torch.frombuffer(data, dtype=torch.uint8) for name, data in raw.items()}
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(device["torch"])
        if "cuda" in device and torch.cuda.is_available():
            torch.cuda.set_rng_state(device["cuda"])
        if "mps" in device and torch.backends.mps.is_available():
            torch.mps.set_rng_state(device["mps"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        remedy = "Use an earlier checkpoint; the state may come from another version of Python, NumPy or torch."
        raise DamagedError(f"A saved random state cannot be used: {error}.", field="rng", remedy=remedy) from error


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, words, gauss = saved
    # random.setstate does not look at `gauss`, the spare normal number; a wrong one would fail when it is drawn.
    if not isinstance(words, list) or not (gauss is None or type(gauss) is float):
        raise ValueError("Python's state is not a Mersenne Twister's")
    return version, tuple(words), gauss


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = saved
    # NumPy does not check the position, and would read beyond the 624 words.
    if not isinstance(keys, list) or len(keys) != 624 or type(position) is not int or not 0 <= position <= 624:
        raise ValueError("NumPy's state is not a Mersenne Twister's")
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def encode_state(state: torch.Tensor) -> str:
    """Encode a generator's state, a uint8 tensor `[bytes]`, as base64."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")
