"""The text of a spec: YAML or JSON, with the lines of its keys, so that errors can name it; and what is wrong with it.

Pydantic's findings are in the words of its user: what, why and what to do, never pydantic's own text. A setting
that takes several types (`processes`: a number or "auto") has one finding per type; they become one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import MASK

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_BYTES = 1 << 20
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


def read_spec_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML or JSON file, and the lines (from 1) of its dotted keys. Raises ConfigError."""
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml_with_lines

    text = _read_text(path)
    data: Any
    lines: dict[str, int] = {}
    try:
        if path.suffix == ".json":
            data = parse_json(text, unique=True)
        else:
            data, lines = parse_yaml_with_lines(text)
            data = {} if data is None else data
    except YamlProblem as error:
        raise _malformed("YAML", error.problem, path, error.line) from error
    except ValueError as error:
        raise _malformed("JSON", getattr(error, "msg", error), path, getattr(error, "lineno", None)) from error
    if not isinstance(data, dict):
        raise ConfigError(
            "A spec is a mapping of keys to values.", field=str(path), remedy="Start it with 'name:' and 'recipe:'."
        )
    return data, lines


def parse_override_value(text: str) -> Any:
    """The value of an override: JSON or YAML after a bracket or a quote, else a YAML scalar. Raises ValueError."""
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml, parse_yaml_scalar

    try:
        return parse_yaml(text) if text[:1] in ("[", "{", '"', "'") else parse_yaml_scalar(text)
    except YamlProblem as error:
        raise ValueError(error.problem) from error


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"The file is larger than {MAX_BYTES} bytes.", field=str(path), remedy="A spec is a small text file."
            )
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("The file is not UTF-8 text.", field=str(path), remedy="Save it as UTF-8.") from error
    except OSError as error:
        # ENOENT and EISDIR.
        reason = {2: "There is no such file.", 21: "This is a folder, not a file."}.get(
            error.errno or 0, str(error.strerror)
        )
        raise ConfigError(reason, field=str(path), remedy="Give the path of a spec (pipeline.yaml).") from error


def _malformed(form: str, problem: object, path: Path, line: int | None) -> ConfigError:
    where = str(path) if line is None else f"{path}, line {line}"
    return ConfigError(f"The file is not valid {form}: {problem}.", field=where, remedy="Correct the file.")


def apply_override(raw: dict[str, Any], text: str) -> str:
    """Set ``a.b=value`` in `raw`; the dotted key. Raises ConfigError for another form."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        what = "An override has the form key=value."
        remedy = "Write for example train.args.seed=1."
        raise ConfigError(what, field=key or "override", value=value_text if equals else None, remedy=remedy)
    try:
        value = parse_override_value(value_text.strip())
    except ValueError as error:
        what = f"This is not a value: {error} (from the command line: {key}=…)."
        raise ConfigError(what, field=key, value=value_text, remedy="Quote it for the shell.") from error
    set_field(raw, key, value, shown=value_text, where=f"from the command line: {key}=…")
    return key


def set_field(raw: dict[str, Any], key: str, value: Any, *, shown: str, where: str) -> None:
    """Set the field with a dotted key in `raw`, and make the sections above it where they are missing.

    Raises ConfigError, with the value as it was `shown` and `where`, if something above the key holds one value.
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
            what = f"'{'.'.join(parts[:depth])}' holds one value, so nothing below it can be set ({where})."
            raise ConfigError(what, field=key, value=shown, remedy=f"Set {'.'.join(parts[:depth])} itself.")
        place = inner
    place[parts[-1]] = value


# -- what pydantic finds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finding:
    """A finding about a key; `wanted` is what the setting takes, None where the value has the right type."""

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
    kinds: list[Any] = [model]
    for name in key.split("."):
        # An optional section is a union with None; one that is a dataclass has its fields under the other name.
        found = (getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", {}) for kind in kinds)
        field: Any = next((fields[name] for fields in found if name in fields), None)
        if field is None:
            return "Correct the value."
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return str(field.description)


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
