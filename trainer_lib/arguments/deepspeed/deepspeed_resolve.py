"""What DeepSpeed's configuration and the arguments both say: one value, taken from whichever says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.fields import field_map
from trainer_lib.errors import ConfigError
from trainer_lib.suggestions import suggestion

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups

AUTO = "auto"
REMEDY = 'Remove one of them, or write "auto" in the file.'


def part_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the configuration, a copy; empty when it is not there. ConfigError when it is no mapping."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(name, value, "must be a section.", 'Write {"name": value, …}.')
    return dict(value)


def check_keys(prefix: str, given: Mapping[str, Any], known: tuple[str, ...], refused_keys: Mapping[str, str]) -> None:
    """Raise ConfigError for a key that is unknown, or known and not served."""
    for key, value in given.items():
        if key in refused_keys and asks(value):
            raise refused(prefix + key, value, "is not served.", refused_keys[key])
        if key not in known and key not in refused_keys:
            raise refused(prefix + str(key), None, "is no setting of DeepSpeed's.", suggestion(str(key), known))


def asks(value: Any) -> bool:
    """Whether a refused key asks for anything: switched off it may stay."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    return bool(value)


def refused(key: str, value: Any, message: str, remedy: str) -> ConfigError:
    """The refusal of a key's value."""
    return ConfigError(message, field=f"deepspeed.{key}", value=value, remedy=remedy)


def is_given(args: ArgumentGroups, name: str) -> bool:
    """Whether an argument is not left at its default."""
    return bool(getattr(args, name) != field_map(args)[name].default)


def resolve_setting(
    args: ArgumentGroups,
    given: Mapping[str, Any],
    key: str,
    argument: str,
    resolved: dict[str, Any],
    *,
    prefix: str = "",
    index: int | None = None,
) -> Any:
    """The value that `given[key]` and the argument agree on; noted in `resolved` when the file says it. None: neither.

    `index`: the argument is one of the values of a list.
    """
    written = given.get(key)
    if isinstance(written, list | tuple) and index is not None:
        written = written[index] if index < len(written) else None
    if written is None or written == AUTO:
        return None
    check_number(prefix + key, written)
    current = resolved.get(argument, getattr(args, argument))
    if written != current and (is_given(args, argument) or argument in resolved):
        raise contradiction(prefix + key, written, argument, current)
    resolved[argument] = written
    return written


def check_number(key: str, value: Any) -> None:
    """Raise ConfigError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(key, value, "is no number.", 'Write a number, or "auto".')


def contradiction(key: str, written: Any, argument: str, current: Any) -> ConfigError:
    """The refusal of a value that an argument, or another key, contradicts."""
    return refused(key, written, f"contradicts {argument} = {current}.", REMEDY)
