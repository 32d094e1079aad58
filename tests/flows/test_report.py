"""The report page: whole, escaped, self-contained; and the closing summary of a run."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from trainer_lib.trackers.mlflow.mlflow_registry import Registered, Registration, Score, Verdict
from trainflow.flows.cli.presentation import summary, where
from trainflow.flows.records.results import PipelineResult, StageOutcome
from trainflow.flows.reports.report import describe_outcomes, draw_charts, render_report
from trainflow.flows.stages import find_stage
from trainflow.tasks.model.outcome_tables import Outcome
from trainflow.tasks.stage.facts import PublishFacts
from trainflow.tasks.stage.manifest import StageManifest

MEASURED = ("prepare-data", "evaluate")
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """What a browser would find: text, links, ids, everything it would load, and whether the tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            if tag == "a" and name == "href":
                self.links.append(value)
            elif name in {"src", "href", "xlink:href", "data", "action", "poster", "srcset"} or "url(" in value:
                self.loads.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def _manifest(stage: str, **more: Any) -> dict[str, Any]:
    return {
        "stage": stage,
        "key": "ab" * 32,
        "url": f"/data/storage/stages/{stage}/abab",
        "content_digest": "cd" * 32,
        "files": [{"path": f"{stage}.bin", "size": 4096, "sha256": "ef" * 32}],
        "metrics": {},
        "meta": {},
    } | more


def _result(**more: Any) -> dict[str, Any]:
    stages: list[tuple[str, str, str, float, dict[str, Any] | None]] = [
        ("prepare-data", "cached", "committed 2026-01-01", 0.2, {}),
        ("train", "ran", "args.learning_rate: 0.001 -> 0.002", 61.0, {"metrics": {"train_loss": 0.31}}),
        ("evaluate", "ran", "model changed", 6.0, {"metrics": {"test": {"accuracy": 0.984}, "val": {"loss": 0.05}}}),
        ("predict", "skipped", "switched off in the spec", 0.0, None),
        ("push-to-hub", "ran", "model changed", 0.6, {}),
    ]
    places = {
        "train": {"model": "/data/storage/stages/train/abab/model"},
        "push-to-hub": {"published": "https://hub.example/org/x"},
    }
    return {
        "name": "digits",
        "pipeline_key": "1234" * 16,
        "storage": "/data/storage",
        "seconds": 68.0,
        "mlflow_run_id": "f" * 32,
        "tracking_uri": "sqlite:////data/storage/mlflow.db",
        "run_url": None,
        "report_url": "/data/storage/runs/1234/report.html",
        "error": None,
        "stages": [
            {
                "stage": stage,
                "status": status,
                "reason": reason,
                "seconds": seconds,
                "manifest": None if facts is None else _manifest(stage, **facts),
                "places": places.get(stage, {}),
            }
            for stage, status, reason, seconds, facts in stages
        ],
    } | more


HISTORY = [
    *({"step": step, "loss": 1 / step, "learning_rate": 1e-3 / step, "epoch": step / 10} for step in range(1, 51)),
    *({"step": step, "eval_loss": 2 / step, "eval_accuracy": 0.5, "eval_runtime": 3.0} for step in range(10, 51, 10)),
    {"step": 50, "train_loss": 0.3, "train_runtime": 60.0},
]


def test_the_page_tells_what_ran_why_how_long_with_what_result_and_loads_nothing() -> None:
    html = render_report(_result(run_url="http://tracking:5000/#/experiments/1/runs/f"), draw_charts(HISTORY))
    page = Page(html)
    for part in (
        *("digits", "Done in 1 min 8 s", "prepare-data cached 0.2 s committed 2026-01-01", "predict skipped"),
        *("train ran 1 min 1 s args.learning_rate: 0.001 -> 0.002", "metric test val accuracy 0.984 loss 0.05"),
        *("train_loss 0.31", "f" * 32, "sqlite:////data/storage/mlflow.db", "cdcdcdcdcdcd"),
        *("trainflow", "torch"),
    ):
        assert part in page.words, part
    assert {"script", "link", "img", "iframe", "object", "embed"}.isdisjoint(page.tags)
    assert all(load.startswith("#") or "url(#" in load for load in page.loads)  # parts of the drawings themselves
    style = html[html.index("<style>") : html.index("</style>")]
    assert "@import" not in style and "url(" not in style
    # Links lead beside the report and to http only.
    places = (
        "../../stages/train/abab/model",
        "https://hub.example/org/x",
        "http://tracking:5000/#/experiments/1/runs/f",
    )
    assert set(places) <= set(page.links)
    assert all(link.startswith(("http://", "https://", "../")) for link in page.links)
    # The drawings follow light and dark and share no names.
    assert len(page.ids) == len(set(page.ids))
    assert "prefers-color-scheme: dark" in html
    for drawing in draw_charts(HISTORY).values():
        assert "<polyline" in drawing and "var(--series-1)" in drawing and "#" not in drawing


def measured(metrics: dict[str, Any], rows: dict[str, Any] | None = None, **meta: Any) -> str:
    """The words of a page whose evaluation measured this."""
    result = _result()
    prepared, evaluation = (next(each for each in result["stages"] if each["stage"] == name) for name in MEASURED)
    prepared["manifest"]["metrics"] = rows or {}
    evaluation["manifest"] |= {"metrics": metrics, "meta": meta}
    return Page(render_report(result)).words


def test_slices_are_tables_of_their_own_and_a_metric_has_its_interval_beside_it() -> None:
    slices = {"accuracy/sex/a": 0.9, "rows/sex/a": 30, "accuracy/sex/b/c": 0.8, "rows/sex/b/c": 20}
    words = measured({"test": {"accuracy": 0.984, **slices, "roc_auc/sex/a": 0.7}})
    assert "test by sex sex rows accuracy roc_auc a 30 0.9 0.7 b/c 20 0.8" in words
    assert "accuracy/sex" not in words
    words = measured({"test": {"f1": 0.9, "f1_low": 0.8, "f1_high": 0.95, "spread_low": 3}})
    assert "f1 0.9 (0.8 to 0.95) spread_low 3" in words


NUMBERS: dict[str, Any] = {"kind": "numbers", "measured": [1.0, 2.0, 3.0], "predicted": [1.5, 2.0, 2.0]}
CLASSES = {"kind": "classes", "matrix": [[3, 1], [0, 2]], "reliability": [[0.55, 0.5, 2], [0.97, 1.0, 4]]}


def page_of(*outcomes: Outcome) -> str:
    """The report of a run with these outcomes of its evaluation."""
    return render_report(_result(), sections=describe_outcomes(outcomes))


def test_rows_are_tables_with_their_inputs_and_text_stays_text() -> None:
    rows = {"hardest": [[7, 1.5, 2.5, 1.0]], "samples": [[8, 1.0, 1.0]]}
    picture, foreign = "data:image/png;base64,AAAA", 'https://elsewhere.example/"x.png'
    inputs = {"7": {"text": "<b>a row\x1b[31m", "image": picture}, "8": {"text": "it", "image": foreign}}
    html = page_of(Outcome("test", {**NUMBERS, **rows, "inputs": inputs}, []))
    assert f'<img src="{picture}" alt=""> &lt;b&gt;a row' in html and "\x1b" not in html
    words = Page(html).words
    assert "Hardest rows test row_id label prediction absolute_error input 7 1.5 2.5 1 <b>a row" in words
    assert "Sample predictions test row_id label prediction input 8 1 1 it" in words and "elsewhere" not in html
    hidden = Page(page_of(Outcome("test", {**NUMBERS, **rows}, []))).words
    assert "absolute_error 7 1.5 2.5 1 Sample" in hidden
    assert "Hardest rows" not in Page(page_of(Outcome("test", NUMBERS, []))).words
    warned = _result()
    warned["stages"][2]["manifest"]["meta"] = {"warnings": ["one class only"]}
    assert "Warnings evaluate one class only" in Page(render_report(warned)).words


LOST: list[list[Any]] = [["<i>age", 0.2, 0.15, 0.25], ["job", 0.01, -0.01, 0.03]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"importance": {"metric": "accuracy", "rows": 500, "columns": LOST, "left_out": left_out}},
            f"test By permutation in 500 rows, with 95 % intervals.{more} column accuracy lost low high <i>age 0.2",
        )
        for left_out, more in ((0, ""), (2, " There was no time for 2 more columns."))
    ]
    + [
        (
            {"weak": {"error": "off", "rows": 900, "tested": 24, "groups": [["<i>age: 1 to 2", 40, 3, 1, chance]]}},
            f"against all other rows by Welch's t-test, adjusted by Holm.{more} subgroup rows off of_the_rest "
            f"adjusted_p <i>age: 1 to 2 40 3 1 {chance}",
        )
        for chance, more in ((0.01, ""), (0.4, " None is worse beyond chance."))
    ],
)
def test_importance_and_weak_subgroups_are_tables_below_how_they_were_measured(found: Any, words: str) -> None:
    assert words in Page(page_of(Outcome("test", {**NUMBERS, **found}, []), Outcome("val", NUMBERS, []))).words


def test_confusion_calibration_and_residuals_are_drawn() -> None:
    html = page_of(Outcome("test", CLASSES, ["<b>no", "yes"]), Outcome("price <b>", NUMBERS, []))
    page = Page(html)
    assert {"<b>no", "yes", "3", "1", "2"} <= set(page.text)
    assert "The expected calibration error is 0.0367." in page.words
    assert 'aria-label="Confusion matrix of test"' in html and 'aria-label="Reliability diagram of test"' in html
    assert 'aria-label="Residuals of price &lt;b&gt;"' in html
    assert "Half of the predictions are off by at most 0.5, nine of ten by at most 1." in page.words
    assert page.loads == []
    drawing = html[html.index("<svg") : html.rindex("</svg>")]
    assert "var(--series-1)" in drawing and "#" not in drawing
    assert "price" not in page_of(Outcome("test", CLASSES, ["no", "yes"]))
    assert "<svg" not in page_of(Outcome("test", {"kind": "numbers", "measured": "x"}, []))


MARK = {"chosen": 0.5, "false_positive_rate": 0.1, "recall": 0.5, "precision": 0.25, "f1": 1 / 3, "best": 0.21}


@pytest.mark.parametrize(
    ("threshold", "classes", "words"),
    [
        (MARK | {"best_f1": 0.4}, 1, "Of the class yes<: area below ROC 0.9, average precision 0.8. "
        "The threshold 0.5 gives precision 0.25, recall 0.5, F1 0.333. The largest F1 here, 0.4, is at 0.21."),
        ({}, 3, "Mean over 3 classes, one against the rest: area below ROC 0.9, average precision 0.8."),
    ],
)  # fmt: skip
def test_curves_are_drawn_above_what_the_threshold_gives(threshold: Any, classes: int, words: str) -> None:
    points = [[0.0, 0.0], [1.0, 1.0]]
    curves = {"roc": points, "precision_recall": points, "roc_auc": 0.9, "average_precision": 0.8}
    found: dict[str, Any] = {**CLASSES, "curves": {**curves, "classes": classes, "threshold": threshold}}
    html = page_of(Outcome("test", found, ["no", "yes<"]), Outcome("old", CLASSES, ["no", "yes"]))
    assert words in Page(html).words
    assert html.count('aria-label="ROC curve of') == html.count('aria-label="Precision-recall curve of') == 1


def _with_interval(name: str, value: float, low: float, high: float) -> dict[str, float]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def test_what_needs_no_model_stands_beside_the_model_with_the_margin_and_its_interval() -> None:
    compared = {
        **_with_interval("accuracy", 0.8, 0.7, 0.85),
        **_with_interval("majority_accuracy", 0.4, 0.3, 0.5),
        **_with_interval("accuracy_over_majority", 0.4, 0.25, 0.5),
    } | {"mase": 0.7, "naive_mase": 1.1, "mase_below_naive": 0.4, "accuracy/sex/a": 0.1}
    splits = {"val": {"accuracy": 0.9, "majority_accuracy": 0.6}, "test": compared}
    words = measured(splits, {"train_rows": 1000, "test_rows": 1250, "val_rows": 30}, confidence=0.9)
    assert (
        "The model and what needs no model Both were measured on the same rows. A margin above zero is in the model's "
        "favour. In brackets: the interval, by a bootstrap over the rows, with a probability of 0.9. "
        "split rows metric the model without a model margin "
        "test 1,250 accuracy 0.8 (0.7 to 0.85) majority: 0.4 (0.3 to 0.5) 0.4 (0.25 to 0.5) "
        "test 1,250 mase 0.7 naive: 1.1 0.4"
    ) in words
    assert "val 30" not in words
    assert "without a model" not in Page(render_report(_result())).words


def test_the_comparison_with_the_champion_is_a_row() -> None:
    compared: dict[str, Any] = {"metric": "test_error", "difference": 0.02, "low": -0.01, "high": 0.05}
    verdict = Verdict(
        promoted=False, reason="It is not clearly better.", candidate="3", champion="2", resamples=1000, **compared
    )
    score = Score(metric="test_error", value=0.4, rows="a" * 64, is_greater_better=False)
    asked = Registration(name="line <b>", digest="d" * 64, score=score)
    page = Page(render_report(_result(registers="line <b>", registered=Registered.of(asked, "3", verdict))))
    assert (
        "Registered line <b> version 3. It is not clearly better. Both versions were measured on the same rows. "
        "The difference is positive where this model is better; from 5 % to 95 % of the resamples of these rows. "
        "champion metric this model the champion difference interval "
        "2 test_error 0.4 0.42 0.02 -0.01 to 0.05 kept"
    ) in page.words
    better = Registered.of(asked, "3", replace(verdict, promoted=True))
    assert "0.05 replaced" in Page(render_report(_result(registers="line", registered=better))).words
    first = Registered.of(asked, "1", Verdict(promoted=True, reason="It is the first champion.", candidate="1"))
    words = Page(render_report(_result(registers="line", registered=first))).words
    assert "line <b> version 1. It is the first champion." in words
    assert "same rows" not in words
    assert "line: MLflow had not answered" in Page(render_report(_result(registers="line", registered=None))).words
    assert "Registered" not in Page(render_report(_result())).words


def test_remote_storage_is_named_and_not_linked() -> None:
    result = _result(report_url="s3://bucket/runs/1234/report.html", storage="s3://bucket")
    for stage in result["stages"]:
        if stage["manifest"]:
            stage["manifest"]["url"] = f"s3://bucket/stages/{stage['stage']}/abab"
    result["stages"][1]["places"] = {"model": "s3://bucket/stages/train/abab/model"}
    page = Page(render_report(result, draw_charts(HISTORY)))
    assert page.links == ["https://hub.example/org/x"]
    assert "s3://bucket/stages/train/abab/model" in page.words


def test_hostile_text_stays_text() -> None:
    result = _result(name="<script>alert(1)</script>", storage="https://me:s3cret@host/x")
    result["stages"][0]["reason"] = '"><img src=x onerror=alert(1)>'
    result["stages"][1]["manifest"]["metrics"] = {"<b>f1</b>": 0.5}
    result["stages"][4]["places"] = {"published": "javascript:alert(1)"}
    odd = draw_charts([{"step": 1, "eval_<script>$x$": 1.0}, {"step": 2, "eval_<script>$x$": 2.0}])
    page = Page(render_report(result, odd))
    assert "eval_<script>$x$ 2" in page.words
    assert {"script", "img", "b"}.isdisjoint(page.tags)
    assert "<b>f1</b>" in page.words
    assert not [link for link in page.links if link.startswith("javascript")]
    assert "s3cret" not in "".join(page.text + page.links)


def test_curves_are_drawn_with_their_last_values_and_numbers_that_are_no_curves_are_not() -> None:
    words = {title: Page(drawing).words for title, drawing in draw_charts(HISTORY).items()}
    assert list(words) == ["Loss", "Evaluation while training", "Learning rate"]
    legends = ("loss 0.02 eval_loss 0.04", "eval_accuracy 0.5", "learning_rate 2e-05")
    for title, legend in zip(words, legends, strict=True):
        assert words[title].endswith(f"optimizer step {legend}")


def test_a_failure_is_told_with_its_remedy_and_a_run_without_anything_is_a_page_too() -> None:
    error = {"class": "DataError", "message": "Empty.", "field": "test", "value": "0 rows", "remedy": "Add rows."}
    words = Page(render_report(_result(error=error))).words
    assert "Failed in 1 min 8 s" in words
    assert "DataError test = 0 rows : Empty." in words
    assert "What to do: Add rows." in words
    assert "svg" not in Page(render_report({"name": "x", "stages": [], "error": None})).tags


# -- the closing summary on the command line ---------------------------------------------------------------------------

REVISION = "https://huggingface.co/me/toy/tree/0f3a"


def test_the_published_revision_is_shown_not_only_its_repository() -> None:
    stage = find_stage("publish")
    assert stage is not None
    facts = PublishFacts("hf://me/toy", REVISION, "0f3a", "d" * 64)
    manifest = StageManifest("push-to-hub", "", "store/stages/push-to-hub/0123", "", facts=facts)
    outcome = StageOutcome("push-to-hub", "ran", "forced", 1.0, manifest.to_dict(), stage.places(manifest))
    result = PipelineResult("toy", "key", "store", [outcome])
    assert where(result)["published"] == REVISION
    assert any(REVISION in line.plain for line in summary(result, ["trainflow", "ui"]))


def test_a_metric_is_shown_with_its_interval_and_a_count_in_full() -> None:
    measured = {"test_accuracy": 0.95, "test_accuracy_low": 0.9312, "test_accuracy_high": 0.97, "test_words": 12345}
    manifest = {"metrics": {"test": {**measured, "test_runtime": 3.0}}}
    result = PipelineResult("p", "k", "s", [StageOutcome("evaluate", "ran", "why", manifest=manifest)])
    shown = "\n".join(line.plain for line in summary(result, ["trainflow", "ui"]))
    assert "\n  metric    test\n  accuracy  0.95 (0.9312 to 0.97)\n  words     12,345\n" in shown
