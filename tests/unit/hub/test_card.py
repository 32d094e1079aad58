"""The model card: understood by the Hub's own parser, safe, and the same every time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from markdown_it import MarkdownIt

from trainer_lib.hub.card import Card, render_card, tidy_metrics
from trainer_lib.hub.card_results import HardRows
from trainer_lib.hub.card_sections import remove_marks
from trainer_lib.storage import FileEntry
from trainer_lib.yaml_text import parse_yaml

CARD = Card(
    title="Handwritten digits",
    description="Reads *one* digit.",
    license="apache-2.0",
    tags=["vision", "trainflow"],
    base_model="org/base",
    metrics={"test": {"accuracy": 0.98, "loss": 0.07}, "validation": {"accuracy": 0.97}},
    data_name="digits",
    data_digest="d" * 64,
    rows={"train": 1437, "test": 360},
    stage_keys={"prepare-data": "a" * 64, "train": "b" * 64},
    stage_digests={"prepare-data": "d" * 64, "train": "e" * 64},
    arguments={"learning_rate": 1e-3, "hub_token": "hf_secret", "optim_args": "a|b"},
    facts={"Parameters": 12345, "Samples seen": None},
    versions={"torch": "2.13.0"},
    files=[FileEntry("model.safetensors", 4096, "f" * 64)],
)


def _head(text: str) -> dict[str, object]:
    head = parse_yaml(text.split("---\n")[1])
    assert isinstance(head, dict)
    return head


def test_the_hubs_parser_finds_metrics_licence_tags_and_base() -> None:
    data: Any = ModelCard(render_card(CARD)).data
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "org/base", "trainflow")
    assert data.tags == ["trainflow", "vision"]
    results = {(one.dataset_split, one.metric_type): one.metric_value for one in data.eval_results or []}
    assert results == {("test", "accuracy"): 0.98, ("test", "loss"): 0.07, ("validation", "accuracy"): 0.97}
    assert {one.dataset_revision for one in data.eval_results or []} == {"d" * 64}


def test_the_hubs_validators_take_the_head_and_give_it_back(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(render_card(CARD))
    head: Any = metadata_load(tmp_path / "README.md")
    data: Any = ModelCard(
        (tmp_path / "README.md").read_text(), ignore_metadata_errors=False
    ).data  # raises for a bad index
    assert data.to_dict()["model-index"] == eval_results_to_model_index(
        *model_index_to_eval_results(head["model-index"])
    )
    splits = {(each.dataset_split, each.unique_identifier) for each in data.eval_results or []}
    assert len(splits) == len({split for split, _ in splits}) == 2  # one result of the index for each split


def test_lineage_is_in_the_head_and_in_the_text() -> None:
    text = render_card(CARD)
    assert _head(text)["trainflow"] == {
        "data_digest": "d" * 64,
        "stage_keys": {"prepare-data": "a" * 64, "train": "b" * 64},
    }
    for part in ("d" * 64, "a" * 64, "e" * 64, "f" * 64, "12,345", "1,437", "torch 2.13.0", "Reads *one* digit."):
        assert part in text


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert render_card(CARD) == render_card(CARD)


def test_secrets_and_markup_do_not_reach_the_card() -> None:
    card = Card(
        title="A\n---\nlicense: mit\n",
        metrics={"te|st": {"f1<script>": 0.5}},
        arguments={"hub_token": "hf_secret", "url": "https://me:pw@host/x"},
    )
    text = render_card(card)
    assert "hf_secret" not in text
    assert "pw" not in text
    assert "<script>" not in text.split("---\n", 2)[2]
    assert "license" not in _head(text)
    row = next(line for line in text.splitlines() if "f1" in line and line.startswith("|"))
    assert row.count("|") == 3
    assert "te\\|st" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_shown_but_not_indexed(value: float) -> None:
    text = render_card(Card(title="t", metrics={"test": {"loss": value}}))
    assert "model-index" not in _head(text)
    assert f"| loss | {value:g} |" in text


def test_a_card_needs_nothing_but_a_title() -> None:
    text = render_card(Card(title="t"))
    assert "# t" in text
    assert "## Results" not in text


def test_tidy_metrics_drop_prefixes_timings_and_what_is_no_number() -> None:
    raw = {
        "test": {"test_accuracy": 0.9, "eval_loss": 1.0, "test_runtime": 3.0, "note": "x", "ok": True, "epoch": 3.0},
        "seconds": 5.0,
    }
    assert tidy_metrics(raw) == {"test": {"accuracy": 0.9, "loss": 1.0}}


@pytest.mark.parametrize(
    "odd", ["<script>alert(1)</script>", "\x1b]0;x\x07\u202eevil", "a\n```\n<img src=x>", "![x](http://h/p)"]
)
def test_names_of_strangers_are_neither_markup_nor_control_characters(odd: str) -> None:
    card = replace(
        CARD,
        title=odd,
        metrics={"test": {odd: 0.5, f"{odd}_over_majority": 0.1}, odd: {"loss": 1.0}},
        columns={odd: "int64"},
        rows={odd: 3},
        facts={odd: odd},
        versions={"torch": odd},
        sources={odd: odd},
        arguments={odd: odd},
        address=odd,
        loader=("transformers", "AutoModel"),
        code_digest="c" * 64,
        curve=[{"step": 1, "loss": 0.5}],
        hardest=[HardRows("test", [odd], [[odd]])],
        files=[FileEntry(f"{odd}.safetensors", 1, "f" * 64)],
    )
    text = render_card(card)
    assert parse_yaml(text.split("---\n")[1])["model-index"]
    body = text.split("---\n", 2)[2]
    assert not [line for line in body.split("\n") if not line.isprintable() and line]
    html = MarkdownIt("gfm-like", {"linkify": False}).render(remove_marks(body))
    assert not [tag for tag in ("<script", "<img", "<a ") if tag in html]
    assert html.count("<pre>") == 3
