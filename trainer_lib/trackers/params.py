"""Arguments as a tracker's parameters: flat, short, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.secrets import MASK, is_secret, mask

MAX_VALUE = 500  # characters; servers differ (MLflow: 6,000), a table cell shows less
MAX_KEY = 250


def flatten_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return nested mappings with dotted keys, values as text of at most 500 characters, and secrets as `***`.

    `trainer_lib.secrets` recognises secrets. Characters that trackers refuse in a key become `_`.
    """
    flat: dict[str, str] = {}
    _flatten("", params, flat)
    return flat


def clean_key(key: str) -> str:
    """Return a metric or parameter name that MLflow accepts: letters, digits and `_-.:/` and spaces."""
    return re.sub(r"[^\w.\-:/ ]", "_", str(key), flags=re.ASCII).strip("/")[:MAX_KEY] or "_"


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics for trackers with sections: `eval_loss` becomes `eval/loss`, `loss` becomes `train/loss`."""
    named = {}
    for name, value in metrics.items():
        section, _, rest = name.partition("_")
        named[f"{section}/{rest}" if section in ("eval", "test") and rest else f"train/{name}"] = value
    return named


def _flatten(prefix: str, value: Any, flat: dict[str, str]) -> None:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, flat)
        return
    text = MASK if any(is_secret(part, value) for part in prefix.split(".")) else _text(value)
    flat[clean_key(prefix)] = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # Mappings inside a list keep their form, but their secrets go.
        return "[" + ", ".join(_text(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in flatten_params(value).items()) + "}"
    return mask(str(value))
