"""What the report and the summary show of prepared data: warnings, and the statistics of its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.report import render_report
from flows.report_facts import ReportFacts, describe_data
from flows.results import PipelineResult, StageOutcome
from flows.run_summary import summarize
from tasks.stage.facts import PrepareFacts
from tasks.stage.manifest import StageManifest
from trainer_lib.requests import PreparedSplit
from trainer_lib.storage import Store

WARNING = "Split 'test' has no row whose 'label' is <b>2</b>, and 20 % of the rows of 'train' have."
STATISTICS = {
    "train": {
        "label": {"rows": 12, "min": 0, "max": 2, "sum": 12, "counts": {"0": 3, "1": 6, "2": 3}},
        "row_id": {"rows": 12, "min": 0, "max": 9, "sum": 30},
        "words": {"rows": 12, "shortest": 2, "longest": 8000, "elements": 54},
        "age": {"rows": 12, "min": -1.5, "max": 99.0, "sum": 600.0},
    },
    "test": {"year": {"rows": 1234, "counts": {str(year): 100 - year for year in range(11)}}},
}


def _prepared(folder: Path, statistics: dict[str, Any] | None, *warnings: str) -> StageManifest:
    store, files = Store.open(folder), []
    if statistics is not None:
        files.append(store.write_bytes("statistics.json", json.dumps(statistics).encode()))
    facts = PrepareFacts({"train": PreparedSplit(12)}, warnings=warnings)
    return StageManifest("prepare-data", "ab" * 32, str(folder), "cd" * 32, tuple(files), facts=facts)


def test_statistics_in_words(tmp_path: Path) -> None:
    assert describe_data(_prepared(tmp_path, STATISTICS, WARNING)) == [
        ("warning", WARNING),
        ("train.label", "12 rows; 1: 6, 0: 3, 2: 3"),
        ("train.words", "12 rows; length 2 to 8,000, on average 4.5"),
        ("train.age", "12 rows; -1.5 to 99, on average 50"),
        ("test.year", "1,234 rows; " + ", ".join(f"{n}: {100 - n}" for n in range(10)) + " and 1 more"),
    ]


def test_data_without_statistics_has_none(tmp_path: Path) -> None:
    assert describe_data(None) == []
    assert describe_data(_prepared(tmp_path, None)) == []
    damaged = _prepared(tmp_path, STATISTICS, WARNING)
    empty, cut = {"rows": 0, "min": 0, "max": 0, "sum": 0}, {"rows": 1, "longest": 2}
    for content in ("{", "[1]", *(json.dumps({"train": {"x": one}}) for one in (empty, cut))):
        (tmp_path / "statistics.json").write_text(content)
        assert describe_data(damaged) == [("warning", WARNING)], content
    (tmp_path / "statistics.json").unlink()
    assert describe_data(damaged) == [("warning", WARNING)]


@pytest.mark.parametrize("columns", [40, 43])
def test_some_columns_are_shown(columns: int, tmp_path: Path) -> None:
    many = {"train": {f"c{number}": {"rows": 1} for number in range(columns)}}
    rows = describe_data(_prepared(tmp_path, many))
    assert len(rows) == (40 if columns == 40 else 41)
    assert columns == 40 or rows[-1] == ("statistics.json", "has 3 more columns")


def test_the_report_and_the_summary_show_warnings(tmp_path: Path) -> None:
    prepared = _prepared(tmp_path, STATISTICS, WARNING)
    result = PipelineResult("digits", "ab" * 32, str(tmp_path))
    result.stages.append(StageOutcome("prepare-data", "ran", "never run before", manifest=prepared.to_dict()))
    assert StageManifest.from_dict(prepared.to_dict()).facts.warnings == (WARNING,)
    page = render_report(result.to_dict(), facts=ReportFacts([], [], "", [], [], data=describe_data(prepared)))
    assert "<h2>Data</h2>" in page
    assert "<td>warning</td><td><code>Split &#39;test&#39; has no row whose &#39;label&#39; is &lt;b&gt;2" in page
    assert "length 2 to 8,000, on average 4.5" in page
    text = summarize(result)
    assert "\n\n- warning: Split 'test' has no row whose 'label' is &lt;b>2&lt;/b>, and 20 % of" in text
    result.stages[0] = StageOutcome("prepare-data", "failed", "no rows")
    assert "warning" not in summarize(result)
