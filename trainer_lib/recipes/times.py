"""Times of a column as values that can be compared: dates in one form, or numbers."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from trainer_lib.errors import DataError

_ISO = "ISO8601"
_AT_ONCE = 100_000
_NUMERIC = re.compile(r"(\d{1,4})(\W)\s?\d{1,2}\2\s?(\d{1,4})(?!\d)")
_CLOCKS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M%p", "%I:%M:%S %p")
_CLOCK_FORMATS = ("", *("".join(each) for each in itertools.product((" ", ", ", "T"), _CLOCKS, ("", "%z", " %z"))))
_DIGITS = re.compile(r"\d{7,8}")


def read_times(
    texts: Sequence[str], time_format: str | None, *, setting: str, column: str, place: Callable[[int], str]
) -> tuple[np.ndarray, str | None]:
    """Times as datetime64 of UTC, or float64 where all are numbers and no form is given, ``[rows]``; and their form.

    Args:
        time_format: their form, as for strptime; None: numbers, ISO 8601, or the one form that all of them have.
        setting: the option that gives the form, for errors.
        column: their column, for errors.
        place: where a row is from, for errors.

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
    for form in [time_format] if time_format else [_ISO, *_find_forms(texts[0])]:
        times = _parse(texts, form)
        if not (missing := np.flatnonzero(np.isnat(times))).size:
            fits[form] = times
            if form in (time_format, _ISO):
                return times, form
        wrong = max(wrong, *missing[:1].tolist(), 0)
    if not fits:
        what = f"{place(wrong)}, column '{column}': '{texts[wrong][:40]}' is not a time"
        what += f" of the form {time_format}." if time_format else ", or has another form than the times before it."
        raise DataError(what, field=setting, remedy=remedy)
    one, *others = fits.values()
    if differ := [row for other in others for row in np.flatnonzero(one != other)[:1].tolist()]:
        what = f"{place(differ[0])}, column '{column}': '{texts[differ[0]]}' can be read in {len(fits)} ways"
        raise DataError(f"{what} ({', '.join(fits)}), as can all times of the column.", field=setting, remedy=remedy)
    return one, next(iter(fits)) if len(fits) == 1 else None


def _parse(texts: Sequence[str], form: str) -> np.ndarray:
    """Times ``[rows]``; NaT for a text of another form."""
    parts = []
    for start in range(0, len(texts), _AT_ONCE):
        some = pd.Series(texts[start : start + _AT_ONCE], dtype="str")
        parts.append(pd.to_datetime(some, format=form, errors="coerce", utc=True).dt.tz_localize(None).to_numpy())
    return np.concatenate(parts).astype("datetime64[us]")


def _find_forms(text: str) -> list[str]:
    """The forms, as for strptime, in which a text can be a time."""
    match = _NUMERIC.match(text)
    if match is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the order of day and month, which is checked with all times
            guesses = [guess_datetime_format(text, dayfirst=first) for first in (False, True)]
        return [each for each in dict.fromkeys(guesses) if each is not None]
    between = re.split(r"\d+", match[0])[1]
    year = "%Y" if max(len(match[1]), len(match[3])) == 4 else "%y"
    dates = [between.join(order) for order in itertools.permutations(("%d", "%m", year))]
    forms = [date + clock for date in dates for clock in _CLOCK_FORMATS]
    return [form for form in forms if not np.isnat(_parse([text], form)[0])]


def _has_year_last(texts: Sequence[str]) -> bool:
    """Whether all texts are eight digits that are dates with the year at their end, and not at their beginning."""
    if not all(map(_DIGITS.fullmatch, texts)):
        return False
    dates = [text.zfill(8) for text in texts]
    return not _are_dates(dates, "%Y%m%d") and any(_are_dates(dates, form) for form in ("%d%m%Y", "%m%d%Y"))


def _are_dates(texts: Sequence[str], form: str) -> bool:
    """Whether all texts are dates of a form, from 1900 to 2100."""
    years = _parse(texts, form).astype("datetime64[Y]").astype(np.int64) + 1970
    return bool(((years >= 1900) & (years <= 2100)).all())


def are_dates_of_digits(values: Any) -> bool:
    """Whether all numbers are dates such as 20240131."""
    texts = [f"{value:.0f}" for value in values]
    return all(len(text) == 8 for text in texts) and _are_dates(texts, "%Y%m%d")
