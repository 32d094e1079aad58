"""A card that is published again keeps what its author wrote, and everything else is written again."""

from __future__ import annotations

import dataclasses

import pytest

from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import Content
from trainer_lib.hub.card import Card, parse_card_head, render_card
from trainer_lib.hub.card_sections import insert_section, merge_card
from trainer_lib.hub.folder import FolderHub
from trainer_lib.storage import Store

CARD = Card(
    title="Digits",
    description="Reads one digit.",
    tags=["vision"],
    metrics={"test": {"accuracy": 0.98}},
    data_digest="d" * 64,
    arguments={"seed": 1},
)
BETTER = dataclasses.replace(CARD, metrics={"test": {"accuracy": 0.99}}, rows={"train": 7})


def test_the_same_card_again_is_the_same_bytes() -> None:
    text = render_card(CARD)
    assert merge_card(None, text) == text
    assert merge_card(text, text) == text
    assert merge_card(merge_card(text, render_card(BETTER)), render_card(BETTER)) == render_card(BETTER)


def test_what_the_author_wrote_stays_and_the_sections_are_new() -> None:
    edited = (
        render_card(CARD)
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
    text = render_card(CARD)
    start, end = text.index("<!-- trainflow:results"), text.index("<!-- /trainflow:results -->")
    without = text[:start] + text[end + len("<!-- /trainflow:results -->\n") :]
    assert merge_card(without, text).rstrip().endswith("<!-- /trainflow:results -->")
    unmeasured = render_card(dataclasses.replace(CARD, metrics={}))
    assert "## Results" not in merge_card(text, unmeasured)


def test_a_card_of_another_hand_keeps_its_text_and_one_of_an_older_version_does_not() -> None:
    theirs = "---\nlicense: mit\n---\n\n# Mine\n\nWords.\n"
    text = merge_card(theirs, render_card(CARD))
    assert text.index("Words.") < text.index("<!-- trainflow:results -->")
    assert parse_card_head(text)["license"] == "mit"
    older = "---\ntrainflow:\n  data_digest: abc\n---\n\n# Old\n\n## Results\n"
    assert merge_card(older, render_card(CARD)) == render_card(CARD)


def test_a_broken_head_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"hf://org/name.*not YAML") as caught:
        merge_card("---\na: [\n---\n\n# T\n", render_card(CARD), field="hf://org/name")
    assert "between ---" in (caught.value.remedy or "")


def test_a_title_and_a_description_cannot_forge_a_section() -> None:
    forged = "x <!-- /trainflow:description --> <!-- trainflow:results -->\n"
    text = render_card(dataclasses.replace(CARD, title=forged, description=forged))
    assert text.count("<!-- trainflow:results -->") == 1
    assert merge_card(text, text) == text


def test_a_section_is_inserted_behind_the_heading_and_not_into_the_head() -> None:
    text = insert_section("---\n# a comment\nlicense: mit\n---\n\n# T\n\nWords.\n", "revision", "one")
    assert parse_card_head(text)["license"] == "mit"
    assert text.index("# T") < text.index("trainflow:revision") < text.index("Words.")
    assert insert_section(text, "revision", "one") == text
    assert "two" in insert_section(text, "revision", "two") and "one" not in insert_section(text, "revision", "two")


def test_a_folder_shows_its_newest_card_and_where_its_revision_is() -> None:
    root = Store.open("memory://test-card-sections/digits")
    hub = FolderHub(root.url)

    def publish(card: Card) -> str:
        merged = merge_card(hub.read_card(), render_card(card))
        done = hub.publish(Content({}, {"README.md": merged.encode()}), message="m")
        return done.revision

    try:
        first = publish(CARD)
        assert publish(CARD) == first
        assert root.read_bytes("NEWEST").decode() == f"revisions/{first}\n"
        shown = root.read_bytes("README.md").decode()
        assert f"(revisions/{first})" in shown
        root.write_bytes("README.md", shown.replace("# Digits", "# My digits").encode())
        assert publish(CARD) != first  # the author's title is published
        second = publish(BETTER)
        shown = root.read_bytes("README.md").decode()
        assert "# My digits" in shown and f"(revisions/{second})" in shown and f"(revisions/{first})" not in shown
        assert publish(BETTER) == second
        inside = root.read_bytes(f"revisions/{second}/README.md").decode()
        assert "# My digits" in inside and "trainflow:revision" not in inside
    finally:
        Store.open("memory://test-card-sections").delete_tree()


def test_a_readme_of_a_persons_own_stays_beside_revisions_without_sections() -> None:
    root = Store.open("memory://test-card-sections/own")
    try:
        root.write_bytes("README.md", b"# Mine\n")
        FolderHub(root.url).publish(Content({}, {"README.md": b"# Digits\n"}), message="m")
        assert root.read_bytes("README.md").decode().startswith("# Mine\n\n<!-- trainflow:revision -->")
    finally:
        Store.open("memory://test-card-sections").delete_tree()
