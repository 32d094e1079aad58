"""YAML has one home: version 1.2, no key twice, plain data only, and output that every reader understands alike."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from trainer_lib.yaml_text import YamlProblem, dump_yaml, parse_yaml, parse_yaml_scalar, parse_yaml_with_lines


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-1.", -1.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+1", 1),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        *((word, word) for word in ("yes", "no", "on", "off", "y", "N")),
        *((word, word) for word in ("12:30", "2:4", "2026-01-01", "2024_01", "1_000", "=", "nan")),
    ],
)
def test_words_mean_what_the_core_schema_of_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse_yaml(f"key: {text}\n")["key"]
    assert found == value and type(found) is type(value)
    assert parse_yaml_scalar(text) == value


def test_a_version_directive_changes_no_meaning() -> None:
    assert parse_yaml("%YAML 1.1\n---\nstrategy: no\nseed: 010\n") == {"strategy": "no", "seed": 10}


def test_lines_are_counted_through_lists_and_merged_mappings() -> None:
    text = "base: &base\n  x: 1\nlist:\n  - a\n  - b: 2\nmerged:\n  <<: *base\n  y: 3\n"
    data, lines = parse_yaml_with_lines(text)
    assert data["merged"] == {"x": 1, "y": 3}
    assert (lines["base.x"], lines["list.1"], lines["list.1.b"], lines["merged.y"]) == (2, 5, 5, 8)
    assert parse_yaml_with_lines("") == (None, {})


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("a: 1\nb:\n  c: hf_secret\n  c: hf_other\n", "'b.c' is given twice (lines 3 and 4)", 4),
        ("a: [1\n", "expected ',' or ']'", 2),
        ("a: b: c\n", "mapping values are not allowed here", 1),
        ("a:\n\t- 1\n", "cannot start any token", 2),
        ("a: *b\n", "undefined alias 'b'", 1),
        ("--- 1\n--- 2\n", "expected a single document in the stream but found another document", 2),
        ("!!python/object/apply:os.system ['true']\n", "could not determine a constructor", 1),
        ("a: !!int many\n", "a value does not fit its tag", None),
        ("a: &a [*a]\n", "nested too deeply", None),
        ("[" * 1000, "nested too deeply", None),
        ("[" * 100_000, "nested too deeply", None),
        ("- " * 101 + "1", "nested too deeply", None),
        ("{a: " * 101 + "1" + "}" * 101, "nested too deeply", None),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_without_values(text: str, problem: str, line: int | None) -> None:
    with pytest.raises(YamlProblem) as caught:
        parse_yaml(text)
    assert problem in caught.value.problem
    assert caught.value.line == line
    assert "secret" not in str(caught.value) and "other" not in str(caught.value).replace("another", "")


def test_every_reader_understands_what_is_written() -> None:
    data = {
        "language": "no",
        "on": ["yes", "off", "y"],
        "texts": ["1e-3", "0o7", "010", "1_000", "12:30", "2026-01-01", "null", "", "# x", "é: x", "a\nb\n", "="],
        "numbers": [1e-05, 1e20, 0.1, 3, -0.0, float("inf")],
        "nested": {"empty": {}, "none": None, "flags": [True, False]},
    }
    text = dump_yaml(data)
    assert parse_yaml(text) == data
    assert list(parse_yaml(text)) == list(data)
    for version in ("1.1", "1.2"):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(text) == data


def test_a_long_text_stays_on_the_line_of_its_key() -> None:
    data = {"stages": {"prepare-data": "8" * 64}, "text": "word " * 60 + "end"}
    text = dump_yaml(data)
    assert len(text.splitlines()) == 3
    assert f"  prepare-data: '{'8' * 64}'" in text or f"  prepare-data: {'8' * 64}" in text
    assert parse_yaml(text) == data


def test_what_occurs_twice_is_written_twice() -> None:
    shared = [1]
    assert dump_yaml({"a": shared, "b": shared}) == "a:\n- 1\nb:\n- 1\n"
