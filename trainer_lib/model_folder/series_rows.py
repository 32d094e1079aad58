"""A table of the steps of series as new rows: of each series the window from which its next steps are forecast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from trainer_lib.base.suggestions import counted
from trainer_lib.data.row_files import BadRow, Row, RowReader, read_rows
from trainer_lib.data.row_sources import FIELD
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.protocol.requests import ScoreRequest
from trainer_lib.recipes.table_cells import read_reading
from trainer_lib.recipes.table_files import read_table
from trainer_lib.recipes.time_series import Series, SeriesTable, window_columns


class SeriesReader(RowReader):
    """The windows of the series of a table, in the order in which the series begin there.

    Attributes:
        times: id -> the times that are forecast, as texts.
    """

    def __init__(self, request: ScoreRequest, info: Mapping[str, Any]) -> None:
        super().__init__((), {}, id_column=info["new_steps"]["series"])
        self._info, self._file = info, request.sources[0]
        table = self._read_table([file.address for file in request.sources])
        self.times: dict[int | str | None, list[str]] = {
            series.name or 0: table.times_after(series, info["horizon"]) for series in table.series
        }
        self._rows = [self._window(number, series) for number, series in enumerate(table.series)]

    @override
    def skip(self, rows: int) -> int:
        return len(list(self.take_all(rows)))

    @override
    def take_all(self, rows: int) -> Iterator[Row | BadRow]:
        for row in self._rows[self.position : self.position + rows]:
            self.position += 1
            yield row

    def _read_table(self, addresses: list[str]) -> SeriesTable:
        note, targets = self._info["new_steps"], self._info["targets"]
        try:
            table = read_table(addresses, rename=note["rename"], field=FIELD, read=note.get("read"))
            self.notes += table.notes
            for name in (columns := [*targets, *self._info["known"]]):
                table.require(name, field=FIELD)
            return SeriesTable(table, columns, note, targets=len(targets))
        except (ConfigError, DataError) as error:
            error.field = FIELD
            if isinstance(error, ConfigError) or "prepare." in str(error.remedy):
                error.remedy = "Correct the files: they are read as prepare read those of the training."
            raise

    def _window(self, number: int, series: Series) -> Row | BadRow:
        info, times, end = self._info, self.times[series.name or 0], len(series.times) - series.to_come
        of = f"The series '{series.name}'" if series.name else "The series"
        what, remedy = "", "Give more steps, or leave the series out."
        if end < info["context"]:
            what = f"{of} has {counted(end, 'step')}, and the model needs {info['context']}."
        elif info["known"] and series.to_come < len(times):
            names, span = " and ".join(f"'{name}'" for name in info["known"]), f"{times[0]} to {times[-1]}"
            what = (
                f"{of} has {series.to_come} of the next {len(times)} steps ({span}), and the model needs their {names}."
            )
            remedy = f"Append rows for {span} with an empty '{info['targets'][0]}' and these values."
        if what:
            error = DataError(what, field=FIELD, value=self._file.address, remedy=remedy)
            return BadRow(series.name or 0, self._file.address, error)
        values = series.values[end - info["context"] : end + len(times)].astype(np.float32)
        row: dict[str, Any] = {"time": times[0]} | ({"series": series.name} if series.name else {})
        row |= window_columns(values, info["context"], info["targets"], list(info["known"]))
        return Row(series.name or 0, row, self._file, number, None)


def read_series(request: ScoreRequest, info: Mapping[str, Any]) -> SeriesReader | None:
    """The windows, where the files have steps as those of `prepare` had; None: each row is one for the model.

    Raises:
        ConfigError: a setting is for rows. DataError: the steps cannot be read.
    """
    note, row = info["new_steps"], dict[str, str]()
    with contextlib.suppress(DataError):  # the reader of rows names a bad row, or counts it
        first = next(read_rows(request.sources, None, read_reading(note.get("read") or {})), ("", None))[1]
        values = first.items() if isinstance(first, Mapping) else ()
        row = {note["rename"].get(name, name): str(value).lstrip() for name, value in values}
    texts = [row[name] for name in (note["time"], *info["targets"]) if name in row]
    if not texts or any(text.startswith("[") for text in texts):  # a history is a list, in a CSV file one of JSON
        return None
    for field, value in (("--set", list(request.constants)), ("--id", request.id_column)):
        if value and value != note["series"]:
            what = "The files are a table of steps, and the setting is for files of rows."
            raise ConfigError(what, field=field, value=value, remedy="Leave it out: ids are the names of the series.")
    return SeriesReader(request, info)
