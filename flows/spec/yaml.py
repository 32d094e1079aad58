"""YAML as people mean it: the 1.2 core rules (`no` is a word, 1e-3 a number), no repeated keys, lines remembered.

PyYAML follows YAML 1.1, where ``eval_strategy: no`` is False and ``learning_rate: 1e-3`` is a string. Only plain data
is built: no tags, no objects.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 100_000  # an alias of an alias of an alias ... is small in the file and endless in memory

_STRING = "tag:yaml.org,2002:str"
_RULES = [
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN))$"
        ),
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core rules."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(node.value)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _float(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(node.value).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML or JSON file, and the line (from 1) of every dotted key.

    Raises:
        ConfigError: not there, not a file, larger than 1 MiB, not UTF-8, malformed, a repeated key, or not a mapping.
    """
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


def parse_value(text: str) -> Any:
    """The value of an override: JSON or YAML where it begins with a bracket or a quote, else a YAML scalar.

    Raises:
        ValueError: brackets or quotes that do not close.
    """
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            raise ValueError(_problem(error)) from error
    tag = next((tag for tag, pattern, _ in _RULES if pattern.match(text)), _STRING)
    return _Loader("").construct_object(yaml.ScalarNode(tag, text))


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"Larger than {MAX_BYTES} bytes.", field=str(path), remedy="A spec is a small text file.")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("Not UTF-8 text.", field=str(path), remedy="Save it as UTF-8.") from error
    except OSError as error:
        reason = {2: "There is no such file.", 21: "A folder, not a file."}.get(error.errno or 0, str(error.strerror))
        raise ConfigError(reason, field=str(path), remedy="Give the path of a spec (pipeline.yaml).") from error


def _load_json(path: Path, text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"The key '{key}' is given twice.", field=str(path), remedy="Remove one of the two.")
        return dict(items)

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"Not valid JSON: {error.msg}.", field=f"{path}, line {error.lineno}", remedy="Correct the file."
        ) from error


def _load_yaml(path: Path, text: str) -> tuple[Any, dict[str, int]]:
    lines: dict[str, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return {}, lines
        _walk(path, node, "", lines)
        return yaml.load(text, Loader=_Loader), lines  # noqa: S506 - a SafeLoader
    except RecursionError as error:
        raise ConfigError("Nested too deeply.", field=str(path), remedy="Correct the file.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(path) if mark is None else f"{path}, line {mark.line + 1}"
        raise ConfigError(f"Not valid YAML: {_problem(error)}.", field=where, remedy="Correct the file.") from error


def _walk(path: Path, node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    """Remember each key's line; refuse a key given twice, which PyYAML would silently let win."""
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    else:
        return
    seen: set[str] = set()
    for name, marked, value in children:
        key = f"{prefix}.{name}" if prefix else name
        line = marked.start_mark.line + 1
        if name in seen and name != "<<":
            raise ConfigError(
                f"'{key}' is given twice (lines {lines[key]} and {line}).",
                field=str(path),
                remedy="Remove one of them.",
            )
        seen.add(name)
        lines[key] = line
        if len(lines) > MAX_NODES:
            raise ConfigError("Its aliases expand without end.", field=str(path), remedy="Write the values out.")
        _walk(path, value, key, lines)


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]
