"""What a model got right and wrong in a few numbers; its outputs as trees of arrays on disk."""

from __future__ import annotations

import base64
import io
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation import nested, outcomes
from trainer_lib.evaluation.importance import Dealt, measure_importance
from trainer_lib.evaluation.metrics import NamedMetrics
from trainer_lib.evaluation.prediction_spool import MAX_MEMORY_BYTES, PredictionSpool

GROUPED = 800
BIG = MAX_MEMORY_BYTES  # bytes that stay in memory


def test_classes_are_counted_and_wrong_rows_are_among_the_samples() -> None:
    labels = np.array([0, 1, 2, 2] * 10)
    scores = np.eye(3)[labels]
    scores[37] = [0, 0, 1]  # a 1 that is taken for a 2
    found = outcomes.summarize_outcomes(scores, labels, lambda row: 100 + row)
    assert found is not None and (found["kind"], found["rows"]) == ("classes", 40)
    assert found["matrix"] == [[10, 0, 0], [0, 9, 1], [0, 0, 20]] and found["samples"][0] == [100, 0, 0]
    assert found["samples"][outcomes.SAMPLES :] == [[137, 1, 2]] and found["confusions"] == [[1, 2, 1, [137]]]
    assert len(found["hardest"]) == 40 and found["hardest"][0] == [137, 1, 2, pytest.approx(1.55144, abs=1e-5)]
    assert found["hardest"][1][3] == pytest.approx(0.551445, abs=1e-5)
    # All have a confidence of e / (e + 2).
    assert found["reliability"] == [[pytest.approx(0.576117, abs=1e-5), 0.975, 40]]
    json.dumps(found, allow_nan=False)


def test_a_row_that_the_model_rules_out_is_the_hardest_and_its_loss_is_no_number() -> None:
    found = outcomes.summarize_outcomes(np.array([[0.0, 0.0], [0.0, -np.inf], [3.0, 0.0]]), np.array([0, 1, 1]))
    assert found is not None and [row for row, *_ in found["hardest"]] == [1, 2, 0]
    assert found["hardest"][0] == [1, 1, 0, None]
    json.dumps(found, allow_nan=False)


def test_classes_whose_probability_alone_is_known_are_counted_and_calibrated() -> None:
    labels, guessed = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    found = outcomes.summarize_outcomes(guessed, labels, confidence=np.array([0.9, 0.9, 0.55, 0.9]), classes=3)
    assert found is not None and found["matrix"] == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert found["reliability"] == [[0.55, 0.0, 1], [pytest.approx(0.9), 1.0, 3]]
    assert found["samples"][:2] == [[0, 0, 0], [1, 1, 1]] and found["hardest"] == []
    assert outcomes.summarize_outcomes(guessed, labels) is None


def test_the_largest_confusions_have_their_worst_rows() -> None:
    labels = np.array([0] * 8 + [1] * 4 + [2] * 4)
    scores = np.eye(3)[labels]
    scores[:5] = [0, 1, 0]
    scores[4] = [0, 9, 0]
    scores[12] = [2, 0, 0]
    found = outcomes.summarize_outcomes(scores, labels, lambda row: f"r{row}")
    assert found is not None and found["confusions"] == [[0, 1, 5, ["r4", "r0", "r1"]], [2, 0, 1, ["r12"]]]
    inputs = outcomes.collect_inputs(found, lambda row_id: {"x": row_id, "labels": 0})
    assert inputs["r12"] == {"text": "r12"} and inputs.keys() == {f"r{row}" for row in range(16)}


def _scored(classes: int, rows: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Scores that say something of their labels, and rows of all classes but the last of three and more."""
    draw = np.random.default_rng(classes)
    labels = draw.integers(0, max(2, classes - 1), rows)
    return 2 * np.eye(classes)[labels] + draw.normal(size=(rows, classes)), labels


@pytest.mark.parametrize("classes", [2, 4])
def test_curves_are_those_of_scikit_learn_and_the_threshold_has_its_scores(classes: int) -> None:
    from sklearn.metrics import f1_score, precision_score, recall_score  # seconds: not for every worker

    scores, labels = _scored(classes)
    found = outcomes.summarize_outcomes(scores, labels)
    assert found is not None
    curves = found["curves"]
    named = NamedMetrics(None, read_metrics(["roc_auc", "average_precision"]))
    for name, value in named(EvalPrediction(scores, labels)).items():
        assert curves[name] == pytest.approx(value, rel=1e-5)
    assert curves["classes"] == (1 if classes == 2 else 3)
    x, y = np.array(curves["roc"]).T
    assert np.trapezoid(y, x) == pytest.approx(curves["roc_auc"], abs=0.01)
    recall, precision = np.array(curves["precision_recall"]).T
    assert np.trapezoid(precision, recall) == pytest.approx(curves["average_precision"], abs=0.02)
    if classes > 2:
        assert curves["threshold"] == {}
        return
    guessed, mark = scores.argmax(axis=1), curves["threshold"]
    assert mark["precision"] == pytest.approx(precision_score(labels, guessed), rel=1e-5)
    assert mark["recall"] == pytest.approx(recall_score(labels, guessed), rel=1e-5)
    assert mark["f1"] == pytest.approx(f1_score(labels, guessed), rel=1e-5)
    at_best = scores[:, 1] - scores[:, 0] >= np.log(mark["best"] / (1 - mark["best"])) - 1e-4
    assert mark["best_f1"] == pytest.approx(f1_score(labels, at_best), abs=2e-3) and mark["best_f1"] >= mark["f1"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("change", ["one class", "nan", "probability alone"])
def test_there_are_no_curves_without_scores_of_rows_of_both_kinds(change: str) -> None:
    scores, labels = _scored(2)
    if change == "probability alone":
        found = outcomes.summarize_outcomes(scores.argmax(axis=1), labels, confidence=np.full(len(labels), 0.9))
    else:
        scores[3] = np.nan if change == "nan" else scores[3]
        found = outcomes.summarize_outcomes(scores, labels * (change != "one class"))
    assert found is not None and not found.get("curves")


def _measure_importance(seconds: float = 60.0, **columns: Any) -> Any:
    """Importance for a model that adds 3 a and b and is asked about numbers."""
    draw = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {"a": float(a), "b": float(b), "c": float(c), "labels": 0.0, **columns}
        for a, b, c in draw.normal(size=(800, 3))
    ]

    def predict(dealt: Dealt) -> Iterator[Any]:
        for start in range(0, len(dealt), 100):
            yield np.array(
                [3 * dealt[row]["a"] + dealt[row]["b"] for row in range(start, min(start + 100, len(dealt)))]
            )

    truth = np.array([3 * row["a"] + row["b"] for row in rows])
    given = EvalPrediction(truth + draw.normal(size=800), truth)
    compute = NamedMetrics(None, read_metrics(["rmse", "r2"]))
    return measure_importance(compute, given, rows.__getitem__, predict, seed="ab" * 32, seconds=seconds)


def test_importance_is_what_the_metric_loses_and_the_same_every_time() -> None:
    found = _measure_importance()
    assert (found["metric"], found["rows"], found["left_out"]) == ("rmse", 500, 0)
    (first, a, low, high), (second, b, *_), (third, c, *ends) = found["columns"]
    assert (first, second, third) == ("a", "b", "c")
    # Without the noise of the predictions of all rows, which is 1: sqrt(2) times 3 and 1.
    assert (a + 1, b + 1) == (pytest.approx(3 * 2**0.5, rel=0.1), pytest.approx(2**0.5, rel=0.1))
    assert low < a < high < a + 1
    assert c == pytest.approx(-1, rel=0.1) and ends[0] <= c <= ends[1]
    assert _measure_importance() == found


@pytest.mark.parametrize(("columns", "seconds"), [({}, 0.0), ({"d": np.zeros(3)}, 60.0)])
def test_importance_ends_in_time_and_is_of_tables(columns: dict[str, Any], seconds: float) -> None:
    found = _measure_importance(seconds, **columns)
    assert found is None if columns else (found["columns"], found["left_out"]) == ([], 3)


def _find_weak(errs: str, *, numbers: bool = False, **more: Any) -> Any:
    """The weak groups of rows with columns of all kinds, where rows of one of them are wrong more often."""
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {
        "site": draw.choice(["a", "b", "c"], GROUPED).tolist(),
        "age": draw.normal(50, 10, GROUPED).tolist(),
        "grade": draw.integers(0, 3, GROUPED).tolist(),
        "text": ["x" * number for number in draw.integers(1, 90, GROUPED)],
        "tokens": [np.zeros(number) for number in draw.integers(1, 90, GROUPED)],
        "image": [np.zeros((4, 4))] * GROUPED,
        "rare": ["z"] * 20 + ["y"] * (GROUPED - 20),
    } | more
    where = {
        "site": [value == "b" for value in columns["site"]],
        "age": [value > 57 for value in columns["age"]],
        "text": [len(value) < 23 for value in columns["text"]],
        "nothing": [False] * GROUPED,
    }[errs]
    wrong = draw.random(GROUPED) < np.where(where, 0.4, 0.1)
    labels = draw.integers(0, 2, GROUPED)
    predictions = wrong + draw.normal(0, 0.1, GROUPED) if numbers else np.eye(2)[np.where(wrong, 1 - labels, labels)]
    values = {name: lambda rows, column=column: [column[row] for row in rows] for name, column in columns.items()}
    return outcomes.find_weak_groups(predictions, labels * 0.0 if numbers else labels, values, ["no", "yes"])


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(("errs", "name"), [("site", "site: b"), ("age", "age: 5"), ("text", "length of text: 1 to")])
def test_the_subgroup_with_more_errors_comes_first_and_the_same_every_time(errs: str, name: str, numbers: bool) -> None:
    weak = _find_weak(errs, numbers=numbers)
    group, rows, own, rest, chance = weak["groups"][0]
    assert group.startswith(name)
    assert 30 <= rows < 300 and own > 1.5 * rest and chance < 1e-3
    assert len(weak["groups"]) <= 3 and weak["rows"] == GROUPED
    # Sites, quarters of ages and of two lengths, grades, the predicted class: what is rare is not tested.
    assert weak["tested"] == 3 + 4 + 4 + 4 + 3 + (0 if numbers else 2) and weak == _find_weak(errs, numbers=numbers)


def test_what_is_tested_often_is_not_taken_for_news() -> None:
    draw = np.random.default_rng(7)
    noise = {f"c{number}": draw.choice(["a", "b", "c"], GROUPED).tolist() for number in range(40)}
    chances = [group[-1] for group in _find_weak("nothing", **noise)["groups"]]
    assert chances == sorted(chances) and chances[0] > 0.05
    assert outcomes.find_weak_groups(np.zeros((9, 2, 2)), np.zeros(9), {}) is None
    assert (
        outcomes.find_weak_groups(np.zeros((9, 2)), np.zeros(9, np.int64), {"x": lambda rows: [1.0] * len(rows)})
        is None
    )


def _png(mode: str, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("row", "text", "image"),
    [
        ({"review": "  so\n good ", "labels": 1}, "so good", None),
        ({"review": "é" * 400}, "é" * 299 + "…", None),
        ({"age": 41.0, "job": "x" * 99, "labels": 0}, f"age: 41; job: {'x' * 59}…", None),
        ({f"c{n:02}": n for n in range(15)}, "; ".join(f"c{n:02}: {n}" for n in range(12)) + "; and 3 more", None),
        ({"words": ["a", "b"], "key": "hf_" + "a1B2" * 10}, "words: a b; key: ***", None),
        ({"x": np.zeros((2, 2), np.float32)}, "[[0.0, 0.0], [0.0, 0.0]]", None),
        ({"x": np.zeros((3, 24), np.float32)}, "float32 [3, 24]", None),
        ({"image": "a/1.jpg", "pixels": np.zeros((64, 64, 3), np.uint8)}, "a/1.jpg", (64, 64)),
        ({"pixels": np.zeros((3, 8, 8), np.uint8)}, "", (8, 8)),
        ({"pixels": np.zeros((400, 200, 1), np.uint8)}, "", (48, 96)),
        ({"scan": np.zeros((8, 8), np.uint8), "mask": np.zeros((8, 5), np.uint8)}, "", (8, 8)),
        ({"bytes": _png("LA", (300, 100))}, "", (96, 32)),
        ({"bytes": _png("L", (9, 9))[:40]}, "40 bytes", None),
        ({"bytes": b"\x00" * 5}, "5 bytes", None),
        ({"tokens": np.zeros((2, 9), np.uint8)}, "uint8 [2, 9]", None),
    ],
)
def test_an_input_is_a_short_text_and_a_small_picture(row: Any, text: str, image: tuple[int, int] | None) -> None:
    shown = outcomes.describe_input(row)
    assert shown["text"] == text and ("image" in shown) == (image is not None)
    if image is not None:
        head, _, data = shown["image"].partition(";base64,")
        assert head in ("data:image/png", "data:image/jpeg")
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == image


@pytest.mark.parametrize("shape", [(5000,), (5000, 1)])
def test_numbers_are_thinned_and_the_worst_row_is_a_sample(shape: tuple[int, ...]) -> None:
    measured = np.linspace(0, 1, 5000, dtype=np.float32).reshape(shape)
    predicted = measured + 0.125
    predicted[4321] = 9.0
    found = outcomes.summarize_outcomes(predicted, measured)
    assert found is not None and (found["kind"], found["rows"]) == ("numbers", 5000)
    assert len(found["measured"]) == len(found["predicted"]) == outcomes.MAX_ROWS
    assert 4321 in [row for row, _, _ in found["samples"]]
    assert found["samples"][0] == [0, 0.0, 0.125] and len(found["hardest"]) == outcomes.HARDEST
    assert found["hardest"][0][0] == 4321 and found["hardest"][0][3] == pytest.approx(9.0 - 4321 / 4999, abs=1e-4)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("predictions", "labels"),
    [
        (np.zeros((4, 7, 3)), np.zeros((4, 7), int)),  # tokens
        (np.zeros((4, 3)), np.zeros((4, 3), np.float32)),  # several numbers of a row
        (np.zeros((4, 3)), np.array([0, 1, -100, 2])),  # ignored labels
        (np.zeros((4, 3)), np.array([0, 1, 2, 3])),  # a label without a score
        (np.array([1.0, np.nan], np.float32), np.ones(2, np.float32)),
        (np.zeros((0, 3)), np.zeros(0, int)),
        (np.zeros((4, 5000)), np.zeros(4, int)),
        ([1, 2], np.zeros(2, int)),
        (np.zeros((4, 3)), None),
    ],
)
def test_other_outputs_have_no_picture(predictions: Any, labels: Any) -> None:
    assert outcomes.summarize_outcomes(predictions, labels) is None


def filled(folder: Path, arrays: list[np.ndarray]) -> np.ndarray:
    one = PredictionSpool(folder)
    for array in arrays:
        one.append(array)
    found = one.tree()
    one.close()
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("width", [3, BIG // 4])
def test_rows_come_back_as_one_array_from_memory_and_from_disk_padded_on_the_right(width: int, tmp_path: Path) -> None:
    arrays = [np.arange(count * width, dtype=np.float32).reshape(count, width) for count in (2, 1)]
    assert np.array_equal(filled(tmp_path, arrays), np.concatenate(arrays))
    ragged = filled(tmp_path, [np.ones((2, width), np.int64), np.ones((1, width + 3), np.int64)])
    assert ragged.shape == (3, width + 3) and (ragged[:2, width:] == -100).all()
    assert ragged.sum() == 2 * width + width + 3 - 2 * 3 * 100
    assert list(tmp_path.iterdir()) == []


def test_a_mapped_array_can_be_changed_by_its_owner_only(tmp_path: Path) -> None:
    one = PredictionSpool(tmp_path)
    one.append(np.zeros((3, BIG // 4), np.float32))
    first = one.tree()
    first[0] = 7.0
    assert not one.tree().any()
    one.close()
    assert first[0, 0] == 7.0


def test_memory_stays_flat(tmp_path: Path) -> None:
    """200 MB of predictions cost pages of the file, which the system reclaims, not memory of the process."""
    one = PredictionSpool(tmp_path)
    block = np.ones((1 << 18, 10), np.float32)  # 10 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        one.append(block)
    found = one.tree()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    one.close()
    assert found.shape == (20 << 18, 10)
    assert grown < 100_000 * (1024 if sys.platform == "darwin" else 1)  # kB


def test_trees_keep_their_shape(tmp_path: Path) -> None:
    one = PredictionSpool(tmp_path)
    for _ in range(2):
        one.append({"logits": (np.ones((2, 3)), [np.zeros(2)]), "labels": None})
    found = one.tree()
    assert found["labels"] is None and found["logits"][0].shape == (4, 3)
    assert isinstance(found["logits"][1], list)
    assert [len(each["logits"][0]) for each in one.by_batch()] == [2, 2]
    with pytest.raises(DataError, match="differ in what the model returns"):
        one.append({"logits": (np.ones((2, 3)),), "labels": None})
    one.append({"logits": (np.ones((2, 3, 1)), [np.zeros(2)]), "labels": None})
    with pytest.raises(DataError, match="number of dimensions"):
        one.tree()
    one.close()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=4), st.booleans())
def test_packing_is_undone_by_unpacking(shapes: list[tuple[int, int]], nest: bool) -> None:
    arrays = [np.arange(a * b, dtype=np.int32).reshape(a, b) for a, b in shapes]
    tree = {"a": tuple(arrays), "b": [None, np.float64(3.5)]} if nest else arrays
    found = nested.unpack_tree(nested.pack_tree(nested.to_numpy(tree)))
    assert nested.describe_form(found, []) == nested.describe_form(nested.to_numpy(tree), [])
    for mine, theirs in zip(nested.list_leaves(tree), nested.list_leaves(found), strict=True):
        assert np.array_equal(mine, theirs) and np.asarray(mine).dtype == theirs.dtype


def test_tensors_become_arrays() -> None:
    found = nested.to_numpy((torch.ones(2, dtype=torch.bfloat16), torch.tensor([1]), None))
    assert found[0].dtype == np.float32 and found[1].dtype == np.int64
    assert found[2] is None
    with pytest.raises(ConfigError, match="not a tensor"):
        nested.to_numpy({"cache": object()})
