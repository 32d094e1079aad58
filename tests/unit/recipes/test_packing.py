"""Packing: no token is lost, rows are full, and equal documents give equal rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.packing import Document, best_fit_decreasing, new_counts, pack_documents

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def documents(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different."""
    starts = np.cumsum([0, *lengths])
    return [
        Document(f"document {number}", np.arange(starts[number], starts[number + 1])) for number in range(len(lengths))
    ]


def packed(lengths: list[int], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    counts = new_counts()
    given_settings = {"length": 16, "overlong": "split", "packed": True, **settings}
    return list(pack_documents(iter(documents(lengths)), counts=counts, **given_settings)), counts


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.integers(1, 20), st.integers(1, 200), st.booleans(), st.sampled_from(["split", "drop"]))
def test_no_token_is_lost_or_there_twice(
    lengths: list[int], length: int, window: int, share: bool, policy: str
) -> None:
    rows, counts = packed(lengths, length=length, window=window, packed=share, overlong=policy)
    kept = [each for each in documents(lengths) if policy == "split" or len(each.tokens) <= length]
    tokens = Counter(int(token) for row in rows for token in row["input_ids"])
    assert tokens == Counter(int(token) for each in kept for token in each.tokens)
    # Pieces are whole, in order, and say which document they are of.
    put_together: dict[int, list[int]] = {}
    for row in rows:
        assert 0 < len(row["input_ids"]) == row["lengths"].sum() <= length
        assert len(row["lengths"]) == len(row["documents"])
        for number, piece in zip(
            row["documents"], np.split(row["input_ids"], np.cumsum(row["lengths"])[:-1]), strict=True
        ):
            put_together.setdefault(int(number), []).extend(piece.tolist())
    for number, each in enumerate(documents(lengths)):
        assert sorted(put_together.get(number, [])) == (
            [] if policy == "drop" and len(each.tokens) > length else each.tokens.tolist()
        )
    lost = sum(lengths) - sum(tokens.values())
    assert counts == {
        "documents": len(lengths),
        "documents_split": sum(each > length for each in lengths) if policy == "split" else 0,
        "documents_dropped": len(lengths) - len(kept) if policy == "drop" else 0,
        "tokens_in": sum(lengths),
        "tokens_out": sum(tokens.values()),
        "tokens_lost": lost,
        "rows": len(rows),
        "padding": len(rows) * length - sum(tokens.values()),
    }


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 16), max_size=80))
def test_rows_are_as_best_fit_says_and_no_two_of_them_would_fit_in_one(lengths: list[int]) -> None:
    rows = best_fit_decreasing(lengths, 16)
    used = sorted(sum(lengths[piece] for piece in row) for row in rows)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(size <= 16 for size in used)
    assert len(used) < 2 or used[0] + used[1] > 16
    # By the definition, each piece in turn into the fullest row that takes it.
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [each for each in room if each >= length]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else 16) - length)
    assert used == sorted(16 - each for each in room)


def test_equal_documents_give_equal_rows_in_the_order_of_the_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300).tolist()
    first, again = packed(lengths)[0], packed(lengths)[0]
    for one, other in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    leading = [int(row["documents"][0]) for row in first]
    assert leading == sorted(leading)


def test_no_more_than_a_window_is_held() -> None:
    seen: list[int] = []

    def endless() -> Any:
        for number in range(1_000_000):
            seen.append(number)
            yield Document(str(number), np.arange(5))

    rows = pack_documents(endless(), length=16, overlong=None, packed=True, counts=new_counts(), window=100)
    next(rows)
    assert len(seen) == 20


def test_an_overlong_document_without_a_policy_is_refused_by_name() -> None:
    for policy, said in ((None, "a row has 16."), ("refuse", "the policy is to refuse it")):
        with pytest.raises(DataError, match="document 1: the document has 17 tokens") as caught:
            packed([3, 17], overlong=policy)
        assert said in caught.value.message
        assert "overlong=split" in str(caught.value.remedy)
    assert packed([3, 16], overlong=None)[1]["rows"] == 2, "nothing is too long"
    with pytest.raises(ConfigError, match="not one of the choices") as wrong:
        packed([3], overlong="spilt")
    assert 'Did you mean "split"?' in str(wrong.value.remedy)
