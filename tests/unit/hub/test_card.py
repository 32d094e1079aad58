"""The model card: understood by the Hub's own parser, safe, the same every time; what its author wrote stays."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from markdown_it import MarkdownIt

from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import Content
from trainer_lib.hub.card import (
    Card,
    Conversations,
    HardRows,
    Picture,
    insert_section,
    merge_card,
    move_pictures,
    parse_card_head,
    remove_marks,
    render_card,
    tidy_metrics,
)
from trainer_lib.hub.folder import FolderHub
from trainer_lib.storage import FileEntry, Store

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


def body_of(text: str) -> str:
    return text.split("---\n", 2)[2]


def test_the_hubs_parser_finds_metrics_licence_tags_and_base(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(render_card(CARD))
    head: Any = metadata_load(tmp_path / "README.md")
    data: Any = ModelCard(render_card(CARD), ignore_metadata_errors=False).data  # raises for a bad index
    parsed = model_index_to_eval_results(head["model-index"])
    assert data.to_dict()["model-index"] == eval_results_to_model_index(*parsed)
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "org/base", "trainflow")
    assert data.tags == ["trainflow", "vision"]
    results = {(one.dataset_split, one.metric_type): one.metric_value for one in data.eval_results}
    assert results == {("test", "accuracy"): 0.98, ("test", "loss"): 0.07, ("validation", "accuracy"): 0.97}
    assert {one.dataset_revision for one in data.eval_results} == {"d" * 64}
    splits = {(one.dataset_split, one.unique_identifier) for one in data.eval_results}
    assert len(splits) == len({split for split, _ in splits}) == 2  # one result of the index for each split


def test_a_model_of_conversations_has_its_template_its_data_and_code_to_talk_with_it() -> None:
    chat = Conversations("{# ``` #}{{ x }}", "Be | brief", {"messages": 9}, {"train": (8, 200, 50)}, "assets/tokenizer")
    for library, loader in (("peft", "AutoPeftModelForCausalLM"), ("transformers", "AutoModelForCausalLM")):
        text = render_card(replace(CARD, conversations=chat, loader=(library, "LlamaForCausalLM"), address="hf://o/n"))
        assert "| train | 8 | 200 | 25.0% |" in text
        assert "9 in the shape messages" in text
        assert "System prompt: Be \\| brief" in text
        assert "\n````jinja\n{# ``` #}{{ x }}\n````\n" in text
        assert f'{loader}.from_pretrained("o/n")' in text
        assert 'AutoTokenizer.from_pretrained("o/n", subfolder="assets/tokenizer")' in text
        [code] = [part for part in re.findall("```python\n(.*?)```", text, re.DOTALL) if "AutoTokenizer" in part]
        compile(code, "card", "exec")
    alone = render_card(replace(CARD, conversations=replace(chat, tokenizer=None), loader=("peft", "AutoPeftModel")))
    assert "AutoTokenizer" not in alone
    assert "## Conversations" not in render_card(CARD)


def test_lineage_is_in_the_head_and_in_the_text() -> None:
    text = render_card(CARD)
    assert parse_card_head(text)["trainflow"] == {"data_digest": "d" * 64, "stage_keys": CARD.stage_keys}
    for part in ("d" * 64, "a" * 64, "e" * 64, "f" * 64, "12,345", "1,437", "torch 2.13.0", "Reads *one* digit."):
        assert part in text
    bare = render_card(Card(title="t"))
    assert "# t" in bare
    assert "## Results" not in bare


def test_secrets_and_markup_do_not_reach_the_card() -> None:
    card = Card(
        title="A\n---\nlicense: mit\n",
        metrics={"te|st": {"f1<script>": 0.5}},
        arguments={"hub_token": "hf_secret", "url": "https://me:pw@host/x"},
    )
    text = render_card(card)
    assert "hf_secret" not in text
    assert "pw" not in text
    assert "<script>" not in body_of(text)
    assert "license" not in parse_card_head(text)
    assert next(line for line in text.splitlines() if "f1" in line and line.startswith("|")).count("|") == 3
    assert "te\\|st" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_shown_but_not_indexed(value: float) -> None:
    text = render_card(Card(title="t", metrics={"test": {"loss": value}}))
    assert "model-index" not in parse_card_head(text)
    assert f"| loss | {value:g} |" in text


def test_tidy_metrics_drop_prefixes_timings_and_what_is_no_number() -> None:
    raw = {
        "test": {"test_accuracy": 0.9, "eval_loss": 1.0, "test_runtime": 3.0, "note": "x", "ok": True, "epoch": 3},
        "s": 5.0,
    }
    assert tidy_metrics(raw) == {"test": {"accuracy": 0.9, "loss": 1.0}}


@pytest.mark.parametrize(
    "odd", ["<script>alert(1)</script>", "\x1b]0;x\x07\u202eevil", "a\n```\n<img src=x>", "![x](http://h/p)"]
)
def test_names_of_strangers_are_neither_markup_nor_control_characters(odd: str) -> None:
    card = replace(
        CARD,
        title=odd,
        metrics={"test": {odd: 0.5, f"{odd}_over_majority": 0.1, f"{odd}/sex/{odd}": 1.0}, odd: {"loss": 1.0}},
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
    body = body_of(text)
    assert not [line for line in body.split("\n") if not line.isprintable() and line]
    html = MarkdownIt("gfm-like", {"linkify": False}).render(remove_marks(body))
    assert not [tag for tag in ("<script", "<img", "<a ") if tag in html]
    assert html.count("<pre>") == 3


# -- what a reader finds in the results -------------------------------------------------------------------------------
METRICS = {
    "accuracy": 0.948,
    "accuracy_low": 0.93,
    "accuracy_high": 0.965,
    "majority_accuracy": 0.102,
    "accuracy_over_majority": 0.846,
    "accuracy_over_majority_low": 0.802,
    "accuracy_over_majority_high": 0.848,
    "accuracy/sex/a|b": 0.9,
    "rows/sex/a|b": 30.0,
}
RESULTS = Card(title="Digits", metrics={"test": METRICS}, confidence=0.95)


def test_a_metric_stands_beside_its_interval_and_what_needs_no_model() -> None:
    text = render_card(RESULTS)
    assert "| test | accuracy | 0.948 (0.93 to 0.965) | majority: 0.102 | 0.846 (0.802 to 0.848) |" in text
    assert "| accuracy | 0.948 (0.93 to 0.965) |" in text
    assert "with a probability of 0.95" in text
    assert "accuracy_low" not in body_of(text)
    assert "### test by sex\n\n| sex | rows | accuracy |\n| --- | --- | --- |\n| a\\|b | 30 | 0.9 |" in text
    data: Any = ModelCard(text).data
    names = {one.metric_type for one in data.eval_results}
    # Bounds and slices are no metrics of their own on the Hub.
    assert names == {"accuracy", "majority_accuracy", "accuracy_over_majority"} == set(data.to_dict()["metrics"])


def test_errors_have_a_margin_below_their_baseline_and_metrics_of_slices_their_intervals() -> None:
    metrics = {"rmse": 51.4, "mean_rmse": 73.4, "rmse_below_mean": 22.0, "lost_below_nothing": 1.0}
    text = render_card(replace(RESULTS, metrics={"test": metrics}))
    assert "| test | rmse | 51.4 | mean: 73.4 | 22 |" in text
    assert "| test | lost" not in text
    assert "In brackets" not in text
    first = {"accuracy/sex/a": 0.9, "accuracy_low/sex/a": 0.85, "accuracy_high/sex/a": 0.95, "rows/sex/a": 30}
    few = {"accuracy/sex/b": 0.5, "rows/sex/b": 4}
    text = render_card(replace(RESULTS, metrics={"test": {"accuracy": 0.8, **first, **few}}))
    assert "| sex | rows | accuracy |\n" in text
    assert "| a | 30 | 0.9 (0.85 to 0.95) |\n| b | 4 | 0.5 |" in text


def test_pictures_are_links_beside_the_card_and_titles_cannot_break_out() -> None:
    picture = Picture("evaluation/plots/confusion-a b.svg", "Confusion of a](x) <b>", "Rows are the true classes.")
    text = render_card(replace(RESULTS, pictures=[picture])) + "\n\n![mine](mine.png)\n"
    assert "![Confusion of a)(x) &lt;b>](evaluation/plots/confusion-a%20b.svg)" in text
    assert "Rows are the true classes." in text
    # Above the folder of a revision pictures of the author stay where they are.
    moved = move_pictures(text, "revisions/00001-ab")
    assert "](revisions/00001-ab/evaluation/plots/confusion-a%20b.svg)" in moved
    assert "![mine](mine.png)" in moved
    linked = render_card(replace(RESULTS, description="![logo](https://a.example/logo.png)"))
    assert move_pictures(linked, "revisions/00001-ab") == linked


def test_the_hardest_rows_are_a_table_where_they_are_given() -> None:
    rows = HardRows("test", ["row_id", "label"], [[7, "a|b"], [8, None]])
    text = render_card(replace(RESULTS, hardest=[rows]))
    assert "### Rows of test that the model gets most wrong\n\n| row_id | label |" in text
    assert "| 7 | a\\|b |" in text
    assert "most wrong" not in render_card(RESULTS)


# -- a card that is published again -----------------------------------------------------------------------------------
FIRST = Card(
    title="Digits",
    description="Reads one digit.",
    tags=["vision"],
    metrics={"test": {"accuracy": 0.98}},
    data_digest="d" * 64,
    arguments={"seed": 1},
)
BETTER = replace(FIRST, metrics={"test": {"accuracy": 0.99}}, rows={"train": 7})


def test_the_same_card_again_is_the_same_bytes() -> None:
    text = render_card(FIRST)
    assert merge_card(None, text) == text
    assert merge_card(text, text) == text
    assert merge_card(merge_card(text, render_card(BETTER)), render_card(BETTER)) == render_card(BETTER)


def test_what_the_author_wrote_stays_and_the_sections_are_new() -> None:
    edited = (
        render_card(FIRST)
        .replace("# Digits", "# The best digits\n\nAn introduction of mine.")
        .replace("*To be filled in", "Not for cheques. *To be filled in")
        .replace("tags:\n- trainflow\n", "thumbnail: a.png\ntags:\n- mine\n- trainflow\n")
        .replace("| accuracy | 0.98 |", "| accuracy | 1.00 |")  # what is ours is not the author's to change
    )
    text = merge_card(edited, render_card(BETTER))
    for kept in ("# The best digits", "An introduction of mine.", "Not for cheques."):
        assert text.count(kept) == 1
    assert "# Digits" not in text
    assert "| accuracy | 0.99 |" in text and "1.00" not in text
    head = parse_card_head(text)
    assert head["thumbnail"] == "a.png"
    assert head["tags"] == ["mine", "trainflow", "vision"]
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.99
    assert merge_card(text, render_card(BETTER)) == text


def test_a_section_that_was_removed_comes_back_and_one_of_nothing_goes() -> None:
    text = render_card(FIRST)
    start, end = text.index("<!-- trainflow:results"), text.index("<!-- /trainflow:results -->")
    without = text[:start] + text[end + len("<!-- /trainflow:results -->\n") :]
    assert merge_card(without, text).rstrip().endswith("<!-- /trainflow:results -->")
    assert "## Results" not in merge_card(text, render_card(replace(FIRST, metrics={})))


@pytest.mark.parametrize("more", ["", "trainflow:\n  data_digest: abc\n"])  # of another hand; with all marks removed
def test_a_card_without_marks_keeps_its_text(more: str) -> None:
    theirs = f"---\nlicense: mit\n{more}---\n\n# Mine\n\nWords.\n"
    text = merge_card(theirs, render_card(FIRST))
    assert text.index("Words.") < text.index("<!-- trainflow:results -->")
    assert parse_card_head(text)["license"] == "mit"


def test_a_broken_head_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"hf://org/name.*not YAML") as caught:
        merge_card("---\na: [\n---\n\n# T\n", render_card(FIRST), field="hf://org/name")
    assert "between ---" in (caught.value.remedy or "")


def test_a_title_and_a_description_cannot_forge_a_section() -> None:
    forged = "x <!-- /trainflow:description --> <!-- trainflow:results -->\n"
    text = render_card(replace(FIRST, title=forged, description=forged))
    assert text.count("<!-- trainflow:results -->") == 1
    assert merge_card(text, text) == text


def test_a_section_is_inserted_behind_the_heading_and_not_into_the_head() -> None:
    text = insert_section("---\n# a comment\nlicense: mit\n---\n\n# T\n\nWords.\n", "revision", "one")
    assert parse_card_head(text)["license"] == "mit"
    assert text.index("# T") < text.index("trainflow:revision") < text.index("Words.")
    assert insert_section(text, "revision", "one") == text
    assert "two" in insert_section(text, "revision", "two") and "one" not in insert_section(text, "revision", "two")


def test_a_folder_shows_its_newest_card_and_where_its_revision_is() -> None:
    root, theirs = Store.open("memory://test-card/digits"), Store.open("memory://test-card/theirs")
    hub = FolderHub(root.url)

    def publish(card: Card) -> str:
        merged = merge_card(hub.read_card(), render_card(card))
        return hub.publish(Content({}, {"README.md": merged.encode()}), message="m").revision

    try:
        first = publish(FIRST)
        assert publish(FIRST) == first
        assert root.read_bytes("NEWEST").decode() == f"revisions/{first}\n"
        shown = root.read_bytes("README.md").decode()
        assert f"(revisions/{first})" in shown
        root.write_bytes("README.md", shown.replace("# Digits", "# My digits").encode())
        assert publish(FIRST) != first  # the author's title is published
        second = publish(BETTER)
        shown = root.read_bytes("README.md").decode()
        assert "# My digits" in shown and f"(revisions/{second})" in shown and f"(revisions/{first})" not in shown
        assert publish(BETTER) == second
        inside = root.read_bytes(f"revisions/{second}/README.md").decode()
        assert "# My digits" in inside and "trainflow:revision" not in inside
        # A page without our sections stays beside revisions.
        theirs.write_bytes("README.md", b"# Mine\n")
        FolderHub(theirs.url).publish(Content({}, {"README.md": b"# Digits\n"}), message="m")
        assert theirs.read_bytes("README.md").decode().startswith("# Mine\n\n<!-- trainflow:revision -->")
    finally:
        Store.open("memory://test-card").delete_tree()
