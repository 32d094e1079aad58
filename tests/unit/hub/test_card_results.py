"""What a reader finds in the results of a card: intervals, what needs no model, slices, pictures, hardest rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from huggingface_hub import ModelCard

from trainer_lib.hub.card import Card, render_card
from trainer_lib.hub.card_results import HardRows, Picture
from trainer_lib.hub.card_sections import move_pictures

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
CARD = Card(title="Digits", metrics={"test": METRICS}, confidence=0.95)


def test_a_metric_stands_beside_its_interval_and_what_needs_no_model() -> None:
    text = render_card(CARD)
    assert "| test | accuracy | 0.948 (0.93 to 0.965) | majority: 0.102 | 0.846 (0.802 to 0.848) |" in text
    assert "| accuracy | 0.948 (0.93 to 0.965) |" in text
    assert "with a probability of 0.95" in text
    assert "accuracy_low" not in text.split("---\n", 2)[2]


def test_bounds_and_slices_are_no_metrics_of_their_own_on_the_hub() -> None:
    data: Any = ModelCard(render_card(CARD)).data
    names = {one.metric_type for one in data.eval_results}
    assert names == {"accuracy", "majority_accuracy", "accuracy_over_majority"} == set(data.to_dict()["metrics"])


def test_errors_have_a_margin_below_their_baseline() -> None:
    metrics = {"rmse": 51.4, "mean_rmse": 73.4, "rmse_below_mean": 22.0, "lost_below_nothing": 1.0}
    text = render_card(dataclasses.replace(CARD, metrics={"test": metrics}))
    assert "| test | rmse | 51.4 | mean: 73.4 | 22 |" in text
    assert "| test | lost" not in text
    assert "In brackets" not in text


def test_slices_are_a_table() -> None:
    text = render_card(CARD)
    assert "### test by sex\n\n| sex | rows | accuracy |\n| --- | --- | --- |\n| a\\|b | 30 | 0.9 |" in text


def test_a_metric_of_a_slice_has_its_interval_beside_it() -> None:
    first = {"accuracy/sex/a": 0.9, "accuracy_low/sex/a": 0.85, "accuracy_high/sex/a": 0.95, "rows/sex/a": 30}
    few = {"accuracy/sex/b": 0.5, "rows/sex/b": 4}
    text = render_card(dataclasses.replace(CARD, metrics={"test": {"accuracy": 0.8, **first, **few}}))
    assert "| sex | rows | accuracy |\n" in text
    assert "| a | 30 | 0.9 (0.85 to 0.95) |\n| b | 4 | 0.5 |" in text


def test_pictures_are_links_beside_the_card_and_titles_cannot_break_out() -> None:
    picture = Picture("evaluation/plots/confusion-a b.svg", "Confusion of a](x) <b>", "Rows are the true classes.")
    text = render_card(dataclasses.replace(CARD, pictures=[picture]))
    assert "![Confusion of a)(x) &lt;b>](evaluation/plots/confusion-a%20b.svg)" in text
    assert "Rows are the true classes." in text


def test_above_the_folder_of_a_revision_pictures_of_the_author_stay_where_they_are() -> None:
    own = "\n\n![mine](mine.png)\n"
    text = render_card(dataclasses.replace(CARD, pictures=[Picture("evaluation/plots/a.svg", "A")])) + own
    moved = move_pictures(text, "revisions/00001-ab")
    assert "![A](revisions/00001-ab/evaluation/plots/a.svg)" in moved
    assert "![mine](mine.png)" in moved
    linked = render_card(dataclasses.replace(CARD, description="![logo](https://a.example/logo.png)"))
    assert move_pictures(linked, "revisions/00001-ab") == linked


def test_the_hardest_rows_are_a_table_where_they_are_given() -> None:
    rows = HardRows("test", ["row_id", "label"], [[7, "a|b"], [8, None]])
    text = render_card(dataclasses.replace(CARD, hardest=[rows]))
    assert "### Rows of test that the model gets most wrong\n\n| row_id | label |" in text
    assert "| 7 | a\\|b |" in text
    assert "most wrong" not in render_card(CARD)
