"""Convert a value from YAML, JSON or the command line to a field's declared type, and back to plain JSON values.

`"1e-3"` becomes a float for a float, `"true"` a bool for a bool, `"none"` None where None is allowed, and YAML's
`no` (which YAML 1.1 reads as False) the text "no" where that is one of the choices. Nothing else is guessed: 8.5 is
not an integer, and 1 is not a text. (pydantic's TypeAdapter was tried in place of this file: docs/log.md.)
"""

from __future__ import annotations

import contextlib
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from trainer_lib.arguments.fields import Declaration, Unset, declarations, field_hints, field_map
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import require_known, suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.secrets import may_be_secret_name

# The words of transformers' argument parser, and YAML's on and off.
TRUE_WORDS = frozenset({"true", "yes", "on", "y", "t", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "n", "f", "0"})
NONE_WORDS = frozenset({"none", "null", "~"})


def coerce(value: Any, hint: Any, *, field: str) -> Any:
    """Return `value` converted to the type `hint`; as it is for a type that is not known here. Raises ConfigError."""
    if hint is Any or hint is object or isinstance(hint, (str, typing.TypeVar, typing.ForwardRef)):
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(value, typing.get_args(hint), field)
    if origin is typing.Literal:
        return _literal(value, typing.get_args(hint), field)
    if origin is typing.Annotated:
        return coerce(value, typing.get_args(hint)[0], field=field)
    kind = origin if isinstance(origin, type) else hint
    if not isinstance(kind, type):
        return value
    return _of_class(value, kind, hint, field)


def _of_class(value: Any, kind: type, hint: Any, field: str) -> Any:
    simple: dict[type, Callable[[Any, str], Any]] = {bool: _bool, int: _int, float: _float, str: _str}
    if kind in simple:
        return simple[kind](value, field)
    if issubclass(kind, Enum):
        return _enum(value, kind, field)
    if kind in (list, tuple, set, frozenset, Sequence):
        return _sequence(value, kind, hint, field)
    if kind in (dict, Mapping):
        return _dict(value, field)
    if issubclass(kind, Path):
        return Path(value)
    if kind is type(None):
        if value is None or (isinstance(value, str) and value.strip().lower() in NONE_WORDS):
            return None
        raise _refused("Only none is allowed here", "none", value, field)
    return value


def _union(value: Any, options: tuple[Any, ...], field: str) -> Any:
    optional = type(None) in options
    kinds = [option for option in options if option is not type(None)]
    if any(option is Any or option is object for option in kinds):
        return value
    if value is None and optional:
        return None
    if isinstance(value, str) and not isinstance(value, Enum) and optional:
        word = value.strip().lower()
        if word in NONE_WORDS or (word == "" and str not in kinds):
            return None
    # The error of a single candidate is more precise than one about the whole union.
    failures: list[ConfigError] = []
    for kind in sorted(kinds, key=lambda kind: _rank(kind, value)):
        if kind is str and any(isinstance(other, type) and issubclass(other, Enum) for other in kinds):
            continue  # `SchedulerType | str`: the text must be one of the enum's
        if kind is bool and str in kinds and isinstance(value, str) and value.strip().lower() not in ("true", "false"):
            continue  # `bool | str`: a folder may be called "on" or "1"
        try:
            return coerce(value, kind, field=field)
        except ConfigError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    wanted = " or ".join(_name(option) for option in options)
    raise _refused(f"The value has the wrong type ({type(value).__name__})", wanted, value, field)


def _rank(kind: Any, value: Any) -> int:
    """The order in which the members of a union are tried: an exact match first, then the most specific text."""
    base = typing.get_origin(kind) or kind
    if not isinstance(value, str) and isinstance(base, type) and type(value) is base:
        return -1
    if isinstance(value, str) and isinstance(base, type) and issubclass(base, (list, tuple, set)):
        return 3 if value.strip().startswith("[") else 9
    if isinstance(value, str) and base in (bool, int):
        # "1" is a number wherever a number is allowed, and text ("auto") is neither
        return {bool: 2, int: 0}[base]
    order: dict[Any, int] = {float: 1, dict: 4, str: 5}
    return order.get(base, 0)


def _bool(value: Any, field: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
    if isinstance(value, numbers.Integral) and int(value) in (0, 1):
        return bool(value)
    raise _refused("This is not a truth value", "true or false", value, field)


def _int(value: Any, field: str) -> int:
    if isinstance(value, Unset):
        return value
    number = _number(value)
    if number is None or not math.isfinite(number) or number != int(number):
        raise _refused("This is not a whole number", "a whole number", value, field)
    return int(number)


def _float(value: Any, field: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise _refused("This is not a finite number", "a number, such as 0.001 or 1e-3", value, field)
    return float(number)


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):  # a bool is an int in Python, but `true` steps are a mistake
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if not isinstance(value, str):
        return None
    for parse in (int, float):
        try:
            return parse(value.strip())
        except ValueError:
            continue
    return None


def _str(value: Any, field: str) -> str:
    if isinstance(value, Enum) and isinstance(value.value, str):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise _refused(f"This is not text ({type(value).__name__})", 'text; in YAML put it in quotes ("…")', value, field)


def _enum(value: Any, kind: type[Enum], field: str) -> Enum:
    if isinstance(value, kind):
        return value
    texts = [str(member.value) for member in kind]
    if value is False and "no" in texts:
        return kind("no")  # YAML 1.1 reads a bare `no` as False
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        word = value.strip()
        by_text = {member.name.lower(): member for member in kind}
        by_text |= {str(member.value).lower(): member for member in kind}  # "lion" is a value, and LION another's name
        if word.lower() in by_text:
            return by_text[word.lower()]
        remedy = suggestion(word.lower(), texts)
        raise ConfigError("This is not one of the choices.", field=field, value=value, remedy=remedy)
    raise _refused(f"The value has the wrong type ({type(value).__name__})", "one of " + ", ".join(texts), value, field)


def _literal(value: Any, options: tuple[Any, ...], field: str) -> Any:
    for option in options:
        if value == option and type(value) is type(option):  # 1 == True
            return option
    for option in options:
        if str(option).lower() == str(value).strip().lower():
            return option
    remedy = suggestion(str(value), [str(option) for option in options])
    raise ConfigError("This is not one of the choices.", field=field, value=value, remedy=remedy)


def _sequence(value: Any, kind: type, hint: Any, field: str) -> Any:
    if isinstance(value, str):
        text = value.strip()
        value = _json(text, field) if text.startswith("[") else [part.strip() for part in text.split(",") if part]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _refused(f"This is not a list ({type(value).__name__})", "a list, such as [a, b]", value, field)
    inner = typing.get_args(hint)
    element = inner[0] if inner else Any
    items = [coerce(item, element, field=field) for item in value]
    return items if kind in (list, Sequence) else kind(items)


def _dict(value: Any, field: str) -> dict[str, Any]:
    if isinstance(value, str) and value.strip().startswith("{"):
        value = read_json_mapping(value.strip(), field=field)
    if isinstance(value, dict) and type(value) is not dict:
        return value  # a class of its own, which code may hold on to: `args.accelerator_config.split_batches = True`
    if isinstance(value, Mapping):
        return dict(value)
    convert = getattr(value, "to_dict", None)
    if callable(convert) and not isinstance(value, type):
        return dict(convert())
    raise _refused(f"This is not a mapping ({type(value).__name__})", 'a mapping, such as {"key": 1}', value, field)


def read_json_mapping(text: str, *, field: str) -> dict[str, Any]:
    """A mapping written as JSON on a command line; texts become the numbers and truth values that they spell."""
    found: dict[str, Any] = _json(text, field)
    return {key: _typed(value) for key, value in found.items()}


def read_mapping(path: Path, *, field: str) -> dict[str, Any]:
    """The mapping in a JSON (`.json`) or YAML (any other suffix) file, which `field` names. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        what = f"The file cannot be read: {reason}."
        raise ConfigError(what, field=field, value=str(path), remedy="Check the path.") from None
    from trainer_lib.base.yaml_text import parse_yaml  # costs 20 ms, and few runs have such a file

    try:
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        what = f"The file cannot be parsed: {' '.join(str(error).split())}."
        raise ConfigError(what, field=field, value=str(path), remedy="Correct the file.") from None
    # YAML also takes numbers and dates as keys.
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        what = f"The file holds no mapping of names to values, but {type(values).__name__}."
        raise ConfigError(what, field=field, value=str(path), remedy="Write one `name: value` per line.")
    return values


def _typed(value: Any) -> Any:
    """Quotes around everything are a habit of shells: "true" and "2" mean the truth value and the number."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    number = _number(word) if word.replace(".", "", 1).isdigit() else None
    return value if number is None else number


def _json(text: str, field: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        remedy = "Use double quotes around names and texts."
        raise ConfigError(f"This is not JSON ({error}).", field=field, value=text, remedy=remedy) from None


def _name(hint: Any) -> str:
    if hint is type(None):
        return "none"
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)


def _refused(what: str, wanted: str, value: Any, field: str) -> ConfigError:
    return ConfigError(f"{what}.", field=field, value="none" if value is None else value, remedy=f"Give {wanted}.")


_SIGNS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("above", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("below", lambda value, bound: value < bound),
}


def coerce_fields(args: Any) -> None:
    """Convert every field of a dataclass to its declared type. Raises ConfigError.

    A field that a subclass adds is its own: a text is converted where it fits, and any other value stays.
    """
    cls: type = type(args)
    hints, declared = field_hints(cls), declarations(cls)
    texts = tuple(getattr(cls, "_VALID_DICT_FIELDS", ()))
    for name in field_map(args):
        value, known = getattr(args, name), declared[name]
        if isinstance(value, str) and value == f"<{name.upper()}>" and (known.secret or may_be_secret_name(name)):
            value = None  # `to_dict` writes this in place of a secret
        if isinstance(value, str) and value.startswith("{") and name in texts:
            value = read_json_mapping(value, field=name)
        if known.by_arg:
            value = coerce(value, hints.get(name, Any), field=name)
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
            remedy = f"Give a number {'of ' if words.startswith('at') else ''}{words} {bound}."
            raise ConfigError(f"The number must be {words} {bound}.", field=name, value=value, remedy=remedy)
    choices = declared.choices
    for word in value if isinstance(value, list | tuple | set) else [value]:
        if choices and type(word) is not bool and isinstance(word, str | int | float):
            require_known(word, choices, field=name)


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
