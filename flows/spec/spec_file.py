"""The text of a spec: YAML or JSON, with the lines of its keys, so that an error can name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError

MAX_BYTES = 1 << 20


def read_spec_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML or JSON file, and the lines (from 1) of its dotted keys. Raises ConfigError."""
    text = _read_text(path)
    if path.suffix == ".json":
        data, lines = _load_json(path, text), dict[str, int]()
    else:
        data, lines = _load_yaml(path, text)
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


def _load_json(path: Path, text: str) -> Any:
    try:
        return parse_json(text, unique=True)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        what = f"The file is not valid JSON: {getattr(error, 'msg', error)}."
        remedy = "Correct the file."
        raise ConfigError(what, field=str(path) if line is None else f"{path}, line {line}", remedy=remedy) from error


def _load_yaml(path: Path, text: str) -> tuple[Any, dict[str, int]]:
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml_with_lines

    try:
        data, lines = parse_yaml_with_lines(text)
    except YamlProblem as error:
        where = str(path) if error.line is None else f"{path}, line {error.line}"
        raise ConfigError(
            f"The file is not valid YAML: {error.problem}.", field=where, remedy="Correct the file."
        ) from error
    return ({} if data is None else data), lines


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
