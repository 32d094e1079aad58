"""The curves of a report: every label lies inside of its picture, however long the numbers are."""

from __future__ import annotations

import re

import pytest

from flows.charts import draw_charts

LETTER = 6.4  # as wide as a digit of 10 points is
SIZE = (460.8, 244.8)


@pytest.mark.parametrize(
    "values",
    [[0.5, 0.4, 0.3], [1e5, 1e5 + 1e-3, 1e5 + 2e-3], [-12345.6, 98765.4, 3.0], [2.5e-4, 1.5e-4, 5e-5], [1e-9, 0.0]],
)
def test_labels_stay_inside_of_the_picture(values: list[float]) -> None:
    [chart] = draw_charts([{"step": 20_000 * index, "loss": value} for index, value in enumerate(values)])
    assert 'viewBox="0 0 460.8 244.8"' in chart.svg
    labels = re.findall(r'text-anchor: (\w+)[^>]*" x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)<', chart.svg)
    assert len(labels) > 5
    for anchor, x, y, text in labels:
        width = LETTER * len(text)
        left = float(x) - {"end": width, "middle": width / 2, "start": 0.0}[anchor]
        assert left >= 0, text
        assert left + width <= SIZE[0], text
        assert 9 <= float(y) <= SIZE[1] - 3, text
