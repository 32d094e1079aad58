"""What the shell completes: the keys of a spec in overrides (`train.args.<TAB>`), their values, and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def complete_recipe(incomplete: str) -> list[str]:
    """The names of trainflow's own recipes that begin with the text."""
    from trainer_lib.protocol.recipe_names import ABOUT

    return [name for name in ABOUT if name.startswith(incomplete)]


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """The keys (``train.args.seed=``), or behind a ``=`` the values, that begin with the text, each with its help.

    Arguments are many: they are listed behind ``train.args.``, and not before.
    """
    from trainflow.flows.spec.schema import spec_schema

    schema = spec_schema()
    key, equals, value = incomplete.partition("=")
    found = dict(_keys(schema, schema["properties"], ""))
    if equals:
        values = _values(schema, found.get(key, {}))
        return [(f"{key}={each}", "") for each in values if each.startswith(value)]
    depth = incomplete.count(".")
    return [
        (f"{name}=", _first_sentence(node))
        for name, node in found.items()
        if name.startswith(incomplete) and (name.count(".") <= max(depth, 1) or ".args." not in name)
    ]


def _keys(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, node in properties.items():
        below = _section(schema, node)
        if below is None:
            yield f"{prefix}{name}", node
        else:
            yield from _keys(schema, below, f"{prefix}{name}.")


def _section(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The keys below one that is a section; None for a plain value."""
    for each in (node, *node.get("anyOf", ())):
        if "$ref" in each:
            found = schema["$defs"][each["$ref"].rpartition("/")[2]]
            properties: Mapping[str, Any] | None = found.get("properties")
            return properties
    return None


def _values(schema: Mapping[str, Any], node: Mapping[str, Any]) -> list[str]:
    options = [node, *node.get("anyOf", ())]
    found = [str(value) for each in options for value in each.get("enum", ()) if value is not None]
    return found + (["true", "false"] if any(each.get("type") == "boolean" for each in options) else [])


def _first_sentence(node: Mapping[str, Any]) -> str:
    return str(node.get("description", "")).partition(". ")[0]
