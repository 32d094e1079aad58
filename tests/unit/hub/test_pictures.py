"""Pictures of what a model gets right and wrong: what a reader sees in them, and that they hold no more."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from trainer_lib.hub import pictures

SVG = "{http://www.w3.org/2000/svg}"


def _drawn(drawing: str) -> tuple[ElementTree.Element, list[str]]:
    """The drawing as a browser parses the file, and the texts in it."""
    root = ElementTree.fromstring(pictures.as_file(drawing))
    return root, [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


def _circles(root: ElementTree.Element) -> list[tuple[float, float, float]]:
    found = root.iter("{http://www.w3.org/2000/svg}circle")
    return [(float(each.attrib["cx"]), float(each.attrib["cy"]), float(each.attrib["r"])) for each in found]


def test_residuals_are_above_zero_where_the_model_says_too_much() -> None:
    root, texts = _drawn(pictures.draw_residuals([1.0, 2.0, 3.0], [1.5, 2.0, 2.5], "Residuals of test"))
    left, middle, right = sorted(_circles(root))
    assert left[1] < middle[1] < right[1]  # downwards on a screen
    assert {"measured", "predicted - measured", "0", "1", "3"} <= set(texts)
    assert root.attrib["aria-label"] == "Residuals of test"


def test_rows_that_are_alike_are_one_larger_point_and_no_row_can_be_read() -> None:
    measured = [*([5.0] * 99), 7.1234567, 1.0]
    root, _ = _drawn(pictures.draw_residuals(measured, [value + 0.25 for value in measured], "x"))
    sizes = sorted(radius for *_, radius in _circles(root))
    assert len(sizes) == 3
    assert sizes[2] > sizes[1] + 2
    assert "7.12" not in pictures.draw_residuals(measured, measured, "x")


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 1e12])
def test_numbers_that_are_all_equal_are_drawn(value: float) -> None:
    root, _ = _drawn(pictures.draw_residuals([value] * 4, [value] * 4, "x"))
    [(x, y, _)] = _circles(root)
    assert 64 < x < 448
    assert 12 < y < 294


def test_a_calibrated_model_is_on_the_diagonal_and_more_rows_are_larger_points() -> None:
    root, texts = _drawn(pictures.draw_reliability([[0.25, 0.25, 10], [0.75, 0.75, 90]], "x"))
    (x, y, small), (other_x, other_y, large) = _circles(root)
    assert (x - 64) / 384 == pytest.approx(1 - (y - 12) / 282, abs=1e-3)
    assert other_x == pytest.approx(64 + 0.75 * 384, abs=0.1)
    assert other_y == pytest.approx(12 + 0.25 * 282, abs=0.1)
    assert large > small
    assert {"confidence", "accuracy"} <= set(texts)


def test_a_confusion_matrix_has_names_and_counts_and_text_stays_text() -> None:
    root, texts = _drawn(pictures.draw_confusion([[7, 1], [0, 12]], ["<b>no & so", "a name of many letters"], "x"))
    assert {"7", "1", "12", "<b>no & so", "a name of man…", "true", "predicted"} <= set(texts)
    assert "0" not in texts
    assert float(root.attrib["width"]) < 300


def test_many_classes_are_shaded_without_numbers() -> None:
    matrix = [[100 if x == y else 0 for x in range(60)] for y in range(60)]
    root, texts = _drawn(pictures.draw_confusion(matrix, [str(each) for each in range(60)], "x"))
    assert set(texts) == {"true", "predicted"}
    assert float(root.attrib["width"]) < 500
    assert len(pictures.as_file(pictures.draw_confusion(matrix, [], "x"))) < 20_000


def test_each_kind_of_outcome_has_its_drawings_the_same_every_time() -> None:
    classes: dict[str, Any] = {"kind": "classes", "matrix": [[1, 0], [0, 1]], "reliability": [[0.9, 1.0, 2]]}
    assert list(pictures.draw_outcome(classes, ["a", "b"], "test")) == ["confusion", "reliability"]
    assert list(pictures.draw_outcome({**classes, "reliability": []}, ["a", "b"], "test")) == ["confusion"]
    mark = {"false_positive_rate": 0.25, "recall": 0.5, "precision": 0.75}
    points = [[0.0, 0.0], [1.0, 1.0]]
    curves = {"roc": points, "precision_recall": points, "threshold": mark}
    drawn = pictures.draw_outcome({**classes, "curves": curves}, ["a", "b"], "test")
    assert list(drawn) == ["confusion", "reliability", "roc", "precision-recall"]
    for name, place in {"roc": (0.25, 0.5), "precision-recall": (0.5, 0.75)}.items():
        [(x, y, _)] = _circles(_drawn(drawn[name])[0])
        assert [(x - 64) / 384, 1 - (y - 12) / 282] == pytest.approx(list(place), abs=1e-3)
    several = pictures.draw_outcome({**classes, "curves": {**curves, "threshold": {}}}, ["a", "b"], "test")
    assert _circles(_drawn(several["roc"])[0]) == []
    numbers = {"kind": "numbers", "measured": [1.0, 2.0], "predicted": [1.0, 2.5]}
    assert list(pictures.draw_outcome(numbers, [], "test")) == ["residuals"]
    assert pictures.draw_outcome(numbers, [], "test") == pictures.draw_outcome(numbers, [], "test")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e305])
def test_values_that_are_not_finite_are_gaps_and_said(value: float) -> None:
    root, texts = _drawn(pictures.draw_series({"loss": [(1, 1.0), (2, value), (3, 0.5)]}, "Loss"))
    assert "loss 0.5; 1 value not finite" in texts
    assert len(list(root.iter(f"{SVG}polyline"))) == len(_circles(root)) == 2
    assert not _circles(_drawn(pictures.draw_series({"loss": [(1, value)]}, "Loss"))[0])


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    drawing = pictures.draw_series({"loss": [(step, (step * 37 % 101) / 101) for step in range(200_000)]}, "Loss")
    assert len(drawing) < 14 * pictures.MAX_POINTS + 5000
    assert f"loss {(199_999 * 37 % 101) / 101:.4g}" in _drawn(drawing)[1]


@pytest.mark.parametrize(
    "values",
    [[0.5, 0.4, 0.3], [1e5, 1e5 + 1e-3, 1e5 + 2e-3], [-12345.6, 98765.4, 3.0], [2.5e-4, 1.5e-4, 5e-5], [1e-9, 0.0]],
)
def test_labels_differ_and_stay_inside_of_the_picture(values: list[float]) -> None:
    root, _ = _drawn(
        pictures.draw_series({"loss": [(20_000 * index, value) for index, value in enumerate(values)]}, "Loss")
    )
    labels = [each for each in root.iter(f"{SVG}text") if "x" in each.attrib]
    assert len(labels) == len({(each.text, each.attrib["style"]) for each in labels}) > 5
    for label in labels:
        width, style = 6.5 * len(label.text or ""), label.attrib["style"]
        left = float(label.attrib["x"]) - (width if "end" in style else width / 2 if "middle" in style else 0)
        assert left >= 0 and left + width <= float(root.attrib["width"]), label.text
        assert 9 <= float(label.attrib["y"]) <= float(root.attrib["height"]) - 3, label.text


def test_a_file_loads_nothing_and_follows_light_and_dark() -> None:
    file = pictures.as_file(pictures.draw_reliability([[0.5, 0.5, 1]], "x")).decode()
    assert "prefers-color-scheme: dark" in file
    assert file.count("http") == 1  # the name of SVG itself
    assert "url(" not in file
