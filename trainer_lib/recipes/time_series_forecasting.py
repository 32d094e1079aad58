"""The recipe time-series-forecasting: the next steps of one series or many, compared with two naive forecasts.

    name: sea
    recipe: time-series-forecasting
    prepare:
      sources: [sea.csv]
      options: {time: month, target: temperature, context: 36, horizon: 6, season: 12}
    train:
      args: {num_train_epochs: 30, learning_rate: 3.0e-3, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

A window is `context` steps that are known and `horizon` steps to forecast. It belongs to the split that has all of its
targets: the test is the newest part of the times, the validation the part before. What a held-out window knows may be
of an earlier split, as it would be when the forecast is made; windows whose targets two splits share are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared.recipe_options import choose, require_choice
from trainer_lib.recipes.tables.rows import describe_rounding
from trainer_lib.recipes.tables.splitting import form_of_digits, has_zone, read_times, require_shares
from trainer_lib.recipes.tables.table_files import SOURCES, Table, read_table

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

# -- series and windows ------------------------------------------------------------------------------------------------
FIELD = "prepare.options"
SPLIT: dict[str, Any] = {"validation": 0.1, "test": 0.2, "by": "time"}
_DOZEN = 12
_CLOSE = 1e-6  # of a step: numbers of a table are rounded


@dataclass(frozen=True)
class Series:
    """A series on a regular grid."""

    name: str  # its name; empty where the table has one series
    times: np.ndarray  # times that can be compared, ``[steps]``
    labels: list[str]  # the times as texts ``[steps]``
    values: np.ndarray  # ``[steps, columns]``
    measured: np.ndarray  # whether the table has them, and they are not filled ``[steps, columns]``
    to_come: int  # the last so many steps have no target: they are to be forecast

    def past(self) -> Series:
        """The steps before those to come."""
        end = len(self.times) - self.to_come
        return Series(self.name, self.times[:end], self.labels[:end], self.values[:end], self.measured[:end], to_come=0)


class SeriesTable:
    """The series of a table by the options `time`, `time_format`, `series`, `step` and `missing`.

    The first `targets` columns may all be empty in the last rows of a series, which are steps to come. `note` has the
    options, with the form of the times and the step that were found.

    Raises:
        ConfigError: an option is wrong. DataError: a time is not one, is there twice or off the grid, or steps or
            values are missing; the error names file, row and column.
    """

    def __init__(self, table: Table, columns: Sequence[str], options: Mapping[str, Any], *, targets: int) -> None:
        require_choice(options["missing"], ("refuse", "previous"), field=f"{FIELD}.missing")
        self._table, self._columns, self._options = table, columns, options
        self._time = table.require(options["time"], field=f"{FIELD}.time")
        table.refuse_gaps(self._time, "Give every row its time, or remove the row.")
        for name in columns:
            if table.count(name) and table.find_numbers(name) is None:
                what = f"The column '{name}' holds texts, such as '{table.texts(name)[0]}'."
                raise DataError(what, field=SOURCES, remedy="Give it numbers, or leave it out.")
        self._values = np.stack([table.numbers(name) for name in columns], axis=1)
        read, form = self._read_times()
        times = pd.Series(read)
        self._counts = times.dtype.kind == "f"
        rows_of: dict[str, list[int]] = {}
        if (column := options["series"]) is not None:
            table.require(column, field=f"{FIELD}.series")
            table.refuse_gaps(column, "Give every row its series.")
        for row, name in enumerate([""] * len(table) if column is None else table.texts(column)):
            rows_of.setdefault(name, []).append(row)
        ordered = {name: self._ordered(times, rows) for name, rows in rows_of.items()}
        has_target = ~np.isnan(self._values[:, :targets]).all(axis=1)
        last = (rows[max(np.flatnonzero(has_target[rows]), default=-1) + 1 :] for rows in ordered.values())
        self._to_come = {row for rows in last for row in rows}
        for place, name in enumerate(columns if options["missing"] == "refuse" else ()):
            remedy = "Fill it in, or set prepare.options.missing=previous."
            table.refuse_gaps(name, remedy, but=self._to_come if place < targets else ())
        self._step = self._find_step([times.iloc[rows] for rows in ordered.values()])
        self.series = [self._regular(name, times, rows) for name, rows in ordered.items()]
        step = float(self._step) if self._counts else self._step.freqstr
        self.note = {**options, "step": step, "time_format": form}

    def times_after(self, series: Series, count: int) -> list[str]:
        """The times of the steps after the last one that has targets, as texts ``[count]``."""
        last = series.times[len(series.times) - series.to_come - 1]
        if self._counts:
            return [self._text(last + self._step * number) for number in range(1, count + 1)]
        return [self._text(time) for time in pd.date_range(last, periods=count + 1, freq=self._step)[1:]]

    def _read_times(self) -> tuple[np.ndarray, str | None]:
        setting, place = f"{FIELD}.time_format", self._table.places.__getitem__
        texts, form = self._table.texts(self._time), self._options["time_format"]
        times, form = read_times(texts, form, setting=setting, column=self._time, place=place)
        self._has_zone = times.dtype.kind != "f" and ("%z" in (form or "") or has_zone(texts[0]))
        if times.dtype.kind == "f" and self._options["step"] is None and (digits := form_of_digits(times)):
            what = f"The numbers of column '{self._time}', such as {texts[0]}, look like dates."
            remedy = f"Set {setting}={digits}, or for numbers their step: {FIELD}.step=1."
            raise DataError(what, field=setting, remedy=remedy)
        return times, form

    def _ordered(self, times: pd.Series[Any], rows: list[int]) -> list[int]:
        """The rows of a series by their times. Raises DataError for a time that is there twice."""
        ordered = [rows[place] for place in np.argsort(times.iloc[rows].to_numpy(), kind="stable")]
        found = times.iloc[ordered].to_numpy()
        twice = np.flatnonzero(found[1:] == found[:-1])
        if len(twice):
            one, other = (self._table.places[ordered[place]] for place in (twice[0], twice[0] + 1))
            what = f"{other}: the time {self._text(found[twice[0]])} is that of {one} as well."
            remedy = "Remove one of them, or name the column of the series: prepare.options.series=NAME."
            raise DataError(what, field=SOURCES, remedy=remedy)
        return ordered

    def _text(self, time: Any) -> str:
        if self._counts:
            return f"{time:.15g}"
        text = pd.Timestamp(time).isoformat()
        return f"{text}Z" if self._has_zone else text.removesuffix("T00:00:00")

    def _find_step(self, series: list[pd.Series[Any]]) -> Any:
        """The step of the grid: a number, or an offset of pandas."""
        given = self._options["step"]
        if given is None and not self._counts:
            given = next((found for times in series if (found := _guess_step(times)) is not None), None)
        try:
            if given is not None:
                step: Any = float(given) if self._counts else pd.tseries.frequencies.to_offset(given)
                if (step if self._counts else step.n) <= 0:
                    raise ValueError("a step leads forward")
                return step
        except (TypeError, ValueError) as error:
            wanted = "a number" if self._counts else "a frequency of pandas, such as h, D, W-MON, MS"
            what, remedy = "This is not a step of time.", f"Give {wanted}."
            raise ConfigError(what, field=f"{FIELD}.step", value=given, remedy=remedy) from error
        differences = pd.concat([times.diff().iloc[1:] for times in series])
        if not len(differences):
            remedy = "Give more rows, or check prepare.options.series."
            raise DataError("Every series has one row, so there is nothing to forecast.", field=SOURCES, remedy=remedy)
        usual = differences.mode().iloc[0]
        return usual if self._counts else pd.tseries.frequencies.to_offset(usual)

    def _regular(self, name: str, times: pd.Series[Any], rows: list[int]) -> Series:
        """A series with all steps of the grid. Raises DataError for a time off it, or steps that are missing."""
        found, of = times.iloc[rows].to_numpy(), f" of the series '{name}'" if name else ""
        grid, places, off = self._grid(found)
        if len(off):
            shown = f"{self._step:g}" if self._counts else self._step.freqstr
            what = f"{self._table.places[rows[off[0]]]}: the time {self._text(found[off[0]])} is not on the grid{of}"
            what += f" that begins at {self._text(found[0])} and has a step of {shown}."
            steps = "a number: steps of months need dates" if self._counts else "h, D, W-MON, MS, …"
            remedy = f"Correct it, or give the step: {FIELD}.step ({steps})."
            if self._has_zone:
                remedy = f"{remedy} Times with a zone are compared in UTC: local days need dates without one."
            raise DataError(what, field=SOURCES, remedy=remedy)
        gaps = np.flatnonzero(np.diff(places) > 1)
        if len(gaps) and self._options["missing"] == "refuse":
            lacking, every = np.diff(places)[gaps[0]] - 1, len(grid) - len(found)
            what = f"{self._table.places[rows[gaps[0] + 1]]}: before this row{of} the table lacks {lacking} steps"
            remedy = "Fill them in, or set prepare.options.missing=previous."
            raise DataError(f"{what}, and {every} in all.", field=SOURCES, remedy=remedy)
        values = np.full((len(grid), len(self._columns)), np.nan)
        values[places] = self._values[rows]
        unknown = np.isnan(values)
        if unknown[0].any():
            column = self._columns[int(np.flatnonzero(unknown[0])[0])]
            what = f"{self._table.places[rows[0]]}, column '{column}': the first value{of} is missing."
            raise DataError(what, field=SOURCES, remedy="Remove the row: no value before it could stand for it.")
        filled = pd.DataFrame(values).ffill().to_numpy()
        last = sum(row not in self._to_come for row in rows) - 1
        to_come = len(grid) - 1 - int(places[last])
        return Series(name, grid, [self._text(time) for time in grid], filled, ~unknown, to_come)

    def _grid(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The grid ``[steps]``, the places on it of the times found, and the numbers of those off it."""
        step = self._step
        if self._counts:
            number = int(np.floor((found[-1] - found[0]) / step + 0.5)) + 1
            grid = found[0] + step * np.arange(number)
            places = np.rint((found - found[0]) / step).astype(np.int64).clip(0, number - 1)
            return grid, places, np.flatnonzero(np.abs(found - grid[places]) > _CLOSE * abs(step))
        grid = pd.date_range(found[0], found[-1], freq=step).to_numpy()
        if not len(grid):
            return grid, np.zeros(len(found), np.int64), np.array([0])
        places = np.searchsorted(grid, found).clip(0, len(grid) - 1)
        return grid, places, np.flatnonzero(grid[places] != found)


def _guess_step(times: pd.Series[Any]) -> Any:
    """The step of dates, or of the first dozen of them that has one: the others are then named; None for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas is about to return an offset instead of its name; either will do
        for start, size in ((0, len(times)), *((start, _DOZEN) for start in range(0, len(times), _DOZEN))):
            some = times.iloc[start : start + size]
            found = pd.infer_freq(pd.DatetimeIndex(some)) if len(some) > 2 else None
            if found is not None:
                return found
    return None


Window = tuple[int, int]
"""The number of a series, and the step `origin` at which the targets begin."""


def cut_windows(
    series: Sequence[Series], options: Mapping[str, Any], targets: int
) -> tuple[dict[str, list[Window]], dict[str, Any]]:
    """The windows of the splits, by series and time, and the times at which the targets of splits begin.

    The options are `context`, `horizon`, `season`, `stride`, `held_out_stride` and `split`.

    Raises:
        ConfigError: an option is out of range. DataError: a series is too short, or a split has no window.
    """
    shares, context, horizon = _read_shares(options), options["context"], options["horizon"]
    if short := [member for member in series if len(member.times) < context + horizon]:
        of = f"The series '{short[0].name}'" if short[0].name else "The series"
        what = f"{of} has {counted(len(short[0].times), 'step')}, and a window needs {context + horizon}"
        if others := [member.name for member in short[1:]]:
            what += f"; too short as well are {len(others):,} more, such as {', '.join(map(str, others[:5]))}"
        remedy = "Give a shorter context or horizon, or remove the rows of the series."
        raise DataError(f"{what}.", field=f"{FIELD}.context", value=context, remedy=remedy)
    times = np.unique(np.concatenate([member.times for member in series]))
    test = len(times) - round(len(times) * shares["test"])
    ends = {"train": test - round(len(times) * shares["validation"]), "validation": test, "test": len(times)}
    windows: dict[str, list[Window]] = {}
    starts: dict[str, Any] = {}
    start = 0
    for name, end in ends.items():
        if end <= start:
            continue
        stride = options["stride"] if name == "train" else options["held_out_stride"] or horizon
        starts[name], windows[name] = times[start], []
        for number, member in enumerate(series):
            first = max(int(np.searchsorted(member.times, times[start])), context)
            stop = len(member.times) if end == len(times) else int(np.searchsorted(member.times, times[end]))
            has_target = member.measured[:, :targets].max(axis=1)
            origins = range(first, stop - horizon + 1, stride)
            windows[name] += [(number, at) for at in origins if has_target[at : at + horizon].any()]
        if not windows[name]:
            what = f"The split '{name}' has {counted(end - start, 'step')}, and no window of {horizon} targets fits"
            known = f" behind {context} known ones" if name == "train" else ""
            remedy = "Give it a larger share, a share of 0, or a shorter horizon."
            raise DataError(f"{what} into it{known}.", field=f"{FIELD}.split", remedy=remedy)
        start = end
    return windows, starts


def _read_shares(options: Mapping[str, Any]) -> dict[str, Any]:
    """The shares of the splits. Raises ConfigError for these, or numbers of steps, that are out of range."""
    for name in ("context", "horizon", "season", "stride", "held_out_stride"):
        if options[name] is not None and options[name] < 1:
            what = "This is a number of steps, and at least one."
            raise ConfigError(what, field=f"{FIELD}.{name}", value=options[name], remedy="Give 1 or more.")
    if options["season"] > options["context"]:
        what = f"A season of {options['season']} steps does not fit into a context of {options['context']}."
        remedy = "Give a longer context: the seasonal forecast repeats the last season."
        raise ConfigError(what, field=f"{FIELD}.season", value=options["season"], remedy=remedy)
    shares = choose(options["split"], SPLIT, field=f"{FIELD}.split")
    require_shares(shares, options["split"])
    require_choice(shares["by"], ("time",), field=f"{FIELD}.split.by")
    return shares


def window_columns(
    values: np.ndarray, context: int, targets: Sequence[str], known: Sequence[str]
) -> dict[str, np.ndarray]:
    """The columns of a row from values ``[steps, columns]``: targets ``[context]``, covariates ``[steps]``."""
    columns = {name: values[:context, place] for place, name in enumerate(targets)}
    return columns | {name: values[:, place] for place, name in enumerate(known, len(targets))}


# -- the network ------------------------------------------------------------------------------------------------------
_LEAST_SPREAD = 1e-6  # a window of equal values is not divided by nothing


class ForecastNet(nn.Module):
    """Layers from the known steps to those to come, shared by all series and targets.

    Windows are shifted by their last value and divided by their spread, and the forecast is brought back: a series may
    have any level. Without `hidden` it is NLinear (Zeng et al., Are Transformers Effective for Time Series
    Forecasting?, 2022, https://arxiv.org/abs/2205.13504) with the spread besides.

    Args:
        context: steps that are known.
        horizon: steps to forecast.
        known: mean and spread of the covariates in the training rows.
        hidden: sizes of the layers between.
        dropout: probability, after all of these.
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


# -- the recipe -------------------------------------------------------------------------------------------------------
DEFAULTS: dict[str, Any] = {
    "time": None,  # column with the times: dates, or numbers
    "target": None,  # column or columns to forecast
    "series": None,  # column with the name of the series; None: the table has one
    "known": [],  # columns whose values are known for the steps to come as well (a holiday, a price)
    "rename": {},  # name of a column in the files -> its name here
    "read": {},  # how the files are written (`data.rows.reading.Reading`)
    "ignore": [],  # columns that are left out
    "context": 24,  # steps that a forecast knows
    "horizon": 1,  # steps to forecast
    "season": 1,  # steps after which the series is alike: 12 for months
    "step": None,  # of the times (h, D, W-MON, MS, or a number); None: found from the data
    "time_format": None,  # form of the times, as for strptime; None: numbers, or the one form that fits all of them
    "missing": "refuse",  # steps and values that are missing; or previous (the value before, which is no target)
    "stride": 1,  # steps from one training window to the next
    "held_out_stride": None,  # from one held-out window to the next; None: the horizon: values are forecast once
    "split": {},  # shares of the times: validation and test
}
"""Every option of `prepare`, with its default."""
NET: dict[str, Any] = {
    "hidden": [],  # sizes of the layers between
    "dropout": 0.0,  # probability, after all of them
}
"""The settings of `build_model` (`train.model`), with their defaults."""
_NOTED = ("time", "series", "step", "time_format", "missing", "rename")
_RESERVED = ("row_id", "series", "time", "scale", "labels", "measured")


def prepare(options: Mapping[str, Any], out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the series, and cut them into windows.

    Returns:
        For every split its rows: targets by their names ``[context]``, covariates ``[context + horizon]``,
        `labels` ``[horizon, targets]``, `scale` (the unit of MASE, ``[targets]``), `time` (of the first label) and
        `row_id`; and, where some are filled, `measured` ``[horizon, targets]``, whether a label counts.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    targets, known = _columns(chosen)
    table = read_table(out.sources, rename=chosen["rename"], read=chosen["read"], ignore=chosen["ignore"])
    for option, names in (("target", targets), ("known", known)):
        for name in names:
            table.require(name, field=f"{FIELD}.{option}")
    read = SeriesTable(table, [*targets, *known], chosen, targets=len(targets))
    series = [member.past() for member in read.series]
    windows, starts = cut_windows(series, chosen, len(targets))
    left_out, values = sum(member.to_come for member in read.series), sum(member.measured.size for member in series)
    filled = values - sum(int(member.measured.sum()) for member in series)
    out.warnings += [*table.notes, *table.gap_notes()]
    if left_out:
        out.warnings.append(f"{counted(left_out, 'step')} without a target after the last one left out.")
    if filled:
        out.warnings.append(f"Of {values:,} values {filled:,} are filled: they are read, and are no targets.")
    held_out = [start for name, start in starts.items() if name != "train"]  # in their order
    steps = [int(np.searchsorted(member.times, held_out[0])) if held_out else len(member.times) for member in series]
    covariates = np.concatenate([member.values[:count] for member, count in zip(series, steps, strict=True)])
    covariates = covariates[:, len(targets) :]
    for place, name in enumerate([*targets, *known]):
        columns = (member.values[:, place] for member in series)
        found = (describe_rounding(name, column.mean(), column.std() or 1.0) for column in columns)
        out.warnings += next(filter(None, found), [])
    spreads = covariates.std(axis=0)
    described = np.stack((covariates.mean(axis=0), np.where(spreads > 0, spreads, 1.0)), axis=1)
    out.info.update(
        targets=targets,
        known=dict(zip(known, described.tolist(), strict=True)),
        filled=filled,
        new_steps={name: read.note[name] for name in (*_NOTED, *(["read"] if chosen["read"] else []))},
        split_starts={name: str(start) for name, start in starts.items()},
        **{name: chosen[name] for name in ("context", "horizon", "season")},
    )
    scales = _scales(series, steps, len(targets), chosen["season"])
    first = accumulate(map(len, windows.values()), initial=0)
    numbered = zip(windows.items(), first, strict=False)
    return {split: _rows(number, some, series, scales, chosen) for (split, some), number in numbered}


def _rows(
    number: int,
    windows: Sequence[Window],
    series: Sequence[Series],
    scales: Mapping[str, np.ndarray],
    chosen: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The windows of a split as rows, numbered from `number` on."""
    (targets, known), context = _columns(chosen), chosen["context"]
    has_gaps = not all(member.measured[:, : len(targets)].all() for member in series)
    for row_id, (place, origin) in enumerate(windows, number):
        member = series[place]
        end = origin + chosen["horizon"]
        values = member.values[origin - context : end].astype(np.float32)
        yield {
            "row_id": row_id,
            **({"series": member.name} if member.name else {}),
            "time": member.labels[origin],
            **window_columns(values, context, targets, known),
            "labels": values[context:, : len(targets)],
            "scale": scales[member.name],
            **({"measured": member.measured[origin:end, : len(targets)]} if has_gaps else {}),
        }


def _scales(series: Sequence[Series], steps: Sequence[int], targets: int, season: int) -> dict[str, np.ndarray]:
    """Series -> the unit of MASE ``[targets]``: the mean error of repeating the measured value of a season ago.

    1 where that is 0, or no pair is measured. Raises DataError for a series with hardly a step to train on.
    """
    found = {}
    for member, count in zip(series, steps, strict=True):
        if count <= season:
            of = f"The series '{member.name}'" if member.name else "The series"
            what = f"{of} has {counted(count, 'step')} to train on, and one season alone has {season}."
            raise DataError(what, field=f"{FIELD}.split", remedy="Leave the series out, or give smaller shares.")
        values = np.where(member.measured, member.values, np.nan)[:count, :targets]
        errors = np.abs(values[season:] - values[:-season])
        error = np.nansum(errors, axis=0) / np.maximum(np.count_nonzero(~np.isnan(errors), axis=0), 1)
        found[member.name] = np.where(error > 0, error, 1.0).astype(np.float32)
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

    `labels` ``[batch, 4, horizon, targets]`` are the values to come (NaN where none was measured), what repeating the
    last value and the last season would forecast, and the unit of MASE.
    """
    info = data.info
    past = np.stack([np.stack([row[name] for name in info["targets"]], axis=-1) for row in rows]).astype(np.float32)
    batch = {"past": torch.from_numpy(past)}
    if info["known"]:
        known = [np.stack([row[name] for name in info["known"]], axis=-1) for row in rows]
        batch["known"] = torch.from_numpy(np.stack(known).astype(np.float32))
    if "labels" in rows[0]:
        truth = np.stack([np.where(row.get("measured", True), row["labels"], np.nan) for row in rows])
        last = np.repeat(past[:, -1:], info["horizon"], axis=1)
        places = np.arange(info["horizon"]) % info["season"] - info["season"]
        scale = np.broadcast_to(np.stack([row["scale"] for row in rows])[:, None], truth.shape)
        batch["labels"] = torch.from_numpy(np.stack((truth, last, past[:, places], scale), axis=1).astype(np.float32))
    return batch


def compute_loss_func(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Compute Huber's loss of forecasts ``[batch, horizon, targets]``, in the unit of MASE; labels as of `collate`.

    A mean over rows, so that batches of other sizes add up to the same gradient, of means over their measured values.
    """
    measured = ~labels[:, 0].isnan()
    error = torch.where(measured, (outputs["logits"] - labels[:, 0]) / labels[:, 3], 0.0)
    losses = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
    return (losses.sum(dim=(1, 2)) / measured.sum(dim=(1, 2))).mean()


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure errors of forecasts ``[rows, horizon, targets]``, and of two forecasts that need no model.

    MASE is the mean absolute error in units of what repeating the value of a season ago errs by in the training steps
    (Hyndman and Koehler, Another look at measures of forecast accuracy, 2006). `mase_below_naive` and
    `mase_below_seasonal` are what the model is better by than repeating the last value and the last season. Labels are
    as of `collate`.
    """
    forecast = np.asarray(evaluation.predictions, np.float64)
    truth, last, season, scale = np.moveaxis(np.asarray(evaluation.label_ids, np.float64), 1, 0)
    error = forecast - truth
    mase, naive, seasonal = (float(np.nanmean(np.abs(guess - truth) / scale)) for guess in (forecast, last, season))
    return {
        "mae": float(np.nanmean(np.abs(error))),
        "rmse": float(np.sqrt(np.nanmean(error**2))),
        "mase": mase,
        "naive_mase": naive,
        "seasonal_mase": seasonal,
        "mase_below_naive": naive - mase,
        "mase_below_seasonal": seasonal - mase,
    }


def outcome_pairs(evaluation: EvalPrediction) -> dict[str, np.ndarray]:
    """Pair the forecast values of windows with the measured ones."""
    truth = np.asarray(evaluation.label_ids)[:, 0]
    measured = ~np.isnan(truth)
    forecast = np.asarray(evaluation.predictions)[measured]
    return {"predictions": forecast, "labels": truth[measured], "rows": np.nonzero(measured)[0]}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn forecasts ``[rows, horizon, targets]`` into columns of lists, by target."""
    return {
        f"{name}_forecast": list(predictions[:, :, place].astype(np.float32))
        for place, name in enumerate(data.info["targets"])
    }
