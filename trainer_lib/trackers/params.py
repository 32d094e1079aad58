"""Arguments as a tracker's parameters: flat, short, and without secrets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_VALUE = 500  # characters; servers differ (MLflow: 6,000), a table cell shows less
MAX_KEY = 250
MASK = "***"

_SECRET_WORDS = {"secret", "password", "passwd", "passphrase", "credential", "credentials"}
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}
# A tokenizer's special tokens are text that everyone may see.
_SPECIAL_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "start", "end", "special", "extra"}
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KNOWN_TOKENS = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b")


def flatten_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Nested mappings become dotted keys, values text of at most 500 characters, secrets `***`.

    A secret is recognised by its key (`hub_token`, `api_key`, `password`, …), by the form of well-known tokens, or as
    the user part of a URL. Characters that trackers refuse in a key become `_`.
    """
    flat: dict[str, str] = {}
    _flatten("", params, flat)
    return flat


def clean_key(key: str) -> str:
    """A metric or parameter name that MLflow accepts: letters, digits and `_-.:/` and spaces."""
    return re.sub(r"[^\w.\-:/ ]", "_", str(key), flags=re.ASCII).strip("/")[:MAX_KEY] or "_"


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names as trackers with sections group them: `eval_loss` becomes `eval/loss`, `loss` becomes `train/loss`."""
    named = {}
    for name, value in metrics.items():
        section, _, rest = name.partition("_")
        named[f"{section}/{rest}" if section in ("eval", "test") and rest else f"train/{name}"] = value
    return named


def mask(text: str) -> str:
    """`text` without the credentials that can be recognised in it."""
    return _KNOWN_TOKENS.sub(MASK, _CREDENTIALS_IN_URL.sub(MASK, text))


def _flatten(prefix: str, value: Any, flat: dict[str, str]) -> None:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, flat)
        return
    secret = value is not None and value != "" and _is_secret(prefix.rpartition(".")[2])
    text = MASK if secret else _text(value)
    flat[clean_key(prefix)] = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # Mappings inside a list keep their form, but their secrets go.
        return "[" + ", ".join(_text(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in flatten_params(value).items()) + "}"
    return mask(str(value))


def _is_secret(key: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()) if word]
    if not words:
        return False
    if words[-1] == "token" and not _SPECIAL_TOKENS & set(words):
        return True
    return bool(_SECRET_WORDS & set(words)) or any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words))
