"""Cuts rows into train, validation and test: at random, with equal shares of all classes, by group, time or column.

split: {validation: 0.1, test: 0.2, by: stratified, seed: 0}
split: {by: group, column: patient}         all rows of one patient in one split
split: {by: time, column: day}              the newest rows are the test, those before them the validation; dates that
                                            can be read in two ways need their form: time_format: "%d.%m.%Y"
split: {by: column, column: fold}           the names of the splits stand in the data
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared.recipe_options import choose, require_choice

FIELD = "prepare.options.split"
WAYS = ("random", "stratified", "group", "time", "column")
DEFAULTS: dict[str, Any] = {
    "validation": 0.1,
    "test": 0.2,
    "by": "random",
    "column": None,
    "time_format": None,
    "seed": 0,
}

_ISO = "ISO8601"
_AT_ONCE = 100_000
_NUMERIC = re.compile(r"(\d{1,4})(\W)\s?\d{1,2}\2\s?(\d{1,4})(?!\d)")
_CLOCKS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M%p", "%I:%M:%S %p")
_CLOCK_FORMATS = ("%y", *map("".join, itertools.product(("%y ", "%y, ", "%yT"), _CLOCKS, ("", "%z", " %z"))))
_NAMED = ("%d-%b-%y", "%d %b %y", "%b-%Y", "%b-%y", "%B-%Y")  # which pandas does not guess, and databases write
_OF_DIGITS = {6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_DIGITS = re.compile(r"\d{7,8}")
_PERIOD = re.compile(r"\d{4}[- ]?[QW]\d{1,2}|[QW]\d{1,2}[- /]?\d{4}", re.IGNORECASE)  # a quarter or week
_ZONE = re.compile(r".*[T ][\d:.]+\s?(Z|UTC|GMT|[+-]\d\d:?(\d\d)?)")


def read_split(given: Mapping[str, Any], *, by: str, unclassed: str | None = None) -> dict[str, Any]:
    """The settings of a split, checked; `by` is the way where they do not say it.

    Args:
        unclassed: why rows cannot be cut by class; None: they can.

    Raises:
        ConfigError: an unknown setting, shares that leave nothing to train on, or a way without its column or class.
    """
    chosen = choose(given, {**DEFAULTS, "by": by}, field=FIELD)
    require_choice(chosen["by"], WAYS, field=f"{FIELD}.by")
    if chosen["by"] == "stratified" and unclassed is not None:
        remedy = f"Set {FIELD}.by to random, group, time or column."
        raise ConfigError(unclassed, field=f"{FIELD}.by", remedy=remedy)
    require_shares(chosen, given)
    needs_column = chosen["by"] in ("group", "time", "column")
    if needs_column != (chosen["column"] is not None):
        what = f"by: {chosen['by']} {'needs the name of a column' if needs_column else 'takes no column'}."
        remedy = "Set split.column." if needs_column else "Remove it, or set by to group, time or column."
        raise ConfigError(what, field=f"{FIELD}.column", value=chosen["column"], remedy=remedy)
    if chosen["time_format"] is not None and chosen["by"] != "time":
        what, remedy = "Only a split by time reads times.", "Remove it, or set split.by to time."
        raise ConfigError(what, field=f"{FIELD}.time_format", value=chosen["time_format"], remedy=remedy)
    return chosen


def require_train(files: Mapping[str, Any]) -> None:
    """Raise ConfigError for files of splits without one to train on."""
    if "train" not in files:
        remedy = "Name a file for it: prepare.options.files.train=FILE."
        raise ConfigError("There is no split 'train'.", field="prepare.options.files", value=list(files), remedy=remedy)


def require_shares(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for shares of validation and test that are none, or leave nothing to train on."""
    for name in ("validation", "test"):
        if not 0 <= chosen[name] < 1:
            remedy = "Give a share from 0 on and below 1."
            raise ConfigError("This is not a share.", field=f"{FIELD}.{name}", value=chosen[name], remedy=remedy)
    if chosen["validation"] + chosen["test"] >= 1:
        remedy = "Let validation and test together be below 1."
        raise ConfigError("Nothing is left to train on.", field=FIELD, value=dict(given), remedy=remedy)


def cut_rows(
    split: Mapping[str, Any],
    rows: int,
    *,
    labels: np.ndarray | None = None,
    keys: Sequence[str] = (),
    place: Callable[[int], str] = "row {}".format,
) -> dict[str, np.ndarray]:
    """The numbers of the rows of splits, ascending; a split with a share of 0 is left out.

    Args:
        split: as `read_split` returns it.
        labels: the numbers of the rows' classes, from 0 on, for equal shares.
        keys: the texts of the split's column.

    Raises:
        DataError: a split has no rows, or a text is not a time.
    """
    draw = np.random.default_rng(split["seed"])
    shares = {name: split[name] for name in ("test", "validation") if split[name] > 0}
    if split["by"] == "column":
        found = _by_column(keys)
    elif split["by"] == "time":
        form, column = split["time_format"], split["column"]
        times, _ = read_times(keys, form, setting=f"{FIELD}.time_format", column=column, place=place)
        found = _by_time(times, shares)
    elif split["by"] == "group":
        found = _by_group(keys, shares, draw)
    else:
        classes = np.zeros(rows, np.int8) if split["by"] == "random" or labels is None else labels
        found = _by_class(classes, shares, draw)
    for name, chosen in found.items():
        if not len(chosen):
            remedy = "Give more rows, or other shares (a share of 0 leaves a split out)."
            raise DataError(f"The split '{name}' gets none of the {counted(rows, 'row')}.", field=FIELD, remedy=remedy)
    order = [name for name in ("train", "validation", "test") if name in found]
    return {name: np.sort(found[name]) for name in (*order, *(name for name in found if name not in order))}


def _by_class(classes: np.ndarray, shares: Mapping[str, float], draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Every class is shuffled and cut by itself."""
    order = np.argsort(classes, kind="stable").astype(np.min_scalar_type(-len(classes)))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *shares)}
    for chosen in np.split(order, np.cumsum(np.bincount(classes))[:-1]):
        draw.shuffle(chosen)
        start = 0
        for name, share in shares.items():
            stop = start + round(len(chosen) * share)
            parts[name].append(chosen[start:stop])
            start = stop
        parts["train"].append(chosen[start:])
    return {name: np.concatenate(pieces) for name, pieces in parts.items()}


def _by_group(keys: Sequence[str], shares: Mapping[str, float], draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Groups are shuffled, and splits take whole ones until they have their shares of the rows."""
    members: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    waiting = [members[key] for key in draw.permutation(sorted(members))]
    found: dict[str, np.ndarray] = {}
    for name, share in shares.items():
        taken: list[int] = []
        # The last group is left for training.
        while len(waiting) > 1 and len(taken) < share * len(keys):
            taken += waiting.pop()
        found[name] = np.array(taken, np.int64)
    found["train"] = np.array([row for group in waiting for row in group], np.int64)
    return found


def _by_time(times: np.ndarray, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
    """The newest rows are the test. Rows of one time stay together, so none is older than one that was trained on."""
    order = np.argsort(times, kind="stable")
    found: dict[str, np.ndarray] = {}
    stop = len(order)
    for name, share in shares.items():
        start = max(stop - round(len(order) * share), 0)
        while 0 < start < stop and times[order[start - 1]] == times[order[start]]:
            start -= 1
        found[name], stop = order[start:stop], start
    found["train"] = order[:stop]
    return found


def _by_column(keys: Sequence[str]) -> dict[str, np.ndarray]:
    names = np.array(keys)
    found = {str(name): np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}
    if "train" not in found:
        what = f"No row has 'train' in the column of the splits; it has {', '.join(map(repr, list(found)[:5]))}."
        raise DataError(what, field=f"{FIELD}.column", remedy="Name a column whose values are train, validation, test.")
    return found


# -- times of a column as values that can be compared: dates in one form, or numbers ----------------------------------
def read_times(
    texts: Sequence[str], time_format: str | None, *, setting: str, column: str, place: Callable[[int], str]
) -> tuple[np.ndarray, str | None]:
    """Times as datetime64 of UTC, or float64 where all are numbers and no form is given, ``[rows]``; and their form.

    Args:
        time_format: their form, as for strptime; None: numbers, ISO 8601, or the one form that all of them have.
        setting, column, place: the option with the form, their column, and the places of rows, for errors.

    Raises:
        DataError: a text is not a time, or the column can be read in two ways.
    """
    remedy = f"Give the form in which times are written, such as {setting}=%d.%m.%Y."
    try:
        numbers = None if time_format else np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        numbers = None
    if numbers is not None and np.isfinite(numbers).all():
        if not _has_year_last(texts):
            return numbers, None
        what = f"The numbers of column '{column}', such as {texts[0]}, are dates that do not begin with the year."
        raise DataError(what, field=setting, remedy=remedy)
    fits: dict[str, np.ndarray] = {}
    wrong = 0
    for form in [time_format] if time_format else [_ISO, *find_forms(texts[0])]:
        times = parse_times(texts, form)
        if not (missing := np.flatnonzero(np.isnat(times))).size:
            fits[form] = times
            if form == _ISO:
                _refuse_some_zones(texts, setting=setting, column=column, place=place)
            if form in (time_format, _ISO):
                return times, form
        wrong = max(wrong, *missing[:1].tolist(), 0)
    if not fits:
        what = f"{place(wrong)}, column '{column}': '{texts[wrong][:40]}' is not a time"
        remedy = "Write its first day, such as 2024-01-01. " * bool(_PERIOD.fullmatch(texts[wrong])) + remedy
        what += f" of the form {time_format}." if time_format else ", or has another form than the times before it."
        raise DataError(what, field=setting, remedy=remedy)
    one, *others = fits.values()
    if differ := [row for other in others for row in np.flatnonzero(one != other)[:1].tolist()]:
        what = f"{place(differ[0])}, column '{column}': '{texts[differ[0]]}' can be read in {len(fits)} ways"
        raise DataError(f"{what} ({', '.join(fits)}), as can all times of the column.", field=setting, remedy=remedy)
    return one, next(iter(fits)) if len(fits) == 1 else None


def has_zone(text: str) -> bool:
    """Return whether a time ends with a time zone."""
    return _ZONE.fullmatch(text) is not None


def _refuse_some_zones(texts: Sequence[str], *, setting: str, column: str, place: Callable[[int], str]) -> None:
    zones = list(map(has_zone, texts))
    if len(set(zones)) > 1:
        row = zones.index(not zones[0])
        what = f"{place(row)}, column '{column}': of '{texts[0]}' and '{texts[row]}' only one has a time zone."
        raise DataError(what, field=setting, remedy="Write all times with a zone, or all without.")


def parse_times(texts: Sequence[str], form: str) -> np.ndarray:
    """Times ``[rows]``; NaT for a text of another form. Raises DataError for what is not a form."""
    parts = []
    for start in range(0, len(texts), _AT_ONCE):
        some = pd.Series(texts[start : start + _AT_ONCE], dtype="str")
        try:
            times = pd.to_datetime(some, format=form, errors="coerce", utc=True)
        except ValueError as error:
            what, remedy = f"This is not a form of times: {error}", "Give such as %d.%m.%Y."
            raise DataError(what, field="time_format", value=form, remedy=remedy) from error
        parts.append(times.dt.tz_localize(None).to_numpy())
    return np.concatenate(parts).astype("datetime64[us]")


def find_forms(text: str) -> list[str]:
    """The forms, as for strptime, in which a text can be a time."""
    match = _NUMERIC.match(text)
    if match is None:
        with warnings.catch_warnings(action="ignore"):  # about day and month, whose order is checked with all times
            guesses = [guess_datetime_format(text, dayfirst=first) for first in (False, True)]
        return [form for form in dict.fromkeys(guesses) if form is not None] or _fitting(text, _NAMED)
    between = re.split(r"\d+", match[0])[1]
    year = "%Y" if max(len(match[1]), len(match[3])) == 4 else "%y"
    dates = _fitting(match[0], map(between.join, itertools.permutations(("%d", "%m", year))))
    # No digit follows a date, so clocks are the same behind any.
    clocks = _fitting(f"00{text[match.end() :]}", _CLOCK_FORMATS if match.end() < len(text) else _CLOCK_FORMATS[:1])
    return [date + clock.removeprefix("%y") for date in dates for clock in clocks]


def _fitting(text: str, forms: Iterable[str]) -> list[str]:
    return [form for form in forms if not np.isnat(parse_times([text], form)[0])]


def _has_year_last(texts: Sequence[str]) -> bool:
    """Whether all texts are eight digits that are dates with the year at their end, and not at their beginning."""
    if not all(map(_DIGITS.fullmatch, texts)):
        return False
    dates = [text.zfill(8) for text in texts]
    return not _are_dates(dates, "%Y%m%d") and any(_are_dates(dates, form) for form in ("%d%m%Y", "%m%d%Y"))


def _are_dates(texts: Sequence[str], form: str) -> bool:
    """Whether all texts are dates of a form, from 1900 to 2100."""
    years = parse_times(texts, form).astype("datetime64[Y]").astype(np.int64) + 1970
    return bool(((years >= 1900) & (years <= 2100)).all())


def form_of_digits(values: Any) -> str | None:
    """The form in which all numbers are dates, such as 20240131, or times; None for none."""
    texts = [f"{value:.0f}" for value in values]
    form = _OF_DIGITS.get(len(texts[0]), "")
    return form if form and {*map(len, texts)} == {len(texts[0])} and _are_dates(texts, form) else None
