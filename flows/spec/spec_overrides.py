"""Fields of a spec that are set by their dotted name: ``key=value`` on the command line, the values of a trial."""

from __future__ import annotations

from typing import Any

from trainer_lib.errors import ConfigError
from trainflow.flows.spec.spec_file import parse_override_value


def apply_override(raw: dict[str, Any], text: str) -> str:
    """Set ``a.b=value`` in `raw`; the dotted key.

    Raises:
        ConfigError: the text is not of that form, or something above the key holds one value.
    """
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            "An override has the form key=value.",
            field=key or "override",
            value=value_text if equals else None,
            remedy="Write for example train.args.seed=1.",
        )
    try:
        value = parse_override_value(value_text.strip())
    except ValueError as error:
        raise ConfigError(
            f"This is not a value: {error} (from the command line: {key}=…).",
            field=key,
            value=value_text,
            remedy="Quote it for the shell.",
        ) from error
    set_field(raw, key, value, shown=value_text, where=f"from the command line: {key}=…")
    return key


def set_field(raw: dict[str, Any], key: str, value: Any, *, shown: str, where: str) -> None:
    """Set the field with a dotted key in `raw`, and make the sections above it where they are missing.

    Args:
        shown, where: the value as it was written, and its place, for an error.

    Raises:
        ConfigError: something above the key holds one value.
    """
    parts = key.split(".")
    place: Any = raw
    for depth, part in enumerate(parts[:-1], start=1):
        inner = place.setdefault(part, {})
        # `train:` with nothing below it is None in YAML.
        if inner is None:
            inner = place[part] = {}
        # The spec may name a launcher alone (`launch: torchrun`); its settings can be overridden all the same.
        elif part == "launch" and isinstance(inner, str):
            inner = place[part] = {"kind": inner}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"'{'.'.join(parts[:depth])}' holds one value, so nothing below it can be set ({where}).",
                field=key,
                value=shown,
                remedy=f"Set {'.'.join(parts[:depth])} itself.",
            )
        place = inner
    place[parts[-1]] = value
