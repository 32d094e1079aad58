"""Each field of the arguments alone: its value converted to its declared type, inside its bounds, among its choices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.arguments.coerce import coerce, read_json_mapping
from trainer_lib.arguments.fields import Declaration, declarations, field_hints, field_map
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import may_be_secret_name

_SIGNS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("above", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("below", lambda value, bound: value < bound),
}


def coerce_fields(args: Any) -> None:
    """Convert every field of a dataclass to its declared type.

    A field that a subclass adds is its own: a text is converted where it fits, and any other value stays.

    Raises:
        ConfigError: the value of a field that trainflow declares does not fit.
    """
    cls: type = type(args)
    hints, declared = field_hints(cls), declarations(cls)
    texts = tuple(getattr(cls, "_VALID_DICT_FIELDS", ()))
    for name in field_map(args):
        value, known = getattr(args, name), declared[name]
        if isinstance(value, str) and value == f"<{name.upper()}>" and (known.secret or may_be_secret_name(name)):
            value = None  # `to_dict` writes this in place of a secret
        if isinstance(value, str) and value.startswith("{") and name in texts:
            value = read_json_mapping(value, field=name, secret=known.secret)
        if known.ours:
            value = coerce(value, hints.get(name, Any), field=name, secret=known.secret)
            check_bounds(name, value, known)
        elif isinstance(value, str):
            with contextlib.suppress(ConfigError):
                value = coerce(value, hints.get(name, Any), field=name)
        object.__setattr__(args, name, value)


def check_bounds(name: str, value: Any, declared: Declaration) -> None:
    """Raise ConfigError for a number outside of its bounds, or a text that is not among its choices."""
    for sign, bound in declared.bounds.items():
        words, holds = _SIGNS[sign]
        if isinstance(value, (int, float)) and not holds(value, bound):
            raise ConfigError(
                f"The number must be {words} {bound}.",
                field=name,
                value=value,
                remedy=f"Give a number {'of ' if words.startswith('at') else ''}{words} {bound}.",
            )
    choices = declared.choices
    for word in value if isinstance(value, list) else [value]:
        if choices and isinstance(word, str) and word not in choices:
            raise ConfigError(
                "This is not one of the choices.", field=name, value=word, remedy=suggestion(word, choices)
            )
