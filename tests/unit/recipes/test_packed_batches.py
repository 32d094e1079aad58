"""Packed batches: a document's logits are those that it has alone, and models that mix documents are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.packed_batches import (
    WAYS,
    collate_documents,
    collate_packed,
    flatten_batch,
    require_isolation,
)
from trainer_lib.recipes.packing import Document, new_counts, pack_documents

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "gpt2": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
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


def texts() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 100, length) for length in (9, 4, 12, 1, 7, 15, 3)]


def rows_of(documents: list[np.ndarray], *, length: int = 16) -> list[dict[str, Any]]:
    found = (Document(str(number), each) for number, each in enumerate(documents))
    return list(pack_documents(found, length=length, overlong=None, packed=True, counts=new_counts()))


@pytest.mark.parametrize(
    ("kind", "isolate"), [("llama", "positions"), ("llama", "mask"), ("gpt2", "positions"), ("mistral", "positions")]
)
def test_a_document_has_the_logits_and_the_loss_that_it_has_alone(kind: str, isolate: str) -> None:
    model, documents = build(kind), texts()
    assert model.config._attn_implementation == "sdpa"
    rows = rows_of(documents)
    assert len(rows) < len(documents)
    batch = collate_packed(rows, pad=0, isolate=isolate)
    assert batch["input_ids"].shape == (len(rows), 16)
    with torch.no_grad():
        together = model(**batch)
        nats, targets = 0.0, 0
        for place, row in enumerate(rows):
            starts = np.cumsum(row["lengths"]) - row["lengths"]
            for number, start in zip(row["documents"], starts, strict=True):
                tokens = torch.from_numpy(documents[number])[None]
                alone = model(input_ids=tokens).logits[0]
                there = together.logits[place, start : start + tokens.shape[1]]
                torch.testing.assert_close(there, alone, atol=2e-5, rtol=1e-5)
                losses = torch.nn.functional.cross_entropy(alone[:-1], tokens[0, 1:], reduction="none")
                nats, targets = nats + float(losses.sum()), targets + len(losses)
    assert targets == sum(len(each) - 1 for each in documents)
    assert int((batch["labels"] != -100).sum()) == targets
    assert float(together.loss) == pytest.approx(nats / targets, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "isolate", "more"),
    [
        ("llama", "positions", {}),
        ("llama", "mask", {}),
        ("gpt2", "positions", {"n_positions": 16}),  # fewer than the row has tokens
        ("mistral", "positions", {}),
    ],
)
def test_a_flat_batch_has_no_padding_and_the_logits_and_the_loss_of_its_documents(
    kind: str, isolate: str, more: dict[str, Any]
) -> None:
    model, documents = build(kind, **more), texts()
    padded = collate_documents([{"input_ids": each, "lengths": [len(each)]} for each in documents], pad=0)
    batch = flatten_batch(padded, isolate=isolate)
    assert batch["input_ids"].tolist() == [np.concatenate(documents).tolist()]
    assert batch["labels"].shape == batch["position_ids"].shape == (1, sum(map(len, documents)))
    with torch.no_grad():
        flat, wanted = model(**batch), model(**padded)
        alone = [model(input_ids=torch.from_numpy(each)[None]).logits[0] for each in documents]
    torch.testing.assert_close(flat.logits[0], torch.cat(alone), atol=2e-5, rtol=1e-5)
    assert int((batch["labels"] != -100).sum()) == sum(len(each) - 1 for each in documents)
    assert float(flat.loss) == pytest.approx(float(wanted.loss), rel=1e-5)


def test_a_flat_batch_keeps_documents_apart_whatever_is_beside_them() -> None:
    """Padding at the beginning, labels of a collator that does not know of other documents, and another tensor."""
    given = {
        "input_ids": torch.tensor([[9, 5, 6], [1, 2, 3]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "labels": torch.tensor([[-100, 5, 6], [1, 2, 3]]),
        "weights": torch.tensor([[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]),
    }
    batch = flatten_batch(given, isolate="mask")
    assert batch["input_ids"].tolist() == [[5, 6, 1, 2, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 2, 3]]
    assert torch.equal(batch["weights"], torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]))
    blocks = torch.zeros(5, 5, dtype=torch.bool)
    blocks[:2, :2], blocks[2:, 2:] = torch.ones(2, 2).tril(), torch.ones(3, 3).tril()
    assert torch.equal(batch["attention_mask"][0, 0], blocks)
    assert given["labels"].tolist() == [[-100, 5, 6], [1, 2, 3]]
    del given["attention_mask"]
    with pytest.raises(ConfigError, match="has none") as caught:
        flatten_batch(given, isolate="positions")
    assert caught.value.remedy


def test_without_isolation_the_logits_are_others() -> None:
    """The test above would notice: a row that is read as one text has other logits."""
    model, documents = build("llama"), texts()
    rows = rows_of(documents)
    row = next(each for each in rows if len(each["lengths"]) > 1)
    start = int(row["lengths"][0])
    with torch.no_grad():
        mixed = model(input_ids=torch.from_numpy(row["input_ids"])[None].long()).logits[0, start:]
        alone = model(input_ids=torch.from_numpy(row["input_ids"][start:])[None].long()).logits[0]
    assert float((mixed - alone).abs().max()) > 0.01


def test_the_mask_is_block_diagonal_and_padding_sees_itself() -> None:
    row = {"input_ids": np.array([5, 6, 7]), "lengths": np.array([2, 1])}
    longer = {"input_ids": np.array([1, 2, 3, 4]), "lengths": np.array([4])}
    batch = collate_packed([row, longer], pad=9, isolate="mask")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100], [-100, 2, 3, 4]]
    assert batch["attention_mask"].int().tolist()[0] == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    assert torch.equal(batch["attention_mask"][1, 0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_document_in_a_row_of_its_own_is_an_ordinary_batch() -> None:
    rows = [{"input_ids": np.array([5, 6]), "lengths": [2]}, {"input_ids": np.array([1, 2, 3]), "lengths": [3]}]
    batch = collate_documents(rows, pad=0)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 2, 3]]


def check(model: Any, isolate: str) -> None:
    require_isolation(model, vocabulary=100, length=16, isolate=isolate)


@pytest.mark.parametrize("isolate", WAYS)
def test_models_that_mix_documents_are_refused(isolate: str) -> None:
    check(build("llama"), isolate)
    for kind in ("bloom", "mamba"):
        with pytest.raises(ConfigError, match="cannot train on packed rows") as caught:
            check(build(kind), isolate)
        assert "prepare.options.pack=[]" in str(caught.value.remedy)


def test_a_model_that_mixes_documents_of_a_flat_batch_is_refused_by_its_own_setting() -> None:
    require_isolation(build("llama"), vocabulary=100, length=16, isolate="positions", flattened=True)
    for kind in ("bloom", "mamba"):
        with pytest.raises(ConfigError, match="cannot train on documents that stand end to end") as caught:
            require_isolation(build(kind), vocabulary=100, length=16, isolate="positions", flattened=True)
        assert caught.value.field == "train.model.flatten"
        assert "Remove train.model.flatten" in str(caught.value.remedy)


def test_a_model_that_keeps_documents_apart_in_a_single_row_takes_flat_batches_alone() -> None:
    """As flash attention of transformers: it reads positions only where a batch has one row."""
    model = build("llama")
    forward = model.forward

    def flash(input_ids: Any, position_ids: Any) -> Any:
        return forward(input_ids=input_ids, position_ids=position_ids if len(input_ids) == 1 else None)

    model.forward = flash
    require_isolation(model, vocabulary=100, length=16, isolate="positions", flattened=True)
    with pytest.raises(ConfigError, match="change with the document in front of it"):
        check(model, "positions")


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
