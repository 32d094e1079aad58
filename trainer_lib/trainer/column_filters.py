"""Collators that leave out columns, and the error when none is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.data.fetch import is_pure_collator
from trainer_lib.errors import ConfigError

_log = logging.getLogger(__name__)


class WithoutColumns:
    """A collator that drops from each sample the columns that the model does not take."""

    def __init__(self, collate: Callable[[list[Any]], Any], columns: set[str], described: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._columns = columns
        self._described = described
        self._logged = False

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of the samples' other columns. Raises ConfigError when none is left."""
        if not isinstance(samples[0], Mapping) or samples[0].keys() <= self._columns:
            return self.collate(samples)
        kept = [{name: value for name, value in row.items() if name in self._columns} for row in samples]
        if not kept[0]:
            raise no_column_left(samples[0], self._columns, self._described)
        if not self._logged and len(kept[0]) < len(samples[0]):
            self._logged = True
            dropped = ", ".join(sorted(set(samples[0]) - self._columns))
            _log.info("Columns of %s that the model's forward does not take are dropped: %s.", self._described, dropped)
        return self.collate(kept)


class WithoutColumn:
    """A collator that drops one column from each sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], column: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._column = column

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of the samples' other columns."""
        if isinstance(samples[0], Mapping) and self._column in samples[0]:
            samples = [{name: value for name, value in row.items() if name != self._column} for row in samples]
        return self.collate(samples)


def no_column_left(present: Any, columns: set[str], described: str) -> ConfigError:
    """The error for samples with the columns `present`, of which the model takes none."""
    return ConfigError(
        f"No column of {described} is a parameter of the model's forward ({', '.join(sorted(columns))}).",
        field="remove_unused_columns",
        value=", ".join(map(str, present)),
        remedy="Rename the columns, or set remove_unused_columns=False and give a data_collator.",
    )
