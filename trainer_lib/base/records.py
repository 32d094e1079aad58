"""Frozen dataclasses as JSON and back, strictly: an unknown key, a missing key and a wrong type are typed errors.

This is for messages between our own processes and for our own files. A spec, which people write, is read by pydantic:
its import costs a worker a tenth of a second, and unknown keys of a nested dataclass it drops without an error.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from trainer_lib.errors import ConfigError


class Dataclass(Protocol):
    """Anything that `dataclasses.dataclass` has decorated."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=Dataclass)
_hints = functools.cache(typing.get_type_hints)


def to_record(value: Dataclass) -> dict[str, Any]:
    """Return a dataclass as plain JSON data; `from_record` is the inverse."""
    return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}


def from_record(kind: type[T], record: object, *, name: str = "", ignore_unknown: bool = False) -> T:
    """Build a dataclass of JSON's own types, dataclasses, and tuples, mappings and unions of these from plain JSON.

    An error, a ConfigError, calls a field ``<name>.<field>``. With `ignore_unknown`, keys that `kind` does not have are
    left out: a newer version may have written them.
    """
    if not isinstance(record, Mapping):
        raise _mismatch(f"A mapping of {kind.__name__}'s fields is needed here.", name, type(record).__name__)
    hints = _hints(kind)
    known = {field.name: field for field in fields(kind)}
    unknown = [key for key in record if key not in known]
    if unknown and not ignore_unknown:
        raise _mismatch(f"{kind.__name__} has no such field.", _join(name, unknown[0]), record[unknown[0]])
    required = [key for key, field in known.items() if field.default is field.default_factory is MISSING]
    missing = [key for key in required if key not in record]
    if missing:
        raise _mismatch(f"{kind.__name__} needs this field.", _join(name, missing[0]))
    return kind(**{key: _decoded(hints[key], record[key], _join(name, key)) for key in known if key in record})


def _encoded(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_record(value)
    if isinstance(value, Mapping):
        return {str(key): _encoded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(inner) for inner in value]
    return value


def _decoded(hint: Any, value: Any, name: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):  # in use: X | None, and unions of JSON's own types
        if value is None and type(None) in inner:
            return None
        others = [kind for kind in inner if kind is not type(None)]
        # A union of JSON's own types: JSON has already told them apart.
        if len(others) > 1:
            return value
        return _decoded(others[0], value, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_decoded(inner[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(key): _decoded(inner[1], item, _join(name, str(key))) for key, item in value.items()}
    if is_dataclass(hint):
        return from_record(typing.cast("type[Any]", hint), value, name=name)
    # A whole number may stand for a float: a timeout of 60.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # A bool is an int for isinstance; here it is not.
    if isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) is (hint is bool):
        return value
    raise _mismatch(f"A value of type {getattr(hint, '__name__', hint)} is needed here.", name, value)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _mismatch(message: str, name: str, value: Any = None) -> ConfigError:
    remedy = "Use the same version of trainflow for everything that exchanges this record."
    return ConfigError(message, field=name or None, value=value, remedy=remedy)
