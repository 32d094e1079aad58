"""A short, repeatable run of the fuzzer (`make fuzz` runs it for minutes), and that it finds what it looks for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import fuzz
from tests.support.fuzz import Target, in_json
from tests.support.fuzz_targets import targets
from trainer_lib.errors import CodeError, DamagedError


def test_no_reader_of_a_checkpoints_bytes_is_broken_by_what_it_reads(tmp_path: Path) -> None:
    found = targets(tmp_path)
    slow = {name: target for name, target in found.items() if name.startswith("resume")}
    for some, cases in ((slow, 2), ({name: found[name] for name in found.keys() - slow.keys()}, 20)):
        outcome = fuzz.fuzz(some, seed=0, cases=cases)
        assert outcome.crashes == []
        assert set(outcome.cases.values()) == {cases}


def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda data: data["absent"], "TypeError"),
        (lambda data: bytearray(8 * 2**30), "MemoryError"),
        (lambda data: _raises(CodeError("somebody's", remedy="fix it")), "CodeError"),
        (lambda data: _raises(DamagedError("no remedy here")), "without a remedy"),
        (lambda data: [None for _ in iter(int, 1)], "TooSlow"),
    ],
    ids=["untyped", "memory", "code", "no remedy", "endless"],
)
def test_the_fuzzer_finds_what_it_looks_for(read: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    target = Target(read, [b'{"a": 1}'], in_json)
    outcome = fuzz.fuzz({"one": target}, seed=0, cases=1)
    assert found in outcome.crashes[0]["error"]


def test_the_same_seed_makes_the_same_inputs() -> None:
    data = json.dumps({"a": [1, {"b": "text"}], "c": None}).encode()
    one, other = (
        [mutate(random.Random(number), data) for number in range(50) for mutate in (in_json, fuzz.in_bytes)]
        for _ in range(2)
    )
    assert one == other
    assert len(set(one)) > 50
