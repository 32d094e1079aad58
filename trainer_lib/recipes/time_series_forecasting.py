"""The recipe time-series-forecasting: the next steps of one series or many, beside the two naive forecasts.

    name: sea
    recipe: time-series-forecasting
    prepare:
      sources: [sea.csv]
      options: {time: month, target: temperature, context: 36, horizon: 6, season: 12}
    train:
      args: {num_train_epochs: 30, learning_rate: 3.0e-3, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.time_series_forecasting import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.held_out_metrics import measure_forecasts
from trainer_lib.recipes.option_names import choose
from trainer_lib.recipes.table_files import read_table
from trainer_lib.recipes.time_series import (
    FIELD,
    Series,
    SeriesTable,
    Window,
    WindowSplits,
    naive_error,
    window_columns,
)

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

_LEAST_SPREAD = 1e-6  # a window of equal values is not divided by nothing


class ForecastNet(nn.Module):
    """Layers from the known steps to those to come, shared by all series and targets.

    Each window is shifted by its last value and divided by its spread, and the forecast is brought back: a series may
    have any level. Without `hidden` it is NLinear (Zeng et al., Are Transformers Effective for Time Series
    Forecasting?, 2022, https://arxiv.org/abs/2205.13504) with the spread besides.

    Args:
        context: steps that are known.
        horizon: steps to forecast.
        known: mean and spread of each covariate in the training rows.
        hidden: sizes of the layers between.
        dropout: probability, after each of these.
    """

    known_mean: Tensor
    known_spread: Tensor

    def __init__(
        self, context: int, horizon: int, known: Sequence[Sequence[float]], hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.register_buffer("known_mean", torch.tensor([mean for mean, _ in known], dtype=torch.float32))
        self.register_buffer("known_spread", torch.tensor([spread for _, spread in known], dtype=torch.float32))
        size = context + len(known) * (context + horizon)
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(size, width), nn.GELU(), nn.Dropout(dropout)]
            size = width
        self.layers = nn.Sequential(*layers, nn.Linear(size, horizon))

    def forward(self, past: Tensor, known: Tensor | None = None) -> dict[str, Tensor]:
        """Forecasts ``[batch, horizon, targets]`` in `logits`.

        Args:
            past: the targets' known steps ``[batch, context, targets]``.
            known: covariates of all steps ``[batch, context + horizon, covariates]``.
        """
        last = past[:, -1:]
        spread = past.std(dim=1, keepdim=True, correction=0).clamp(min=_LEAST_SPREAD)
        inputs = ((past - last) / spread).transpose(1, 2)
        if known is not None:
            standard = ((known - self.known_mean) / self.known_spread).flatten(1)
            inputs = torch.cat((inputs, standard[:, None].expand(-1, inputs.shape[1], -1)), dim=2)
        return {"logits": self.layers(inputs).transpose(1, 2) * spread + last}


DEFAULTS: dict[str, Any] = {
    "time": None,  # column with the times: dates, or numbers
    "target": None,  # column or columns to forecast
    "series": None,  # column with the name of the series; None: the table has one
    "known": [],  # columns whose values are known for the steps to come as well (a holiday, a price)
    "rename": {},  # name of a column in the files -> its name here
    "read": {},  # how the files are written (`table_cells.READ`)
    "ignore": [],  # columns that are left out
    "context": 24,  # steps that a forecast knows
    "horizon": 1,  # steps to forecast
    "season": 1,  # steps after which the series is alike: 12 for months
    "step": None,  # of the times (h, D, W-MON, MS, or a number); None: found from the data
    "time_format": None,  # form of the times, as for strptime; None: numbers, or the one form that fits all of them
    "missing": "refuse",  # steps and values that are missing; or previous (the value before)
    "stride": 1,  # steps from one training window to the next
    "held_out_stride": None,  # from one held-out window to the next; None: the horizon: each value is forecast once
    "split": {},  # shares of the times: validation and test
}
"""Every option of `prepare`, with its default."""
NET: dict[str, Any] = {
    "hidden": [],  # sizes of the layers between
    "dropout": 0.0,  # probability, after each of them
}
"""The settings of `build_model` (`train.model`), with their defaults."""
_NOTED = ("time", "series", "step", "time_format", "missing", "rename")
_RESERVED = ("row_id", "series", "time", "scale", "labels")


def prepare(options: Mapping[str, Any], out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the series, and cut them into windows.

    Returns:
        For every split its rows: each target by its name ``[context]``, each covariate ``[context + horizon]``,
        `labels` ``[horizon, targets]``, `scale` (the unit of MASE, ``[targets]``), `time` (of the first label) and
        `row_id`.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    targets, known = _columns(chosen)
    table = read_table(out.sources, rename=chosen["rename"], read=chosen["read"], ignore=chosen["ignore"])
    for option, names in (("target", targets), ("known", known)):
        for name in names:
            table.require(name, field=f"{FIELD}.{option}")
    read = SeriesTable(table, [*targets, *known], chosen)
    series = read.series
    out.warnings += table.all_notes()
    splits = WindowSplits(series, chosen)
    training = [each.values[:steps] for each, steps in zip(series, splits.train_steps, strict=True)]
    covariates = np.concatenate(training)[:, len(targets) :]
    spreads = covariates.std(axis=0)
    described = np.stack((covariates.mean(axis=0), np.where(spreads > 0, spreads, 1.0)), axis=1)
    out.info.update(
        targets=targets,
        known=dict(zip(known, described.tolist(), strict=True)),
        filled=sum(each.filled for each in series),
        new_steps={name: read.note[name] for name in (*_NOTED, *(["read"] if chosen["read"] else []))},
        split_starts={name: str(start) for name, start in splits.starts.items()},
        **{name: chosen[name] for name in ("context", "horizon", "season")},
    )
    scales = _scales(series, [values[:, : len(targets)] for values in training], chosen["season"])
    cut: dict[str, Iterator[dict[str, Any]]] = {}
    number = 0
    for split, windows in splits.windows.items():
        cut[split] = _rows(number, windows, series, scales, chosen)
        number += len(windows)
    return cut


def _rows(
    number: int,
    windows: Sequence[Window],
    series: Sequence[Series],
    scales: Mapping[str, np.ndarray],
    chosen: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The windows of a split as rows, numbered from `number` on."""
    (targets, known), context = _columns(chosen), chosen["context"]
    for row_id, window in enumerate(windows, number):
        one, origin = series[window.series], window.origin
        values = one.values[origin - context : origin + chosen["horizon"]].astype(np.float32)
        yield {
            "row_id": row_id,
            **({"series": one.name} if one.name else {}),
            "time": one.labels[origin],
            **window_columns(values, context, targets, known),
            "labels": values[context:, : len(targets)],
            "scale": scales[one.name],
        }


def _scales(series: Sequence[Series], training: Sequence[np.ndarray], season: int) -> dict[str, np.ndarray]:
    """Series -> the unit of MASE ``[targets]``. Raises DataError for a series with hardly a step to train on."""
    found = {}
    for each, values in zip(series, training, strict=True):
        if len(values) <= season:
            of = f"The series '{each.name}'" if each.name else "The series"
            what = f"{of} has {counted(len(values), 'step')} to train on, and one season alone has {season}."
            raise DataError(what, field=f"{FIELD}.split", remedy="Leave the series out, or give smaller shares.")
        found[each.name] = naive_error(values, season).astype(np.float32)
    return found


def _columns(chosen: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Targets and covariates. Raises ConfigError where one is missing, or has two uses."""
    for option, what in (("time", "where the times are"), ("target", "what to forecast")):
        if not chosen[option]:
            remedy = f"Name the column: prepare.options.{option}=NAME."
            raise ConfigError(f"The recipe needs to know {what}.", field=f"{FIELD}.{option}", remedy=remedy)
    targets = [chosen["target"]] if isinstance(chosen["target"], str) else list(chosen["target"])
    names = [*targets, *chosen["known"]]
    twice = next((name for name in names if names.count(name) > 1 or name in (chosen["time"], chosen["series"])), None)
    if twice is not None:
        raise ConfigError("A column has one use.", field=f"{FIELD}.target", value=twice, remedy="Name it once.")
    taken = next((name for name in names if name in _RESERVED), None)
    if taken is not None:
        remedy = f"Give it another name: prepare.options.rename.{taken}=NAME."
        raise ConfigError(f"The recipe uses the name '{taken}' itself.", field=f"{FIELD}.target", remedy=remedy)
    return targets, list(chosen["known"])


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`."""
    chosen = choose(options, NET, field="train.model")
    return ForecastNet(data.info["context"], data.info["horizon"], list(data.info["known"].values()), **chosen)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `past` ``[batch, context, targets]`` and, with covariates, `known` ``[batch, steps, covariates]``.

    `labels` ``[batch, 4, horizon, targets]`` are the values to come, what repeating the last value and the last season
    would forecast, and the unit of MASE.
    """
    info = data.info
    past = np.stack([np.stack([row[name] for name in info["targets"]], axis=-1) for row in rows]).astype(np.float32)
    batch = {"past": torch.from_numpy(past)}
    if info["known"]:
        known = [np.stack([row[name] for name in info["known"]], axis=-1) for row in rows]
        batch["known"] = torch.from_numpy(np.stack(known).astype(np.float32))
    if "labels" in rows[0]:
        truth = np.stack([row["labels"] for row in rows])
        last = np.repeat(past[:, -1:], info["horizon"], axis=1)
        places = np.arange(info["horizon"]) % info["season"] - info["season"]
        scale = np.broadcast_to(np.stack([row["scale"] for row in rows])[:, None], truth.shape)
        batch["labels"] = torch.from_numpy(np.stack((truth, last, past[:, places], scale), axis=1).astype(np.float32))
    return batch


def compute_loss_func(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Compute Huber's loss of forecasts ``[batch, horizon, targets]``, in the unit of MASE; labels as of `collate`."""
    error = (outputs["logits"] - labels[:, 0]) / labels[:, 3]
    return nn.functional.huber_loss(error, torch.zeros_like(error))


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure forecasts ``[rows, horizon, targets]``, beside the naive ones for the same windows."""
    return measure_forecasts(evaluation.predictions, evaluation.label_ids)


def outcome_pairs(evaluation: EvalPrediction) -> dict[str, np.ndarray]:
    """Pair each forecast value of each window with the measured one."""
    truth = np.asarray(evaluation.label_ids)[:, 0]
    forecast = np.asarray(evaluation.predictions).reshape(-1)
    rows = np.repeat(np.arange(len(truth)), truth[0].size)
    return {"predictions": forecast, "labels": truth.reshape(-1), "rows": rows}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn forecasts ``[rows, horizon, targets]`` into a column of lists for each target."""
    return {
        f"{name}_forecast": list(predictions[:, :, place].astype(np.float32))
        for place, name in enumerate(data.info["targets"])
    }
