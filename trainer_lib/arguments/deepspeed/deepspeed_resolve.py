"""Resolve the settings that both DeepSpeed's configuration and the arguments can give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.fields import field_map
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups

AUTO = "auto"
REMEDY = 'Remove one of them, or write "auto" in the file.'


def part_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a part of the configuration, empty when it is absent. Raises ConfigError for anything else."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(name, value, "This must be a section.", 'Write {"name": value, …}.')
    return dict(value)


def check_keys(prefix: str, given: Mapping[str, Any], known: tuple[str, ...], refused_keys: Mapping[str, str]) -> None:
    """Raise ConfigError for a key that is unknown, or known and not supported."""
    for key, value in given.items():
        if key in refused_keys and asks(value):
            raise refused(prefix + key, value, "This setting is not supported.", refused_keys[key])
        if key not in known and key not in refused_keys:
            raise refused(prefix + str(key), None, "DeepSpeed has no such setting.", suggestion(str(key), known))


def asks(value: Any) -> bool:
    """Return whether the value of a refused key asks for anything; a key that is switched off may stay."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    return bool(value)


def refused(key: str, value: Any, message: str, remedy: str) -> ConfigError:
    """Return the error about a key's value."""
    return ConfigError(message, field=f"deepspeed.{key}", value=value, remedy=remedy)


def is_given(args: ArgumentGroups, name: str) -> bool:
    """Return whether an argument is given, that is, not at its default."""
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
    """Return the number that the file gives for an argument, and record it in `resolved`; None when it gives none.

    Args:
        args: coerced arguments.
        given: a section of the file.
        key: the setting in that section.
        argument: the argument that means the same.
        resolved: argument -> value that the file decides; extended here.
        prefix: the section's name with a dot, for errors.
        index: position of the number, when the setting is a list.

    Raises:
        ConfigError: the setting is not a number, or contradicts the argument.
    """
    written = given.get(key)
    if isinstance(written, list | tuple) and index is not None:
        written = written[index] if index < len(written) else None
    if written is None or written == AUTO:
        return None
    check_number(prefix + key, written)
    current = resolved.get(argument, getattr(args, argument))
    # In `resolved`: two sections of a file may give one argument, such as the learning rate.
    if written != current and (is_given(args, argument) or argument in resolved):
        raise contradiction(prefix + key, written, argument, current)
    resolved[argument] = written
    return written


def check_number(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(key, value, "This is not a number.", 'Write a number, or "auto".')


def contradiction(key: str, written: Any, argument: str, current: Any) -> ConfigError:
    """Return the error about a value that contradicts an argument or another key."""
    return refused(key, written, f"This contradicts {argument} = {current}.", REMEDY)
