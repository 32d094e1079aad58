"""Convert arguments to and from dictionaries, JSON and YAML. Secrets are masked, and a mask is never read back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from trainer_lib.arguments.fields import Unset, declarations, field_map
from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import is_secret, mask, mask_value


def to_dict(args: Any) -> dict[str, Any]:
    """Return every argument as plain JSON values: enums by value, dtypes by name, secrets as `<NAME>`."""
    out: dict[str, Any] = {}
    declared_as = declarations(args.__class__)
    for name, field in field_map(args).items():
        if not field.init:  # the constructor, which reads this back, does not take it
            continue
        value = getattr(args, name)
        declared = declared_as[name].secret and value is not None
        # A subclass's field may hold a secret without declaring it, so its name counts too.
        named = not isinstance(value, Mapping) and is_secret(name, value)
        out[name] = f"<{name.upper()}>" if declared or named else plain(value)
    return out


def plain(value: Any) -> Any:
    """Return `value` as plain JSON values: an object with `to_dict` through that method, any other as its text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Unset):
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    convert = getattr(value, "to_dict", None)
    if callable(convert) and not isinstance(value, type):
        return plain(convert())
    # "float32", as transformers writes it and `torch_dtype=` reads it; torch itself prints "torch.float32".
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else str(value)


def to_sanitized_dict(args: Any) -> dict[str, Any]:
    """Return `to_dict` with the process's batch sizes; whatever is not a number, truth value or text becomes text."""
    values = {**to_dict(args), "train_batch_size": args.train_batch_size, "eval_batch_size": args.eval_batch_size}
    shown = {name: mask_value(name, value) for name, value in values.items()}
    # A text may be a URL with a password in it.
    return {name: value if isinstance(value, (bool, int, float)) else mask(str(value)) for name, value in shown.items()}


def read_mapping(path: Path, *, field: str) -> dict[str, Any]:
    """The mapping in a JSON (`.json`) or YAML (any other suffix) file, which `field` names. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"The file cannot be read: {reason}.", field=field, value=str(path), remedy="Check the path."
        ) from None
    from trainer_lib.base.yaml_text import parse_yaml  # costs 20 ms, and few runs have such a file

    try:
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        where = " ".join(str(error).split())
        raise ConfigError(
            f"The file cannot be parsed: {where}.", field=field, value=str(path), remedy="Correct the file."
        ) from None
    # YAML also takes numbers and dates as keys.
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        what = f"The file holds no mapping of names to values, but {type(values).__name__}."
        raise ConfigError(what, field=field, value=str(path), remedy="Write one `name: value` per line.")
    return values
