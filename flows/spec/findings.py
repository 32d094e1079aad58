"""Pydantic's findings about a spec, in the words of its user: what, why and what to do, never pydantic's own text.

A setting that takes several types (`processes`: a number or "auto") has one finding per type; they become one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import MASK

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# The first word of pydantic's error type -> what the setting takes, as an answer to "This is not ...".
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of names to values",
    "mapping": "a mapping of names to values",
    "model": "a section with its own settings",
    "dataclass": "a section with its own settings",
}
_REMEDIES = {
    "text": 'Give text; a number or a truth value in quotes ("5").',
    "a list": "Give a list: [a, b].",
    "a mapping of names to values": "Give names with values: {{name: value}}, or {key}.NAME=value on the command line.",
    "a section with its own settings": "Set what is below it: {key}.NAME.",
}
# Our own error types: their context holds the remedy.
_OWN = {
    "unknown_key": "Unknown key.",
    "requirement": "This is not a requirement.",
    "duration": "This is not a duration.",
    "recipe_name": "No recipe has this name.",
    "sweep": "This sweep cannot work.",
    "metric": "This is not a metric.",
    "place": "This is not the name of a place.",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class _Finding:
    """One finding about one key.

    Attributes:
        message: what is wrong.
        remedy: what to do.
        wanted: what the setting takes, if the value is of another type; None if the value itself is wrong.
    """

    message: str
    remedy: str
    wanted: str | None = None


def spec_error(error: ValidationError, raw: Mapping[str, Any], model: type[BaseModel]) -> ConfigError:
    """Pydantic's findings about `raw` as one ConfigError: the first key in full, the others by name."""
    found: dict[str, list[_Finding]] = {}
    values: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        location = list(item["loc"])
        # Our own error type (trainflow.tasks.configs): its location is the mapping, and the key is in the context.
        if item["type"] == "unknown_key":
            location.append(item["ctx"]["key"])
        key, value = _follow(raw, location)
        found.setdefault(key, []).append(_finding(item, key, value, model))
        values[key] = value
    key, findings = next(iter(found.items()))
    first = _joined(values[key], findings)
    others = f" (Also wrong: {', '.join(list(found)[1:])}.)" if len(found) > 1 else ""
    # An address of a chat is a secret, in whatever form it stands there.
    value = MASK if key == "notify" or key.startswith("notify.to") else values[key]
    return ConfigError(f"{first.message}{others}", field=key, value=value, remedy=first.remedy)


def _finding(item: ErrorDetails, key: str, value: Any, model: type[BaseModel]) -> _Finding:
    kind, context = item["type"], item.get("ctx", {})
    if kind in _OWN:
        return _Finding(str(context.get("problem", _OWN[kind])), str(context["hint"]))
    if kind == "missing":
        return _Finding("This key is required.", "Add it to the spec.")
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit = f"{words} {context[bound]:g}"
        return _Finding(f"The number must be {limit}.", f"Give a number {limit}.".replace("number at", "number of at"))
    if kind == "literal_error":
        choices = [word.strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return _Finding(
            "This is not one of the choices.", suggestion(str(value), choices), " or ".join(f'"{c}"' for c in choices)
        )
    if kind == "string_pattern_mismatch":
        return _Finding("This text does not have the form that is needed.", _describe(key, model))
    if kind in ("string_too_short", "too_short"):
        return _Finding("There must be at least 1 entry.", f"Fill it, or remove {key}.")
    if item["loc"][-1] == "[key]":  # pydantic's mark for a mapping's name, in place of its value
        return _Finding("A name has to be text.", 'Put the name in quotes ("5").')
    wanted = _KINDS.get(kind.partition("_")[0])
    if wanted is None:
        return _Finding(f"{item['msg']}.", "Correct the value.")
    remedy = _REMEDIES.get(wanted, f"Give {wanted}.").format(key=key)
    if wanted == "a list" and isinstance(value, str):
        remedy = f"Give a list: [{value}]."
    # "This is neither true nor false."
    what = f"This is not {wanted}." if kind[:4] != "bool" else "This is neither true nor false."
    return _Finding("There is no value." if value is None else what, remedy, wanted)


def _joined(value: Any, findings: Sequence[_Finding]) -> _Finding:
    """One finding of those that the types of one setting gave."""
    if len(findings) == 1:
        return findings[0]
    # A value of the right type that is too small says more than "this is not a text either".
    of_the_value = [finding for finding in findings if finding.wanted is None]
    if of_the_value:
        return of_the_value[0]
    wanted = list(dict.fromkeys(finding.wanted for finding in findings if finding.wanted))
    if len(wanted) == 1 or value is None:
        return findings[0]
    either = f"{', '.join(wanted[:-1])} nor {wanted[-1]}"
    return _Finding(f"This is neither {either}.", f"Give {' or '.join(wanted)}.")


def _describe(key: str, model: type[BaseModel]) -> str:
    """The description of a setting, which says what form its text has."""
    kind: Any = model
    *sections, name = key.split(".")
    for section in sections:
        fields = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", {})
        field = fields.get(section)
        kind = _settings_class(None if field is None else field.annotation)
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", {})
    return str(fields[name].description) if name in fields else "Correct the value."


def _settings_class(annotation: Any) -> Any:
    """The class with the fields of a section; an optional section is a union with None."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    known = ("model_fields", "__pydantic_fields__")
    return next((option for option in options if any(hasattr(option, name) for name in known)), None)


def _follow(raw: Any, location: Sequence[str | int]) -> tuple[str, Any]:
    """The dotted key that pydantic's location means, without the names of union members, and the value there."""
    parts: list[str] = []
    value = raw
    for part in location:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Mapping) and len(parts) == len(location) - 1:
            value = None  # the missing key itself
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
        parts.append(str(part))
    return ".".join(parts) or "spec", value
