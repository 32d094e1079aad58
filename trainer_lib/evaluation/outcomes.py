"""A model's hits and errors on a split, in a few numbers: counts by class, or measured and predicted values.

And the inputs of the rows that a report shows, texts of bounded length and small pictures; and the subgroups of rows on
which a model errs most, found among the values of all columns.
"""

from __future__ import annotations

import base64
import io
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.secrets import mask

MAX_CLASSES = 100
MAX_ROWS = 2000  # of a picture of residuals
SAMPLES = 10  # rows that are shown, and as many of the worst
HARDEST = 50  # rows that the model gets most wrong
_CELLS, _EXAMPLES = 5, 3  # of wrong cells of the matrix, and of rows behind a cell
BINS = 10  # of confidence
_GRID, _CURVE_ROWS = 101, 50_000  # points of a curve, and rows that it is drawn from
_CHOSEN = 0.5  # the threshold between two classes
_DIGITS = 6


def summarize_outcomes(
    # Scores [rows, classes] with whole labels [rows], or numbers [rows] or [rows, 1] with labels of that size; or
    # scores [rows, classes] with labels of 0 and 1, where `classes` is given.
    predictions: Any,
    labels: Any,
    id_of: Callable[[int], Any] = int,  # the id of a row, by its number from 0
    *,
    confidence: Any = None,  # of predictions that are whole numbers of classes [rows], their probabilities [rows]
    classes: int | None = None,  # how many there are; used where the predictions do not say it
    threshold: float = _CHOSEN,  # the probability from which on one of several classes is predicted
) -> dict[str, Any] | None:
    """The outcomes of one split as plain JSON; None for a model whose outputs are neither classes nor single numbers.

    Returns:
        `kind` ("classes", "several" or "numbers"), the counts ``[true class, predicted class]`` in `matrix` or up to
        2,000 values each in `measured` and `predicted`, and the first and the worst rows in `samples`. `hardest` has up
        to 50 rows as [id, label, prediction, loss], the worst first: of classes the negative log-likelihood in nats, of
        numbers the absolute error. `reliability` has the bins of confidence that have rows as [confidence, accuracy,
        rows]. Where only the probability of the predicted class is known, `hardest` is empty. `confusions` has the
        largest wrong cells of the matrix as [label, prediction, rows, ids of the worst of them]; `curves` those of
        `_curves`.
        Where rows have several classes, labels and predictions are lists, and there are only `samples` and `hardest`.
    """
    if not isinstance(predictions, np.ndarray) or not isinstance(labels, np.ndarray) or not len(labels):
        return None
    rows = len(labels)
    if labels.dtype.kind in "iu" and labels.ndim == 1 and predictions.ndim == 2 and len(predictions) == rows:
        return _scores(predictions, labels, id_of)
    if confidence is not None and labels.dtype.kind in "iu" and predictions.dtype.kind in "iu":
        found = _classes(predictions, labels, classes or int(max(predictions.max(), labels.max())) + 1, id_of)
        return found and {**found, "hardest": [], "reliability": _reliability(confidence, predictions == labels)}
    if classes is not None and labels.shape == predictions.shape == (rows, classes) and np.isin(labels, (0, 1)).all():
        return _several(predictions.astype(np.float64), labels > 0, id_of, threshold)
    flat, measured = predictions.reshape(-1), labels.reshape(-1)
    if labels.dtype.kind == "f" and predictions.dtype.kind == "f" and len(flat) == len(measured) == rows:
        return _numbers(flat, measured, id_of)
    return None


def find_collapse(outcomes: Mapping[str, Any], classes: Sequence[str] = ()) -> str | None:
    """The one class that a model predicts for every row although the rows have several; None where it is not so."""
    matrix = np.array(outcomes.get("matrix") or [[0]])
    predicted, present = np.flatnonzero(matrix.sum(axis=0)), np.flatnonzero(matrix.sum(axis=1))
    if len(predicted) != 1 or len(present) < 2:
        return None
    return str(classes[predicted[0]]) if len(classes) == len(matrix) else str(predicted[0])


def _scores(scores: np.ndarray, labels: np.ndarray, id_of: Callable[[int], Any]) -> dict[str, Any] | None:
    predicted = scores.argmax(axis=1)
    found = _classes(predicted, labels, scores.shape[1], id_of)
    if found is None:
        return None
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    losses = -logs[np.arange(len(labels)), labels]
    return {
        **found,
        "confusions": _confusions(np.array(found["matrix"]), predicted, labels, losses, id_of),
        "hardest": _hardest(losses, labels, predicted, id_of),
        "reliability": _reliability(np.exp(logs.max(axis=1)), predicted == labels),
        "curves": _curves(np.exp(logs), labels),
    }


def _curves(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """ROC and precision-recall: of two classes those of the second, of more the mean over one class against the rest.

    Returns:
        Points in `roc` and `precision_recall`, `roc_auc` and `average_precision`, the number of `classes` in the mean;
        of two classes `threshold`, the scores of predictions at 0.5 and the threshold of the largest F1. Empty where no
        class has rows of both kinds, and where a probability is not a number.
    """
    from sklearn import metrics

    # Sorting takes long for many rows and classes: rows at equal distances stand for all.
    rows = np.linspace(0, len(labels) - 1, min(len(labels), _CURVE_ROWS)).astype(np.int64)
    probabilities, labels = probabilities[rows], labels[rows]
    is_binary, grid = probabilities.shape[1] == 2, np.linspace(0, 1, _GRID)
    roc, precise, areas, averages, threshold = [], [], [], [], {}
    for number in [1] if is_binary else range(probabilities.shape[1]):
        truth, sure = labels == number, probabilities[:, number]
        if truth.all() or not truth.any() or not np.isfinite(sure).all():
            continue
        wrong, right, _ = metrics.roc_curve(truth, sure)
        precision, recall, places = metrics.precision_recall_curve(truth, sure)
        roc.append(np.interp(grid, wrong, right))
        precise.append(precision[::-1][np.searchsorted(recall[::-1], grid)])  # at the next greater recall
        areas.append(metrics.roc_auc_score(truth, sure))
        averages.append(metrics.average_precision_score(truth, sure))
        if is_binary:
            threshold = _threshold(truth, sure, precision[:-1], recall[:-1], places)
    if not roc:
        return {}

    def points(curves: list[np.ndarray]) -> list[list[float]]:
        mean = np.mean(curves, axis=0)
        return [[_short(x), _short(y)] for x, y in zip(grid, mean, strict=True)]

    return {
        "roc": [[0.0, 0.0], *points(roc)],
        "precision_recall": points(precise),
        "roc_auc": _short(np.mean(areas)),
        "average_precision": _short(np.mean(averages)),
        "classes": len(roc),
        "threshold": threshold,
    }


def _threshold(
    truth: np.ndarray, sure: np.ndarray, precision: np.ndarray, recall: np.ndarray, places: np.ndarray
) -> dict[str, float]:
    """The scores at the threshold of predictions, 0.5, and of the threshold with the largest F1."""
    chosen = sure > _CHOSEN  # of equal probabilities the first class is predicted
    hits = int((chosen & truth).sum())
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    numbers = {
        "chosen": _CHOSEN,
        "false_positive_rate": (chosen & ~truth).sum() / (~truth).sum(),
        "recall": hits / truth.sum(),
        "precision": hits / chosen.sum() if chosen.any() else 1.0,
        "f1": 2 * hits / (chosen.sum() + truth.sum()),
        "best": places[best],
        "best_f1": f1[best],
    }
    return {name: _short(value) for name, value in numbers.items()}


def _classes(
    predicted: np.ndarray, labels: np.ndarray, classes: int, id_of: Callable[[int], Any]
) -> dict[str, Any] | None:
    """The counts and samples of classes; None where there are too many, or a label is none of them."""
    if not 2 <= classes <= MAX_CLASSES or min(labels.min(), predicted.min()) < 0:
        return None
    if max(labels.max(), predicted.max()) >= classes:
        return None
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    samples = _samples(np.flatnonzero(predicted != labels), labels, predicted, id_of)
    confusions = _confusions(matrix, predicted, labels, np.zeros(len(labels)), id_of)
    counted = {"kind": "classes", "rows": len(labels), "matrix": matrix.tolist()}
    return {**counted, "samples": samples, "confusions": confusions}


def _confusions(
    matrix: np.ndarray, predicted: np.ndarray, labels: np.ndarray, losses: np.ndarray, id_of: Callable[[int], Any]
) -> list[list[Any]]:
    """The largest wrong cells as [label, prediction, rows, ids], the rows of the largest losses first."""
    wrong = matrix * (1 - np.eye(len(matrix), dtype=np.int64))
    largest = np.argsort(-wrong, axis=None, kind="stable")[:_CELLS]
    cells = [divmod(int(cell), len(matrix)) for cell in largest if wrong.flat[cell]]
    examples = []
    for label, guess in cells:
        rows = np.flatnonzero((labels == label) & (predicted == guess))
        worst = rows[np.argsort(-losses[rows], kind="stable")][:_EXAMPLES].tolist()
        examples.append([label, guess, len(rows), [id_of(row) for row in worst]])
    return examples


def _reliability(confidence: np.ndarray, right: np.ndarray) -> list[list[Any]]:
    is_known = np.isfinite(confidence)
    confidence, right = confidence[is_known], right[is_known]
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    members = (bins == number for number in range(BINS))
    return [
        [_short(confidence[chosen].mean()), _short(right[chosen].mean()), int(chosen.sum())]
        for chosen in members
        if chosen.any()
    ]


def _hardest(
    losses: np.ndarray, labels: np.ndarray, predicted: np.ndarray, id_of: Callable[[int], Any]
) -> list[list[Any]]:
    """The rows of the largest losses as [id, label, prediction, loss]; one of an infinite loss has none."""
    worst = np.argsort(-losses, kind="stable")[:HARDEST].tolist()
    known = [_short(loss) if np.isfinite(loss) else None for loss in losses[worst]]
    rows = zip(worst, known, strict=True)
    return [[id_of(row), _short(labels[row]), _short(predicted[row]), loss] for row, loss in rows]


def _numbers(predicted: np.ndarray, measured: np.ndarray, id_of: Callable[[int], Any]) -> dict[str, Any] | None:
    finite = np.isfinite(predicted) & np.isfinite(measured)
    if not finite.all():
        return None
    error = np.abs(predicted.astype(np.float64) - measured)
    worst = np.sort(np.argsort(-error, kind="stable")[:SAMPLES])
    shown = np.linspace(0, len(measured) - 1, min(MAX_ROWS, len(measured))).round().astype(np.int64)
    return {
        "kind": "numbers",
        "rows": len(measured),
        "measured": [_short(value) for value in measured[shown]],
        "predicted": [_short(value) for value in predicted[shown]],
        "samples": _samples(worst, measured, predicted, id_of),
        "hardest": _hardest(error, measured, predicted, id_of),
    }


def _several(scores: np.ndarray, truth: np.ndarray, id_of: Callable[[int], Any], threshold: float) -> dict[str, Any]:
    chosen = scores >= np.log(threshold / (1 - threshold))
    losses = np.logaddexp(0, np.where(truth, -scores, scores)).mean(axis=1)
    worst, wrong = np.argsort(-losses, kind="stable")[:HARDEST].tolist(), np.flatnonzero((chosen != truth).any(axis=1))

    def described(row: int) -> list[Any]:
        return [id_of(row), np.flatnonzero(truth[row]).tolist(), np.flatnonzero(chosen[row]).tolist()]

    return {
        "kind": "several",
        "rows": len(truth),
        "classes": truth.shape[1],
        "samples": [described(row) for row in _sample_rows(wrong, len(truth))],
        "hardest": [[*described(row), _short(losses[row])] for row in worst],
    }


def _sample_rows(worst: np.ndarray, rows: int) -> list[int]:
    """The first rows, then of the worst those that are not among them."""
    first = list(range(min(SAMPLES, rows)))
    return first + [int(row) for row in worst[:SAMPLES] if row not in first]


def _samples(
    worst: np.ndarray, labels: np.ndarray, predicted: np.ndarray, id_of: Callable[[int], Any]
) -> list[list[Any]]:
    """Rows as [id, label, prediction]."""
    return [[id_of(row), _short(labels[row]), _short(predicted[row])] for row in _sample_rows(worst, len(labels))]


def _short(value: Any) -> float | int:
    return int(value) if isinstance(value, np.integer) else float(f"{float(value):.{_DIGITS}g}")


# -- inputs of rows that are shown ------------------------------------------------------------------------------------
CHARS = 300  # the length of the text of a row with one column; a table's row has up to 12 values of 60
_VALUE_CHARS, _COLUMNS, _NUMBERS = 60, 12, 8
_SIDE, _SMALL = 96, 32  # pixels of a picture, and of one that JPEG would blur
_MOST_PIXELS = 50_000_000  # that are decoded
_LEAST_SIDE = 4
_CHANNELS = (1, 3, 4)
_LABELS = "labels"


def collect_inputs(
    outcomes: Mapping[str, Any], row_of: Callable[[Any], Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """The inputs of all rows that outcomes name, by the id as a text; `row_of`: the columns of a row, by its id."""
    named = [row_id for name in ("hardest", "samples") for row_id, *_ in outcomes.get(name) or ()]
    named += [row_id for *_, ids in outcomes.get("confusions") or () for row_id in ids]
    return {str(row_id): describe_input(row_of(row_id)) for row_id in dict.fromkeys(named)}


def describe_input(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as `text`, with `image`, a data URI, where a column holds bytes of a picture or pixels in uint8."""
    values = {name: value for name, value in row.items() if name != _LABELS}
    images = {name: image for name, value in values.items() if (image := _draw_small(value)) is not None}
    texts = {name: _in_words(value) for name, value in values.items() if name not in images}
    if len(texts) == 1:
        text = _shorten(next(iter(texts.values())), CHARS)
    else:
        text = "; ".join(f"{name}: {_shorten(value, _VALUE_CHARS)}" for name, value in list(texts.items())[:_COLUMNS])
        text += f"; and {len(texts) - _COLUMNS:,} more" if len(texts) > _COLUMNS else ""
    return {"text": mask(text), **({"image": next(iter(images.values()))} if images else {})}


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, np.ndarray):
        if value.size > _NUMBERS:
            return f"{value.dtype} {list(value.shape)}"
        return str(value.tolist())
    return " ".join(" ".join(map(str, value if isinstance(value, list) else [value])).split())


def _shorten(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _draw_small(value: Any) -> str | None:
    """A thumbnail as a data URI; None for anything else."""
    from PIL import Image

    try:
        if isinstance(value, bytes):
            picture: Any = Image.open(io.BytesIO(value))
            if picture.width * picture.height > _MOST_PIXELS:
                return None
            picture = picture.convert("RGB")
        elif (pixels := _pixels(value)) is not None:
            picture = Image.fromarray(pixels)
        else:
            return None
    except Exception:  # a damaged picture: Pillow's formats raise many kinds
        return None
    picture.thumbnail((_SIDE, _SIDE))
    form = "JPEG" if picture.mode in ("L", "RGB") and max(picture.size) > _SMALL else "PNG"
    buffer = io.BytesIO()
    picture.save(buffer, format=form, **({"quality": 80} if form == "JPEG" else {}))
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _pixels(value: Any) -> np.ndarray | None:
    """An image ``[height, width]`` or with channels behind; None for another array."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (2, 3):
        return None
    pixels: np.ndarray = value if value.ndim == 3 else value[..., None]
    if pixels.shape[-1] not in _CHANNELS and pixels.shape[0] in _CHANNELS:
        pixels = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if min(pixels.shape[:2]) < _LEAST_SIDE or pixels.shape[-1] not in _CHANNELS:
        return None
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


# -- subgroups --------------------------------------------------------------------------------------------------------
# They are tested against all other rows: shares of wrong classes by Fisher's exact test, absolute errors by Welch's.
# The p-values are adjusted for the number of subgroups (Holm, 1979), so the worst of many is not taken for news.
_ENOUGH, _GROUPS = 30, 3  # rows that a subgroup and the rest must have, and how many subgroups are named
_GROUP_ROWS, _GROUP_COLUMNS = 20_000, 50  # the most rows and columns that are looked at
_TEXTS = 20  # of a column of texts; of more different ones the lengths count
_CUT_FROM = 10  # of a column of numbers; more different ones are cut into four parts
_NAME_CHARS = 40  # of a value in a name
_QUARTERS = (0, 0.25, 0.5, 0.75, 1)


def find_weak_groups(
    predictions: Any, labels: Any, columns: Mapping[str, Callable[[np.ndarray], Iterable[Any]]], classes: Any = None
) -> dict[str, Any] | None:
    """The subgroups that are worse than the other rows, the most certain ones first; None where rows have no error.

    `columns`: column -> its values in some rows, by their numbers ``[some]``; `classes`: names, for subgroups by the
    predicted class.

    Returns:
        `error` ("error_rate" or "absolute_error"), the `rows` that were looked at, how many subgroups were `tested`,
        and `groups` as [name, rows, their error, that of the rest, adjusted p].
    """
    errors = _row_errors(predictions, labels)
    if errors is None or not np.isfinite(errors).all():
        return None
    rows = np.linspace(0, len(errors) - 1, min(len(errors), _GROUP_ROWS)).astype(np.int64)
    errors, is_share = errors[rows], errors.dtype == bool
    groups = [group for name in list(columns)[:_GROUP_COLUMNS] for group in _split_by(name, list(columns[name](rows)))]
    if is_share:
        predicted = np.asarray(predictions)[rows]
        predicted = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted
        named = classes if isinstance(classes, list) else range(int(predicted.max()) + 1)
        groups += [(f"predicted: {name}", predicted == number) for number, name in enumerate(named)]
    groups = [(name, mask) for name, mask in groups if _ENOUGH <= mask.sum() <= len(errors) - _ENOUGH]
    if not groups:
        return None
    chances = np.array([_chance(errors[mask], errors[~mask]) for _, mask in groups])
    order = np.argsort(chances, kind="stable")
    adjusted = np.maximum.accumulate(np.minimum(chances[order] * np.arange(len(order), 0, -1), 1))
    weak = []
    for place, chance in zip(order, adjusted, strict=True):
        name, mask = groups[place]
        own, rest = float(errors[mask].mean()), float(errors[~mask].mean())
        if own > rest:
            weak.append([name, int(mask.sum()), *(float(f"{number:.6g}") for number in (own, rest, chance))])
    error = "error_rate" if is_share else "absolute_error"
    return {"error": error, "rows": len(errors), "tested": len(groups), "groups": weak[:_GROUPS]}


def _row_errors(predictions: Any, labels: Any) -> np.ndarray | None:
    """Whether the rows' classes are wrong, or how far their numbers are off; None for other outputs."""
    outputs, truth = np.asarray(predictions), np.asarray(labels)
    if truth.dtype.kind in "iu" and truth.ndim == 1 and len(outputs) == len(truth):
        guessed = outputs.argmax(axis=1) if outputs.ndim == 2 else outputs
        return np.asarray(guessed != truth) if guessed.dtype.kind in "iu" else None
    if truth.dtype.kind == outputs.dtype.kind == "f" and outputs.size == truth.size == len(truth):
        return np.asarray(np.abs(outputs.reshape(-1).astype(np.float64) - truth.reshape(-1)))
    return None


def _chance(own: np.ndarray, rest: np.ndarray) -> float:
    """The probability of so great an error of some rows if they were like the rest."""
    from scipy import stats

    if own.dtype == bool:
        total = len(own) + len(rest)
        return float(stats.hypergeom.sf(own.sum() - 1, total, own.sum() + rest.sum(), len(own)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of errors that are all equal
        chance = float(stats.ttest_ind(own, rest, equal_var=False, alternative="greater").pvalue)
    return chance if np.isfinite(chance) else 1.0


def _split_by(column: str, values: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The subgroups by a column: a name, and which rows are in it."""
    first = values[0]
    if all(isinstance(value, str) for value in values):
        different = sorted(set(values))
        if len(different) <= _TEXTS:
            texts = np.array(values, object)
            for text in different:
                yield f"{column}: {text[:_NAME_CHARS] or '(empty)'}", np.asarray(texts == text)
            return
    if isinstance(first, str | list) or (isinstance(first, np.ndarray) and first.ndim == 1):
        yield from _quarters(f"length of {column}", np.array([len(value) for value in values], np.float64))
    elif isinstance(first, bool | int | float):
        numbers = np.array(values, np.float64)
        different = np.unique(numbers[np.isfinite(numbers)]).tolist()
        if len(different) > _CUT_FROM:
            yield from _quarters(column, numbers)
        else:
            yield from ((f"{column}: {number:.6g}", numbers == number) for number in different)
        yield f"{column}: (missing)", np.isnan(numbers)


def _quarters(name: str, numbers: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    known = numbers[np.isfinite(numbers)]
    edges = np.unique(np.quantile(known, _QUARTERS)) if len(known) else known
    for low, high in itertools.pairwise(edges):
        is_last = high == edges[-1]
        mask = (numbers >= low) & ((numbers <= high) if is_last else (numbers < high))
        yield f"{name}: {low:.4g} to {'' if is_last else 'below '}{high:.4g}", mask
