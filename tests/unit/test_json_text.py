"""JSON within bounds, and the seal of a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_lib.json_text import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    parse_json,
    parse_record,
    parse_sealed,
    read_json,
    render_sealed,
)

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DEEP, "nested more than 100 levels"),
        ("[" * 100_000, "nested more than 100 levels"),
        ('{"a":' * 100_000, "nested more than 100 levels"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 100 levels"),
        ("[" * (MAX_CONTAINERS + 1), "more than 4,000,000 lists and objects"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("[1]", "it is not an object"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_what_is_wrong_is_a_value_error_that_says_it(text: str, problem: str, as_bytes: bool) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text.encode() if as_bytes else text, dict, unique=True)


@pytest.mark.parametrize("data", [b"", None, b"\xff", b"[1]", b'{"name": "to', DEEP.encode()])
def test_a_record_that_a_crash_has_cut_is_empty(data: bytes | None) -> None:
    assert parse_record(data) == {}


def test_brackets_in_texts_and_wide_values_are_no_depth(tmp_path: Path) -> None:
    wide = {"text": "[" * 1000, "list": [[], {}] * 1000, "deep": json.loads("[" * 98 + "]" * 98)}
    file = tmp_path / "wide.json"
    file.write_text(json.dumps(wide))
    assert read_json(file) == parse_json(file.read_bytes(), dict) == wide


@pytest.mark.parametrize("change", [('"b": 2', '"b": 3'), ("0.25", "0.26"), ("ä", "a"), ('"seal": "', '"seal": "0')])
def test_a_changed_record_does_not_fit_its_seal(change: tuple[str, str]) -> None:
    record = {"a": [0.25, None, True], "b": 2, "c": {"ä": "ü"}, "d": float("inf")}
    text = render_sealed(record).decode().replace("\\u00e4", "ä")
    assert parse_sealed(text.encode()) == record
    assert parse_sealed(json.dumps(json.loads(text), sort_keys=True).encode()) == record, "the form is free"
    assert change[0] in text
    with pytest.raises(ValueError, match="changed after trainflow wrote it"):
        parse_sealed(text.replace(*change).encode())


def test_a_record_of_an_earlier_version_has_no_seal() -> None:
    assert parse_sealed(b'{"a": 1}') == {"a": 1}
