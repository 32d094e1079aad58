"""YAML 1.2 as plain data: the one place that reads and writes it.

Specs, files of arguments, configurations of accelerate and DeepSpeed, and model cards all follow these rules:

* the core schema of YAML 1.2: ``no``, ``on`` and ``12:30`` are text, ``1e-3`` is a number, ``010`` is ten. Where a
  truth value is declared, `trainer_lib.arguments.coerce` accepts ``yes``, ``no``, ``on`` and ``off`` as well;
* numbers without underscores and dates are text: ``run_name: 2024_01`` keeps its name;
* a key given twice is refused, with both lines;
* no tags that build objects, and no aliases that expand without end.
"""

from __future__ import annotations

import io
import re
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers
from typing_extensions import override

MAX_NODES = 100_000  # an alias of an alias of an alias ... is small in the file and endless in memory
MAX_DEPTH = 100

_TAG = "tag:yaml.org,2002:"
_Words = dict[str, list[tuple[str, re.Pattern[str]]]]  # tag and pattern, by the first character of a word
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# What a plain word means, tried in this order: tag, pattern, first characters. https://yaml.org/spec/1.2.2/#103-core-schema
_CORE_SCHEMA = (
    (f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (f"{_TAG}int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (f"{_TAG}float", re.compile(rf"^(?:{_FLOAT})$"), list("-+.0123456789")),
    (f"{_TAG}merge", re.compile(r"^<<$"), ["<"]),
)


class YamlProblem(ValueError):
    """Text that is not the YAML described above, in `line` (None: as a whole); callers make a ConfigError of it."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem = problem
        self.line = line


class Tagged(str):
    """A text with the tag that the caller of `parse_yaml` allows."""


def parse_yaml(text: str, *, tag: str | None = None) -> Any:
    """Return the one document in `text` as plain data; None for an empty text. Raises YamlProblem.

    Texts with the tag `tag` become `Tagged`.
    """
    return parse_yaml_with_lines(text, tag=tag)[0]


def parse_yaml_with_lines(text: str, *, tag: str | None = None) -> tuple[Any, dict[str, int]]:
    """Return the document in `text`, as `parse_yaml`, and the line (from 1) of every dotted key and list index."""
    reader = YAML(typ="safe", pure=True)
    reader.Resolver = _CoreSchema
    reader.Constructor = _PlainConstructor
    if tag is not None:
        reader.Constructor = type("_TaggedConstructor", (_PlainConstructor,), {})
        reader.Constructor.add_constructor(tag, lambda self, node: Tagged(self.construct_scalar(node)))
    lines: dict[str, int] = {}
    try:
        node = reader.compose(text)
        if node is None:
            return None, lines
        _collect_lines(node, "", lines, MAX_DEPTH)
        return reader.constructor.construct_document(node), lines
    except RecursionError:
        raise YamlProblem("nested too deeply") from None
    except YAMLError as error:
        raise _as_problem(error) from None
    except YamlProblem:
        raise
    except ValueError:  # a tag that its text does not fit: `!!int many`
        raise YamlProblem("a value does not fit its tag") from None


def parse_yaml_scalar(text: str) -> Any:
    """What a plain word means: a number, a truth value, None, or the text itself, such as ``#fff``."""
    tag = next((tag for tag, pattern, _ in _CORE_SCHEMA if pattern.match(text)), f"{_TAG}str")
    return _PlainConstructor().construct_object(ScalarNode(tag, text))


def dump_yaml(data: Any) -> str:
    """Plain data as block-style YAML with the keys in their order, alike to readers of YAML 1.1 and of 1.2."""
    writer = YAML(typ="safe", pure=True)
    writer.Resolver = _EveryVersion
    writer.Representer = _PlainRepresenter
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    # Otherwise a line over 80 characters is folded: a digest stands below its key, with a blank at the line's end.
    writer.width = 1 << 20
    out = io.StringIO()
    writer.dump(data, out)
    return out.getvalue()


def _by_first_character(*rules: tuple[str, re.Pattern[str], list[str]]) -> _Words:
    words: _Words = {}
    for tag, pattern, first in rules:
        # ruamel looks up its rules by the first character of a word.
        for character in first:
            words.setdefault(character, []).append((tag, pattern))
    return words


# The library's own rules, of YAML 1.1 and 1.2.
_ALL_VERSIONS: Any = [tuple(rule[1:]) for rule in implicit_resolvers]


class _CoreSchema(VersionedResolver):
    """Decides what a plain word means, whatever version a directive in the file names."""

    words: ClassVar[_Words] = _by_first_character(*_CORE_SCHEMA)

    @property
    @override
    def versioned_resolver(self) -> _Words:
        return self.words


class _EveryVersion(_CoreSchema):
    """Recognizes each word that some version of YAML reads as more than text, so that such a text is quoted."""

    words: ClassVar[_Words] = _by_first_character(*_CORE_SCHEMA, *_ALL_VERSIONS)


class _PlainConstructor(SafeConstructor):
    """Builds plain data; keeps the whole number `010` ten, whatever version a directive in the file names."""


def _construct_int(constructor: SafeConstructor, node: ScalarNode) -> int:
    text = str(node.value)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _construct_float(constructor: SafeConstructor, node: ScalarNode) -> float:
    return float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan"))


_PlainConstructor.add_constructor(f"{_TAG}int", _construct_int)
_PlainConstructor.add_constructor(f"{_TAG}float", _construct_float)


class _PlainRepresenter(SafeRepresenter):
    """Writes plain data, and a list or mapping that occurs twice in full twice."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True

    @override
    def represent_float(self, data: float) -> ScalarNode:
        node: ScalarNode = super().represent_float(data)
        if "." not in node.value:  # YAML 1.1 reads 1e-05 as text, and 1.0e-05 as a number
            node.value = node.value.replace("e", ".0e", 1)
        return node


_PlainRepresenter.add_representer(float, _PlainRepresenter.represent_float)


def _collect_lines(node: Node, prefix: str, lines: dict[str, int], depth: int) -> None:
    """Record each key's line, and refuse a key that its mapping gives twice, and more than `depth` further levels."""
    if isinstance(node, SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    else:
        return
    if depth == 0:
        raise YamlProblem("nested too deeply")
    seen: set[str] = set()
    for name, marked, value in children:
        key = f"{prefix}.{name}" if prefix else name
        line = marked.start_mark.line + 1
        # A mapping may have several merge keys.
        if name in seen and name != "<<":
            raise YamlProblem(f"'{key}' is given twice (lines {lines[key]} and {line})", line)
        seen.add(name)
        lines[key] = line
        if len(lines) > MAX_NODES:
            raise YamlProblem("its aliases expand without end")
        _collect_lines(value, key, lines, depth - 1)


def _as_problem(error: YAMLError) -> YamlProblem:
    # Only `problem` is quoted: the rest of the library's text shows lines of the file, which may hold a secret.
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    problem = str(getattr(error, "problem", None) or error).strip().splitlines()[0]
    if problem.startswith("but "):
        problem = f"{getattr(error, 'context', '')} {problem}"
    return YamlProblem(problem, None if mark is None else mark.line + 1)
