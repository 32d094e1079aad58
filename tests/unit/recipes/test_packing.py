"""Packing: no token is lost, rows are full, and a document's logits are those that it has alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.texts.packed_batches import (
    WAYS,
    collate_documents,
    collate_packed,
    require_isolation,
)
from trainer_lib.recipes.texts.packing import Document, best_fit_decreasing, new_counts, pack_documents

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def documents(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different."""
    starts = np.cumsum([0, *lengths])
    return [
        Document(f"document {number}", np.arange(starts[number], starts[number + 1])) for number in range(len(lengths))
    ]


def packed(lengths: list[int], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    counts = new_counts()
    chosen = {"length": 16, "overlong": "split", "packed": True, **settings}
    return list(pack_documents(iter(documents(lengths)), counts=counts, **chosen)), counts


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


def test_rows_follow_the_order_of_the_documents_and_no_more_than_a_window_is_held() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300).tolist()
    first, again = packed(lengths)[0], packed(lengths)[0]
    for one, other in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    leading = [int(row["documents"][0]) for row in first]
    assert leading == sorted(leading)
    endless = (Document(str(number), np.arange(5)) for number in range(1_000_000))
    next(pack_documents(endless, length=16, overlong=None, packed=True, counts=new_counts(), window=100))
    assert next(endless).place == "20"


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


# -- batches of packed rows -------------------------------------------------------------------------------------------
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0}
SMALL: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    # As many positions as a row has tokens.
    "gpt2": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "mistral": {**SHAPE, "sliding_window": 4},
    "bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def build(kind: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, use_cache=False, **{**SMALL[kind], **more})
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # large enough that a look at another document would show
    return model.eval()


def some_texts() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 100, length) for length in (9, 4, 12, 1, 7, 15, 3)]


def rows_of(documents: list[np.ndarray], *, length: int = 16) -> list[dict[str, Any]]:
    numbered = (Document(str(number), each) for number, each in enumerate(documents))
    return list(pack_documents(numbered, length=length, overlong=None, packed=True, counts=new_counts()))


@pytest.mark.parametrize(
    ("kind", "isolate"), [("llama", "positions"), ("llama", "mask"), ("gpt2", "positions"), ("mistral", "positions")]
)
def test_a_document_has_the_logits_and_the_loss_that_it_has_alone(kind: str, isolate: str) -> None:
    model, documents = build(kind), some_texts()
    assert model.config._attn_implementation == "sdpa"
    rows = rows_of(documents)
    assert len(rows) < len(documents)
    batch = collate_packed(rows, pad=0, isolate=isolate)
    padded = collate_documents([{"input_ids": each, "lengths": [len(each)]} for each in documents], pad=0)
    assert batch["input_ids"].shape == (len(rows), 16)
    with torch.no_grad():
        alone = [model(input_ids=torch.from_numpy(each)[None]).logits[0] for each in documents]
        packed_rows, one_by_one = model(**batch), model(**padded)
    for place, row in enumerate(rows):
        for number, start in zip(row["documents"], np.cumsum(row["lengths"]) - row["lengths"], strict=True):
            there = packed_rows.logits[place, start : start + len(documents[number])]
            torch.testing.assert_close(there, alone[number], atol=2e-5, rtol=1e-5)
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(tokens)[1:], reduction="none")
        for logits, tokens in zip(alone, documents, strict=True)
    ]
    nats = torch.cat(losses)
    assert len(nats) == sum(len(each) - 1 for each in documents)
    assert int((batch["labels"] != -100).sum()) == len(nats)
    for outputs in (packed_rows, one_by_one):
        assert float(outputs.loss) == pytest.approx(float(nats.mean()), rel=1e-5)


def test_the_mask_is_block_diagonal_and_padding_sees_itself() -> None:
    row = {"input_ids": np.array([5, 6, 7]), "lengths": np.array([2, 1])}
    longer = {"input_ids": np.array([1, 2, 3, 4]), "lengths": np.array([4])}
    batch = collate_packed([row, longer], pad=9, isolate="mask")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100], [-100, 2, 3, 4]]
    assert batch["attention_mask"].int().tolist()[0] == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    assert torch.equal(batch["attention_mask"][1, 0], torch.ones(4, 4, dtype=torch.bool).tril())


# -- models that mix documents ----------------------------------------------------------------------------------------
def check(model: Any, isolate: str) -> None:
    require_isolation(model, vocabulary=100, length=16, isolate=isolate)


@pytest.mark.parametrize("isolate", WAYS)
def test_models_that_mix_documents_are_refused(isolate: str) -> None:
    check(build("llama"), isolate)
    for kind in ("bloom", "mamba"):
        with pytest.raises(ConfigError, match="cannot train on packed rows") as caught:
            check(build(kind), isolate)
        assert "prepare.options.pack=[]" in str(caught.value.remedy)


def test_a_cache_hides_the_positions_and_a_mask_the_window() -> None:
    cached = build("llama")
    cached.config.use_cache = True
    with pytest.raises(ConfigError, match="change with the document in front of it"):
        check(cached, "positions")
    check(build("mistral"), "positions")
    with pytest.raises(ConfigError, match="replaces its window of 4 tokens"):
        check(build("mistral"), "mask")


class Counting(torch.nn.Module):
    """Counts positions over the whole row, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(100, 100), torch.nn.Embedding(64, 100)

    def forward(self, input_ids: Any, position_ids: Any = None) -> dict[str, Any]:
        return {"logits": self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))}


def test_a_model_whose_positions_run_on_is_refused_and_one_that_takes_none() -> None:
    with pytest.raises(ConfigError, match="change with the place of the document"):
        check(Counting(), "positions")
    with pytest.raises(ConfigError, match="takes no attention_mask"):
        check(Counting(), "mask")
    with torch.device("meta"):
        check(Counting(), "positions")  # there is nothing to compare
